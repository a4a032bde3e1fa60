"""Fuzz targets with sessions: handshake and traffic of both ends, message by message, checked by an independent model."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

from dpcfl_net.adversaries import fuzz_bytes
from dpcfl_net.adversaries.fuzz_readers import Finding, require
from dpcfl_net.adversaries.fuzz_sockets import FakePoller, FakeSocket, fake_sockets
from dpcfl_net.adversaries.fuzz_speakers import JOB, KINDS, RESULTS, RUN, TASKS, Said, Speaker, arrays_for, framed
from dpcfl_net.adversaries.fuzz_witness import Connection, bounded, received, require_delivered, require_small
from dpcfl_net.core.errors import Refused
from dpcfl_net.transport import client, client_events, messages, server
from dpcfl_net.transport.channel import RECENT_MESSAGES
from dpcfl_net.transport.message_log import CLIENT_PREFIX
from dpcfl_net.transport.peers import ServerEvent
from dpcfl_net.transport.sockets import Link

KEYS = {number: f"key of client {number}" for number in range(3)}
NEVER = 1e9  # seconds
LENGTHS = (20, 60, 200)  # messages in a session


class Servers:
    """Sessions with a coordinator's end: three clients, two of them on two connections each, and strangers."""

    name, share = "server", 0.15

    def run(self, rng: Random, counts: Counter[str]) -> int:
        with fake_sockets():
            return _converse(ServerSession(rng, counts), rng.choice(LENGTHS))


class Clients:
    """Sessions with a worker's end, whose coordinator has the right key and is hostile."""

    name, share = "client", 0.1

    def run(self, rng: Random, counts: Counter[str]) -> int:
        with fake_sockets():
            return _converse(ClientSession(rng, counts), rng.choice(LENGTHS))


def _converse(session: ServerSession | ClientSession, count: int) -> int:
    for done in range(count):
        if not session.step():
            return done + 1
    require_small(session.end)
    return count


