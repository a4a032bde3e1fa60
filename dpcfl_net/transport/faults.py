"""Seeded faults of the messages between coordinator and clients, injected at the coordinator's end in both directions."""

from __future__ import annotations

import hashlib
import random
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from dpcfl_net.transport.messages import Header, WireError, decode

Direction = Literal["up", "down"]
Rounds = tuple[int, int]
Forward = Callable[[bytes | memoryview, bytes | memoryview | None], bool]
OVERTAKEN_S = 0.5  # longest wait of a reordered message for the one that overtakes it
KNOWN = 1 << 16  # ids of messages kept to name their chunks and acknowledgements
OLD_ROUNDS = 3  # rounds of a client after which attempts are forgotten
PARTITION = "partition"


@dataclass(frozen=True)
class MessageRule:
    """Faults of some messages; each rate is the probability per message.

    Attributes:
        clients: Client ids; None: all.
        direction: "up" to the coordinator, "down" from it, or "both".
        rounds: First and last round, inclusive; None: all.
        kinds: Kinds of messages in lower case; chunks count as the message that they belong to.
        drop: Rate of messages that are lost.
        duplicate: Rate of messages that arrive twice.
        delay: Rate of messages that arrive late; later messages wait for them.
        delay_s: Shortest and longest delay, seconds.
        reorder: Rate of messages that the next message overtakes.
        corrupt: Rate of messages in which one bit is flipped.
    """

    clients: tuple[int, ...] | None = None
    direction: Literal["up", "down", "both"] = "both"
    rounds: Rounds | None = None
    kinds: tuple[str, ...] = ("task", "result", "ack")
    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    delay_s: tuple[float, float] = (0.0, 0.0)
    reorder: float = 0.0
    corrupt: float = 0.0

    def covers(self, message: Message) -> bool:
        """Return whether the rule applies to a message."""
        return (
            (self.clients is None or message.client in self.clients)
            and self.direction in ("both", message.direction)
            and (self.rounds is None or self.rounds[0] <= message.round <= self.rounds[1])
            and message.kind in self.kinds
        )


@dataclass(frozen=True)
class Partition:
    """Clients that the coordinator cannot reach in some rounds: nothing passes in either direction.

    Attributes:
        clients: Client ids; None: all.
        rounds: First and last round, inclusive.
    """

    clients: tuple[int, ...] | None
    rounds: Rounds


@dataclass(frozen=True)
class MessageFaults:
    """All message faults of a run.

    Attributes:
        seed: Seed of the draws.
        rules: The first rule that covers a message applies to it.
        partitions: Partitions.
    """

    seed: int
    rules: tuple[MessageRule, ...] = ()
    partitions: tuple[Partition, ...] = ()


class Message(NamedTuple):
    """Identity of a message in every replay; no field is random or depends on time."""

    client: int
    direction: Direction
    kind: str
    round: int
    task: str
    part: int  # -1: the header; otherwise the chunk
    attempt: int  # from 1


@dataclass(frozen=True)
class Fault:
    """An injected fault.

    Attributes:
        what: "drop", "duplicate", "delay", "reorder", "corrupt" or "partition".
        message: The message; of a partition the first one that it stopped in this round and direction.
        seconds: Length of a delay.
    """

    what: str
    message: Message
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """The fault in words, as "drop up result chunk 0 attempt 1"; equal in every replay."""
        message = self.message
        if self.what == PARTITION:
            return f"{PARTITION} {message.direction}"
        part = f" chunk {message.part}" if message.part >= 0 else ""
        return f"{self.what} {message.direction} {message.kind}{part} attempt {message.attempt}"


class Dice(NamedTuple):
    """The draws of one message, uniform in [0, 1); all are drawn, so that one rate does not move the faults of another."""

    drop: float
    duplicate: float
    delay: float
    seconds: float
    reorder: float
    corrupt: float
    seed: float  # of the damaged position


def draw(seed: int, message: Message) -> Dice:
    """Draw the faults of a message from its own generator, so that a replay draws the same whenever it is sent."""
    digest = hashlib.sha256(repr((seed, *message)).encode()).digest()
    generator = random.Random(int.from_bytes(digest))
    return Dice(*(generator.random() for _ in Dice._fields))


@dataclass(eq=False)
class _Held:
    """A message on its way."""

    due: float
    data: bytes | memoryview
    chunk: bytes | memoryview | None
    forward: Forward
    overtaken: bool = False  # waits for the next message, which passes first


