"""Roster of a job: a file with a line of canonical JSON for each client, which the signed protocol names by its hash."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from pydantic import (
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_serializer,
)

from dpcfl_net.core.canonical import canonical_json
from dpcfl_net.core.errors import Refused
from dpcfl_net.core.files import lines_of, opened
from dpcfl_net.core.frozen import FrozenModel, invalid_fields
from dpcfl_net.core.lazy_sequence import LazySequence

MOST_EPSILON = 100_000.0
BLOCK = 128  # lines that are read, hashed and parsed together
LONGEST_LINE = 1 << 20  # bytes
_OMITTED = ("rounds", "identity", "epsilon")  # fields that are left out if unset
_KEPT = 4096  # entries that were read last


class ClientEntry(FrozenModel):
    """One client of the roster.

    Attributes:
        id: Client id.
        public_key: CURVE public key.
        records: Number of training records N_i; public.
        validation_records: Number of validation records; public.
        noise_multiplier: z_i, noise deviation over clip norm for a sum; None if the client adds no noise.
        rounds: Spans (from, to) of rounds in which the client is there, in order; None: it is always there.
        identity: Ed25519 public key, 64 hex digits, which signs the client's messages of a secure sum; None without secure
            aggregation.
        epsilon: Target epsilon of this client; None: that of the job.
    """

    id: int = Field(ge=0)
    public_key: str
    records: int = Field(ge=1)
    validation_records: int = Field(default=0, ge=0)
    noise_multiplier: float | None = Field(gt=0)
    rounds: list[tuple[int, int]] | None = None
    identity: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    epsilon: float | None = Field(default=None, ge=1e-9, le=MOST_EPSILON, allow_inf_nan=False)

    @field_validator("rounds")
    @classmethod
    def _ordered(cls, spans: list[tuple[int, int]] | None) -> list[tuple[int, int]] | None:
        if spans is None:
            return None
        ends = [0, *(t for span in spans for t in span)]
        if not spans or any(a > b or (a == b and k % 2 == 0) for k, (a, b) in enumerate(pairwise(ends))):
            raise ValueError("must be None or disjoint spans (from, to) in order, from 1")
        return spans

    @model_serializer(mode="plain")
    def _without_unused_fields(self) -> dict[str, Any]:
        # Omit these fields when unset so that the hash is unchanged.
        return {key: value for key, value in self.__dict__.items() if value is not None or key not in _OMITTED}

    def is_there(self, t: int) -> bool:
        """Return True if the schedule has the client in round t."""
        return self.rounds_there(t, t) == 1

    def rounds_there(self, first: int, last: int) -> int:
        """Count the rounds from `first` to `last` in which the client is there."""
        spans = [(first, last)] if self.rounds is None else self.rounds
        return sum(max(0, min(b, last) - max(a, first) + 1) for a, b in spans)


ENTRIES = TypeAdapter(list[ClientEntry])


class RosterReference(FrozenModel):
    """The roster as the signed protocol names it.

    Attributes:
        clients: Number of clients.
        sha256: Hash of the roster's file.
    """

    clients: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Roster(LazySequence[ClientEntry]):
    """Clients of a job in the order of their ids; immutable."""

    @staticmethod
    def of(entries: Iterable[ClientEntry]) -> Roster:
        """Return the entries as a roster: themselves if they are one, else a roster in memory."""
        return entries if isinstance(entries, Roster) else RosterInMemory(entries)

    @property
    @abstractmethod
    def reference(self) -> RosterReference:
        """Reference to this roster in a signed protocol."""

    def client(self, number: int) -> ClientEntry:
        """Return the entry of a client; KeyError if it is not in the roster."""
        if 0 <= number < len(self) and (entry := self._item(number)).id == number:
            return entry
        raise KeyError(number)

    def lines(self) -> Iterator[bytes]:
        """Yield the blocks of the roster's file, BLOCK lines each."""
        entries = iter(self)
        while block := list(islice(entries, BLOCK)):
            yield _encoded(block)

    def write(self, path: Path) -> None:
        """Write the roster's file."""
        with path.open("wb") as file:
            file.writelines(self.lines())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Roster) and self.reference == other.reference

    def __hash__(self) -> int:
        return hash(self.reference.sha256)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} clients)"


class RosterInMemory(Roster):
    """Roster of a job that is being made, or of a job in the earlier format.

    Args:
        entries: The entries; ids of a part of a roster need not begin at 0.
    """

    def __init__(self, entries: Iterable[ClientEntry]) -> None:
        self._entries = list(entries)
        # pydantic keeps a set of names in each entry, which takes more memory than the entry's values.
        shared: dict[frozenset[str], set[str]] = {}
        for entry in self._entries:
            names = entry.__pydantic_fields_set__
            object.__setattr__(entry, "__pydantic_fields_set__", shared.setdefault(frozenset(names), names))

    @cached_property
    def reference(self) -> RosterReference:
        """See `Roster`."""
        content = hashlib.sha256()
        for block in self.lines():
            content.update(block)
        return RosterReference(clients=len(self), sha256=content.hexdigest())

    def write(self, path: Path) -> None:
        """See `Roster`; the hash is that of the bytes written, so that entries are encoded once."""
        content = hashlib.sha256()
        with path.open("wb") as file:
            for block in self.lines():
                content.update(block)
                file.write(block)
        self.__dict__["reference"] = RosterReference(clients=len(self), sha256=content.hexdigest())

    def client(self, number: int) -> ClientEntry:
        """See `Roster`."""
        try:
            return super().client(number)
        except KeyError:
            for entry in self._entries:
                if entry.id == number:
                    return entry
            raise

    def _item(self, position: int) -> ClientEntry:
        return self._entries[position]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[ClientEntry]:
        return iter(self._entries)