class ServerSession:
    """A server's end, its peers, and the expected state: connections and open tasks."""

    def __init__(self, rng: Random, counts: Counter[str]) -> None:
        self.rng, self.counts = rng, counts
        self.end = server.ServerEndpoint(
            "tcp://127.0.0.1:0", Link(RUN, JOB, ("public", "secret")), clients=KEYS, result_template=RESULTS.get,
            check=lambda number, task, tensors: bounded(tensors), times=server.ServerTimes(NEVER, rng.choice((0.0, NEVER))),
        )  # fmt: skip
        self.socket: Any = self.end._line.socket
        self.speakers = [Speaker(rng, b"route %d" % k, KEYS[k % 3], k % 3) for k in range(5)]
        self.speakers += [Speaker(rng, b"stranger", "key of a stranger", 1), Speaker(rng, b"unauthenticated", "", 2)]
        self.tasks: dict[str, tuple[int, int, str]] = {}
        self.connections: dict[int, Connection] = {}
        self.boots: dict[int, list[str]] = {number: [] for number in KEYS}
        self.hellos: dict[str, tuple[int, bytes, messages.Header]] = {}
        self.earlier: list[list[bytes]] = []

    def step(self) -> bool:
        """Let the owner act at random, feed one message, and check the outcome."""
        if self.rng.random() < 0.15:
            self._own()
        speaker = self.rng.choice(self.speakers[:3] if self.rng.random() < 0.7 else self.speakers)
        frames = self._message(speaker)
        self.hear(speaker, frames)
        return True

    def hear(self, speaker: Speaker, frames: list[bytes]) -> None:
        """Feed one message and check the outcome."""
        self._note(speaker, frames)
        self.socket.feed([speaker.route, *frames], speaker.user)
        before = Counter(self.end.failures)
        try:
            events = self.end.poll(0)
        except Exception as error:
            raise Finding(f"the server raised {type(error).__name__}", frames) from error
        broken = Counter(self.end.failures) - before
        self.counts.update("client's own" if code.startswith(CLIENT_PREFIX) else code for code in broken.elements())
        self.counts["accepted"] += not broken
        for event in events:
            if event.kind == "left":
                self.connections.pop(event.client or 0, None)
        self._look_at_answers()
        for event in events:
            self._check_event(event)

    def _own(self) -> None:
        number, pick = self.rng.randrange(3), self.rng.random()
        if pick < 0.8:
            self.ask(number, self.rng.randrange(4), self.rng.choice(KINDS))
        elif pick < 0.9:
            self.end.cancel(number)
            self._close(number)
        else:
            self.reconnect(self.rng.choice(self.speakers))

    def ask(self, number: int, t: int, task: str) -> str:
        """Give a client a task in place of its open one; returns its message id."""
        self._close(number)
        name = self.end.send_task(number, t, task, arrays_for(self.rng, TASKS[task], honest=True))
        self.tasks[name] = (number, t, task)
        return name

    def reconnect(self, speaker: Speaker) -> None:
        """End the speaker's connection and start another."""
        self.socket.gone.add(speaker.route)
        speaker.route = b"route %d" % self.rng.getrandbits(60)
        speaker.renew()

    def _close(self, number: int) -> None:
        self.tasks = {name: task for name, task in self.tasks.items() if task[0] != number}

    def _message(self, speaker: Speaker) -> list[bytes]:
        """The speaker's next message; most likely what the protocol expects."""
        rng, pick = self.rng, self.rng.random()
        if self.earlier and rng.random() < 0.04:
            return rng.choice(self.earlier)  # the same bytes again, from any speaker
        connection = self.connections.get(speaker.number)
        due = next((name for name, task in self.tasks.items() if task[0] == speaker.number), fuzz_bytes.word(rng, 32))
        chunk: bytes | None = None
        if (connection is None or connection.boot != speaker.boot) and pick < 0.7:
            if rng.random() < 0.3:
                speaker.renew()
            said = speaker.say("HELLO", client=speaker.number)
        elif speaker.owed and pick < 0.8:
            said, chunk = speaker.chunk()
        elif pick < 0.85:
            said = self._result(speaker, due)
        elif pick < 0.88:
            said, chunk = speaker.chunk()
        else:
            said = speaker.aside(("HELLO", "ACK", "CREDIT", "HEARTBEAT", "HEARTBEAT", "ERROR", "BYE", "WELCOME"), due)
        frames = framed(rng, said, chunk)
        self.earlier = [*self.earlier[-50:], frames]
        return frames

    def _result(self, speaker: Speaker, due: str) -> Said:
        _, t, task = self.tasks.get(due, (0, 1, "train"))
        status = self.rng.choice(("release", "release", "release", *messages.STATUSES))
        arrays = arrays_for(self.rng, RESULTS[task]) if status == "release" or self.rng.random() < 0.1 else {}
        return speaker.announce("RESULT", arrays, parent=due, round=t, task=task, code=status)

    def _note(self, speaker: Speaker, frames: list[bytes]) -> None:
        """Record a message from a key of the roster."""
        message = received(frames)
        number = next((number for number, key in KEYS.items() if key == speaker.user), None)
        if message is None or number is None:
            return
        connection = self.connections.get(number)
        if message.header.kind == "HELLO":
            self.hellos[message.header.id] = (number, speaker.route, message.header)
        elif message.whole and connection is not None and connection.route == speaker.route:
            connection.hear(message)

    def _look_at_answers(self) -> None:
        for route, data, *_ in self.socket.taken():
            answer = messages.decode(data)
            if answer.kind == "WELCOME":
                require(answer.parent in self.hellos, "WELCOME without a HELLO with a known key, run and job", answer)
                self._accept(route, *self.hellos[answer.parent])

    def _accept(self, route: bytes, number: int, hello_route: bytes, hello: messages.Header) -> None:
        connection = self.connections.get(number)
        require(route == hello_route, "WELCOME on another connection than HELLO", hello)
        if connection is not None and (connection.route, connection.boot) == (route, hello.boot):
            require(hello.sequence > connection.sequence, "WELCOME for a HELLO that is not new", hello)
            connection.sequence = hello.sequence
            return
        alone = connection is None or connection.route == route or connection.route in self.socket.gone
        require(alone, "a second connection was accepted while the first one exists", hello)
        require(hello.boot not in self.boots[number][-RECENT_MESSAGES:], "a boot id was accepted a second time", hello)
        self.boots[number].append(hello.boot)
        self.connections[number] = Connection(route, hello.boot, hello.sequence)

    def _check_event(self, event: ServerEvent) -> None:
        if event.kind == "failed":
            self.tasks.pop(event.id, None)
        if event.kind != "result":
            return
        task, connection = self.tasks.pop(event.id, None), self.connections.get(event.client or 0)
        require(task == (event.client, event.round, event.task), "a result that does not match the open task", event)
        require(connection is not None, "a result of a client that was not accepted", event)
        assert connection is not None
        expected = ("RESULT", event.id, event.round, event.task, event.status)
        announcements = [
            one
            for one in connection.announcements.values()
            if (one.header.kind, one.header.parent, one.header.round, one.header.task, one.header.code) == expected
        ]
        require_delivered(announcements, RESULTS[event.task] if event.status == "release" else {}, event.tensors)
        self.counts["delivered"] += 1