class FaultInjector:
    """Carries messages with faults; without faults an endpoint has none.

    Args:
        faults: The faults.
        on_fault: Called with each fault.
        clock: Monotonic seconds.

    Attributes:
        round: Round of the newest task; messages that name no round belong to it.
    """

    def __init__(
        self, faults: MessageFaults, on_fault: Callable[[Fault], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.round = 0
        self._faults, self._on_fault, self._clock = faults, on_fault, clock
        self._links: dict[tuple[int, Direction], deque[_Held]] = {}  # those with messages on their way
        self._known: OrderedDict[str, tuple[str, int, str]] = OrderedDict()  # message id to kind, round and task
        self._attempts: defaultdict[int, Counter[tuple[str, str, int, str, int]]] = defaultdict(Counter)  # by client
        self._parted: set[tuple[int, Direction, int]] = set()

    def begin(self, round: int) -> None:
        """Note that tasks of a round are sent.

        Args:
            round: The round.
        """
        if round != self.round:
            old = round - OLD_ROUNDS
            self._parted = {key for key in self._parted if key[2] > old}
            self.round = round

    def carry(
        self,
        direction: Direction,
        client: int,
        header: Header,
        data: bytes | memoryview,
        chunk: memoryview | None,
        forward: Forward,
    ) -> None:
        """Take a message and forward it, now or later, once, twice or never.

        Args:
            direction: "up" to the coordinator, "down" from it.
            client: The client.
            header: Its header.
            data: Bytes of the header.
            chunk: Its chunk.
            forward: Called with header and chunk; returns False if the receiver takes none now.
        """
        message = self._identify(direction, client, header)
        if self._is_parted(message):
            return
        rule = next((rule for rule in self._faults.rules if rule.covers(message)), None)
        held = _Held(self._clock(), data, chunk, forward)
        copies = 1 if rule is None else self._apply(rule, message, held)
        link = self._links.setdefault((client, direction), deque())
        for _ in range(copies):
            self._enqueue(link, held)
        self._release(client, direction)
        if any(other is held for other in link):  # buffers of the socket and of the sender may change meanwhile
            held.data, held.chunk = bytes(held.data), None if held.chunk is None else bytes(held.chunk)

    def release(self) -> bool:
        """Forward what is due; return whether messages are left."""
        for client, direction in list(self._links):
            self._release(client, direction)
        return bool(self._links)

    def _apply(self, rule: MessageRule, message: Message, held: _Held) -> int:
        """Apply a rule to a message; return how many times it arrives."""
        dice = draw(self._faults.seed, message)
        if dice.drop < rule.drop:
            self._on_fault(Fault("drop", message))
            return 0
        if dice.corrupt < rule.corrupt:
            held.data, held.chunk = damaged(held.data, held.chunk, random.Random(dice.seed))
            self._on_fault(Fault("corrupt", message))
        if dice.delay < rule.delay:
            shortest, longest = rule.delay_s
            seconds = shortest + dice.seconds * (longest - shortest)
            held.due += seconds
            self._on_fault(Fault("delay", message, seconds))
        if dice.reorder < rule.reorder:
            held.overtaken = True
            held.due += OVERTAKEN_S
            self._on_fault(Fault("reorder", message))
        if dice.duplicate < rule.duplicate:
            self._on_fault(Fault("duplicate", message))
            return 2
        return 1

    def _enqueue(self, link: deque[_Held], held: _Held) -> None:
        last = link[-1] if link else None
        if last is None or not last.overtaken or last is held:
            link.append(held)
            return
        last.overtaken, last.due = False, held.due
        link[-1] = held
        link.append(last)

    def _release(self, client: int, direction: Direction) -> None:
        """Forward what is due in order."""
        link, now = self._links[client, direction], self._clock()
        while link and link[0].due <= now and link[0].forward(link[0].data, link[0].chunk):
            link.popleft()
        if not link:  # each tick looks at all links that are here
            del self._links[client, direction]

    def _is_parted(self, message: Message) -> bool:
        """True if a partition stops a message; the first one in a round and direction is reported."""
        for partition in self._faults.partitions:
            first, last = partition.rounds
            if first <= self.round <= last and (partition.clients is None or message.client in partition.clients):
                key = message.client, message.direction, self.round
                if key not in self._parted:
                    self._parted.add(key)
                    self._on_fault(Fault(PARTITION, message._replace(round=self.round)))
                return True
        return False

    def _identify(self, direction: Direction, client: int, header: Header) -> Message:
        kind, part = header.kind.lower(), -1
        about = kind, self.round, ""
        if header.kind in ("TASK", "RESULT"):
            about = kind, header.round, header.task
            self._known[header.id] = about
            if len(self._known) > KNOWN:
                self._known.popitem(last=False)
        elif header.kind in ("CHUNK", "ACK", "CREDIT"):
            parent, round, task = self._known.get(header.parent, about)
            about = kind if header.kind != "CHUNK" else parent, round, task
            part = header.index if header.kind == "CHUNK" else -1
        attempts = self._attempts[client]
        if header.kind == "TASK":  # not with a task of another client, which may be many rounds ahead
            for old in [key for key in attempts if key[2] <= header.round - OLD_ROUNDS]:
                del attempts[old]
        key = (direction, *about, part)
        attempts[key] += 1
        return Message(client, direction, *about, part, attempts[key])


def damaged(
    data: bytes | memoryview, chunk: bytes | memoryview | None, generator: random.Random
) -> tuple[bytes | memoryview, bytes | memoryview | None]:
    """Flip one bit of a message in a way that its receiver can detect: in its chunk, or so that its header is no header.

    CURVE authenticates every frame, so that only a broken sender damages a message. A header that still reads well after damage
    is what a hostile peer may send, which is not a fault but an attack.

    Args:
        data: Bytes of the header.
        chunk: Its chunk.
        generator: Draws the position.

    Returns:
        Header and chunk.
    """
    if chunk is not None and len(chunk):
        return data, _flipped(chunk, generator)
    while True:
        changed = _flipped(data, generator)
        try:
            decode(changed)
        except WireError:
            return changed, chunk


def _flipped(data: bytes | memoryview, generator: random.Random) -> bytes:
    changed = bytearray(data)
    changed[generator.randrange(len(changed))] ^= 1 << generator.randrange(8)
    return bytes(changed)