class RosterFile(Roster):
    """Roster in a file: `verify` compares its hash, and entries are read when they are used.

    Memory: hash and place of each block of lines, 40 bytes for 128 clients, and the entries that were read last. Each later
    read is compared with the hash of its block, so that a file that changes while a process runs is refused. Each entry is
    checked when it is read.

    Args:
        path: The file.
        reference: What the signed protocol says of it.
        check: Returns why an entry does not fit the protocol, or "".
    """

    def __init__(self, path: Path, reference: RosterReference, check: Callable[[ClientEntry], str]) -> None:
        self._path, self._reference, self._check = path, reference, check
        self._places, self._hashes = array("Q", [0]), bytearray()
        self._read, self._parsed = lru_cache(maxsize=_KEPT)(self._read_entry), lru_cache(maxsize=1)(self._parse)
        self._canonical = False  # True once every entry was checked

    @property
    def reference(self) -> RosterReference:
        """See `Roster`."""
        return self._reference

    def __len__(self) -> int:
        return self._reference.clients

    def __iter__(self) -> Iterator[ClientEntry]:
        for block in self._blocks:
            yield from self._parsed(block)
        self._canonical = True

    def lines(self) -> Iterator[bytes]:
        """See `Roster`."""
        return map(self._block, self._blocks)

    @property
    def _blocks(self) -> range:
        return range(-(-len(self) // BLOCK))

    def verify(self) -> None:
        """Read the file once, in parts; no entry can be read before.

        Raises:
            ConfigError: If the file cannot be read.
            Refused: "roster" if it is not the file that the protocol names.
        """
        content, count = hashlib.sha256(), 0
        self._places, self._hashes = array("Q", [0]), bytearray()
        with opened(self._path) as file:
            remaining = lines_of(file, LONGEST_LINE)
            while count <= len(self) and (lines := list(islice(remaining, BLOCK))):
                block, count = b"".join(lines), count + len(lines)
                content.update(block)
                self._hashes += hashlib.sha256(block).digest()
                self._places.append(self._places[-1] + len(block))
        if not self._is_the_named_one(count, content.hexdigest()):
            raise Refused("roster", f"{self._path} is not the roster that the signed protocol names")

    def _is_the_named_one(self, count: int, sha256: str) -> bool:
        return (count, sha256) == (self._reference.clients, self._reference.sha256)

    def _block(self, number: int) -> bytes:
        if not self._hashes:
            raise ValueError(f"{self._path} was not verified")
        start, end = self._places[number : number + 2]
        with opened(self._path) as file:
            file.seek(start)
            block = file.read(end - start)
        if hashlib.sha256(block).digest() != self._hashes[32 * number : 32 * number + 32]:
            raise Refused("roster", f"{self._path} has changed since it was verified")
        return block

    def _item(self, position: int) -> ClientEntry:
        return self._read(position)

    def _read_entry(self, position: int) -> ClientEntry:
        number, line = divmod(position, BLOCK)
        return self._decoded(self._block(number).splitlines(keepends=True)[line], position, check=True)[0]

    def _parse(self, number: int) -> list[ClientEntry]:
        return self._decoded(self._block(number), number * BLOCK, check=not self._canonical)

    def _decoded(self, block: bytes, first: int, *, check: bool) -> list[ClientEntry]:
        """Parse whole lines, of which the first is client `first`; check ids and the signed protocol's conditions."""
        try:
            entries = ENTRIES.validate_json(b"[" + block.rstrip(b"\n").replace(b"\n", b",") + b"]")
        except ValidationError as error:
            raise self._invalid(first, f"and those after it: {invalid_fields(error)}") from None
        if not check:
            return entries
        if [entry.id for entry in entries] != list(range(first, first + block.count(b"\n"))):
            raise self._invalid(first, "and those after it: ids must be 0, 1, 2, ... in the order of the lines")
        if _encoded(entries) != block:
            raise self._invalid(first, "and those after it: not in canonical form")
        for entry in entries:
            if problem := self._check(entry):
                raise self._invalid(entry.id, problem)
        return entries

    def _invalid(self, client: int, problem: str) -> Refused:
        return Refused("job-invalid", f"{self._path}: line {client + 1}: {problem}")


def _encoded(entries: Sequence[ClientEntry]) -> bytes:
    return b"".join(canonical_json(entry) + b"\n" for entry in ENTRIES.dump_python(list(entries), mode="json"))