class ClientSession:
    """A client's end, its coordinator, and the expected state: WELCOME, offered and answered tasks."""

    def __init__(self, rng: Random, counts: Counter[str]) -> None:
        self.rng, self.counts = rng, counts
        nowhere: Any = object()
        self.end = client.ClientEndpoint(
            "tcp://127.0.0.1:1", Link(RUN, JOB, ("public", "secret"), "key", context=nowhere), client=1,
            task_template=TASKS.get, check=lambda task, tensors: bounded(tensors),
            times=client_events.ClientTimes(heartbeat_s=NEVER, resend_s=rng.choice((0.0, NEVER)), orphan_timeout_s=NEVER),
        )  # fmt: skip
        self.socket: FakeSocket = self.end._socket  # type: ignore[assignment]
        self.end._poller = FakePoller(self.socket)  # type: ignore[assignment]
        self.speaker = Speaker(rng)
        self.earlier: list[list[bytes]] = []
        self.waiting: list[str] = []
        self.answered: set[str] = set()
        self.sent: list[str] = []
        self.connect()

    def connect(self) -> None:
        """Start a new connection, on which the endpoint says HELLO."""
        self.end._connected = self.end.welcomed = False
        self.end._greet()
        self.end.poll(0)
        self.hellos = {messages.decode(data).id for data, *_ in self.socket.taken()}
        self.connection: Connection | None = None
        self.speaker.renew()

    def step(self) -> bool:
        """Let the owner act at random, then feed one message; False if the endpoint has left its coordinator."""
        if self.rng.random() < 0.2:
            self._own()
        return self.hear(self._message())

    def hear(self, frames: list[bytes]) -> bool:
        """Feed one message and check the outcome."""
        message, before = received(frames), Counter(self.end.failures)
        answer = message is not None and message.header.kind == "WELCOME" and message.header.parent in self.hellos
        if self.connection is not None and message is not None:
            self.connection.hear(message)
        self.socket.feed(frames)
        try:
            events = self.end.poll(0)
        except Refused as error:
            require(self.connection is None, "the client left a coordinator after WELCOME", frames)
            self.counts[error.code] += 1
            return False
        except Exception as error:
            raise Finding(f"the client raised {type(error).__name__}", frames) from error
        self.counts.update((Counter(self.end.failures) - before) or {"accepted": 1})
        self.sent = [*self.sent[-20:], *(messages.decode(data).id for data, *_ in self.socket.taken())]
        for event in events:
            if event.kind == "welcome":
                require(
                    answer and message is not None and self.connection is None,
                    "accepted a WELCOME that does not answer its HELLO",
                    frames,
                )
                assert message is not None
                self.connection = Connection(b"", message.header.boot, message.header.sequence)
            elif event.kind == "task":
                self._check_event(event)
        return True

    def _own(self) -> None:
        """Answer a task, report a phase, or break the connection."""
        pick = self.rng.random()
        if self.waiting and pick < 0.7:
            name = self.waiting.pop(0)
            self.answered.add(name)
            self.end.send_result(
                name, *self.rng.choice((("refused",), ("lost",), ("release", arrays_for(self.rng, RESULTS["train"], True))))
            )
        elif pick < 0.9:
            self.end.heartbeat(self.rng.choice(messages.PHASES))
        else:
            self.connect()

    def _message(self) -> list[bytes]:
        """The coordinator's next message; most likely what the protocol expects."""
        rng, speaker, pick = self.rng, self.speaker, self.rng.random()
        chunk: bytes | None = None
        if self.earlier and rng.random() < 0.04:
            return rng.choice(self.earlier)
        if self.connection is None and pick < 0.8:
            kind = "WELCOME" if rng.random() < 0.97 else "ERROR"
            said = speaker.say(kind, parent=rng.choice([*self.hellos, fuzz_bytes.word(rng, 32)]))
        elif speaker.owed and pick < 0.8:
            said, chunk = speaker.chunk()
        elif pick < 0.85:
            task = rng.choice(KINDS)
            said = speaker.announce("TASK", arrays_for(rng, TASKS[task]), round=rng.randrange(4), task=task)
            if self.answered and rng.random() < 0.2:
                said["id"] = rng.choice(sorted(self.answered))
        elif pick < 0.88:
            said, chunk = speaker.chunk()
        else:
            said = speaker.aside(
                ("ACK", "ACK", "CREDIT", "HEARTBEAT", "ERROR", "BYE", "WELCOME", "HELLO"), rng.choice(self.sent or [""])
            )
        frames = framed(rng, said, chunk)
        self.earlier = [*self.earlier[-50:], frames]
        return frames

    def _check_event(self, event: client_events.ClientEvent) -> None:
        """Check a delivered task."""
        require(self.connection is not None, "a task before a WELCOME", event)
        assert self.connection is not None
        require(event.id not in self.answered, "a task was delivered again after its answer", event)
        announcement = self.connection.announcements.get(event.id)
        said = None if announcement is None else (announcement.header.kind, announcement.header.round, announcement.header.task)
        require(said == ("TASK", event.round, event.task), "a task that differs from the one that the coordinator sent", event)
        assert announcement is not None
        require_delivered([announcement], TASKS[event.task], event.tensors)
        self.waiting.append(event.id)
        self.counts["delivered"] += 1
