"""One direction of a relayed connection: bytes leave at the rate of the client's link and arrive after its delay."""

from __future__ import annotations

import asyncio
import math
import socket
from collections import deque
from collections.abc import Callable
from random import Random

from dpcfl_net.transport.links.link import MSS_BYTES, Direction
from dpcfl_net.transport.links.schedule import Schedule

# Queue before the bottleneck, as in a router: while the process waits for a processor, the queue keeps the link busy. A longer
# one would hide a slow link from the sender, and let a short message wait longer behind a model.
QUEUE_S = 0.1
LEAST_QUEUE, MOST_QUEUE = 16 << 10, 1 << 20  # bytes
MOST_KERNEL_BUFFER = 256 << 10  # bytes that TCP may hold before the queue
MOST_BUFFERED = 64 << 20  # bytes in one direction of a connection; a larger rate times delay is not reached
CHUNK_S = 0.008
MOST_CHUNK = 44  # packets; a chunk arrives as a whole, and each costs two wakes
MOST_CHUNKS = 8_192  # in one direction of a connection: short chunks need more memory than their bytes
GATHERED = 64  # chunks in one system call


class Bottleneck:
    """One direction of a client's link, shared by its connections: a queue in order of arrival, served at the link's rate.

    The time at which a chunk has been served is computed when it arrives, so late wakes of the process add up to no error.

    Args:
        schedule: The client's link.
        direction: "up" or "down".
        random: Source of jitter and losses.
    """

    def __init__(self, schedule: Schedule, direction: Direction, random: Random) -> None:
        self._schedule, self._direction, self._random = schedule, direction, random
        self._free_s = 0.0
        rate = schedule.most_bps(direction) / 8  # bytes per second
        round_trips = 3 if schedule.link.loss else 1  # a lost packet waits for one round trip more
        in_flight = (
            rate * round_trips * (schedule.most_latency_s() + schedule.link.jitter_s) if schedule.most_latency_s() else 0
        )
        # Whole packets: the rest of a chunk would count as one packet more that may be lost.
        self.chunk = MSS_BYTES * math.ceil(min(MOST_CHUNK, rate * CHUNK_S / MSS_BYTES))
        self.queue = int(min(MOST_QUEUE, max(LEAST_QUEUE, rate * QUEUE_S)))
        self.kernel_buffer = min(self.queue, MOST_KERNEL_BUFFER)
        self.limit = int(min(MOST_BUFFERED, in_flight + self.queue))

    def admit(self, size: int, now_s: float) -> float:
        """Queue `size` bytes that arrive at `now_s`; returns the time when they arrive at the other end."""
        self._free_s = self._schedule.sent_at(size, self._direction, max(now_s, self._free_s))
        link = self._schedule.link_at(self._free_s)
        delay_s = link.latency_s
        if link.jitter_s:
            delay_s += link.jitter_s * self._random.uniform(-1, 1)
        if link.loss and self._random.random() < link.lost(size):
            delay_s += 2 * link.latency_s
        return self._free_s + delay_s


class Pipe:
    """Copies one direction of a connection, with a bounded delay line between its two sockets.

    Args:
        source: Socket to read; without blocking.
        target: Socket to write; without blocking.
        bottleneck: The client's link in this direction.
        clock: Seconds since the start of the run.
        count: Called with the number of bytes written.
        ended: Called once after the end of the stream was passed on (None), or with the error of a socket.
    """

    def __init__(
        self,
        source: socket.socket,
        target: socket.socket,
        bottleneck: Bottleneck,
        clock: Callable[[], float],
        count: Callable[[int], None],
        ended: Callable[[OSError | None], None],
    ) -> None:
        self._source, self._target, self._bottleneck = source, target, bottleneck
        self._clock, self._count, self._ended = clock, count, ended
        self._loop = asyncio.get_running_loop()
        self._line: deque[tuple[float, memoryview]] = deque()  # arrival at the other end, in seconds of the run; bytes
        self._buffered, self._last_s = 0, 0.0
        self._end_s: float | None = None  # when the end of the stream arrives at the other end
        self._timer: asyncio.TimerHandle | None = None
        self._reading = self._blocked = False
        self._read_on()

    def close(self) -> None:
        """Stop; the sockets stay open."""
        self._line.clear()
        self._loop.remove_reader(self._source)
        self._loop.remove_writer(self._target)
        if self._timer is not None:
            self._timer.cancel()

    def _read_on(self) -> None:
        """Read if there is room, else leave the bytes to the sender's TCP."""
        room = self._buffered < self._bottleneck.limit and len(self._line) < MOST_CHUNKS and self._end_s is None
        if room and not self._reading:
            self._loop.add_reader(self._source, self._read)
        elif self._reading and not room:
            self._loop.remove_reader(self._source)
        self._reading = room

    def _read(self) -> None:
        try:
            data = self._source.recv(self._bottleneck.chunk)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._ended(error)
            return
        self._last_s = max(self._last_s, self._bottleneck.admit(len(data), self._clock()))  # the order is kept
        if data:
            self._line.append((self._last_s, memoryview(data)))
            self._buffered += len(data)
        else:
            self._end_s = self._last_s
        self._read_on()
        self._wake_at_next()

    def _wake_at_next(self) -> None:
        """Set the timer to the next arrival, unless it is set already or the other end does not read."""
        next_s = self._line[0][0] if self._line else self._end_s
        if self._timer is None and not self._blocked and next_s is not None:
            self._timer = self._loop.call_later(max(0.0, next_s - self._clock()), self._deliver)

    def _deliver(self) -> None:
        """Write all that has arrived, and end the stream after it."""
        self._timer = None
        if self._blocked:
            self._blocked = False
            self._loop.remove_writer(self._target)
        try:
            self._write_arrived()
            if self._end_s is not None and not self._line and self._end_s <= self._clock():
                self._target.shutdown(socket.SHUT_WR)
                self._ended(None)
                return
        except OSError as error:
            self._ended(error)
            return
        self._read_on()
        self._wake_at_next()

    def _write_arrived(self) -> None:
        now_s = self._clock()
        while due := _due(self._line, now_s):
            try:
                written = self._target.sendmsg(due)
            except (BlockingIOError, InterruptedError):
                self._blocked = True
                self._loop.add_writer(self._target, self._deliver)
                return
            self._buffered -= written
            self._count(written)
            _drop(self._line, written)


def _due(line: deque[tuple[float, memoryview]], now_s: float) -> list[memoryview]:
    """First chunks that have arrived, for one system call."""
    found: list[memoryview] = []
    for arrival_s, data in line:
        if arrival_s > now_s or len(found) == GATHERED:
            break
        found.append(data)
    return found


def _drop(line: deque[tuple[float, memoryview]], written: int) -> None:
    """Remove the first `written` bytes."""
    while written:
        arrival_s, data = line.popleft()
        if written < len(data):
            line.appendleft((arrival_s, data[written:]))
            return
        written -= len(data)
