"""What a launcher and its agent on another host say to each other: one JSON object a line, closed and strict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from dpcfl_net.core.errors import Refused
from dpcfl_net.core.run_folder import EXPERIMENT, PROTOCOL, signature_path
from dpcfl_net.experiment.config import RuntimeSettings

# File names of a signed job.
FILES = {name for part in (PROTOCOL, EXPERIMENT) for name in (part, signature_path(Path(part)).name)}
LONGEST = 64 * 2**20  # bytes of a line: a job of many clients


class Message(BaseModel):
    """A line; an unknown or mistyped field is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    def line(self) -> bytes:
        """As it is sent."""
        return self.model_dump_json().encode() + b"\n"


class Enrol(Message):
    """To the agent: make these clients' keys, or with `known` find those that were made before."""

    do: Literal["enrol"] = "enrol"
    clients: list[Annotated[int, Field(ge=0)]]
    known: bool


class Brief(Message):
    """To the agent: the signed job, by file name, and all that its workers have in common."""

    do: Literal["brief"] = "brief"
    files: dict[str, str]
    operator_key: str
    connect: str
    observer: str
    runtime: RuntimeSettings
    data_root: str | None
    firsts: list[Annotated[int, Field(ge=0)]]  # of the postings that are for this agent, in order: who gets which GPU


class Start(Message):
    """To the agent: start the worker of clients first .. first + count - 1."""

    do: Literal["start"] = "start"
    first: int = Field(ge=0)
    count: int = Field(ge=1)
    group: bool


class Tell(Message):
    """To the agent: a word for a group; "end" when nobody will be wanted any more."""

    do: Literal["tell"] = "tell"
    first: int
    word: str = Field(max_length=64)


class Signal(Message):
    """To the agent: a signal for a worker."""

    do: Literal["signal"] = "signal"
    first: int
    number: int = Field(ge=1, le=64)


class Hello(Message):
    """Of the agent, first: what is there."""

    say: Literal["hello"] = "hello"
    version: str
    host: str
    cores: int = Field(ge=1)
    memory: int = Field(ge=0)
    gpus: list[str]


class Keys(Message):
    """Of the agent: public keys by client; the secret halves stay there."""

    say: Literal["keys"] = "keys"
    keys: dict[int, str]


class Briefed(Message):
    """Of the agent: the job is there; what the workers of each posting will compute on, a GPU's UUID or "cpu"."""

    say: Literal["briefed"] = "briefed"
    devices: list[str]


class Ended(Message):
    """Of the agent: a worker has ended; `log` is what its log gained, at most some kilobytes of its end."""

    say: Literal["ended"] = "ended"
    first: int
    code: int
    log: str


class LedgerLines(Message):
    """Of the agent: a client's ledger from byte `at` on, and its counter: for the operator's books, who planned all of it."""

    say: Literal["ledger"] = "ledger"
    client: int = Field(ge=0)
    at: int = Field(ge=0)
    lines: str
    counter: str


class Trouble(Message):
    """Of the agent, last: why it cannot go on."""

    say: Literal["trouble"] = "trouble"
    reason: str
    code: int


Order = Annotated[Enrol | Brief | Start | Tell | Signal, Field(discriminator="do")]
Report = Annotated[Hello | Keys | Briefed | Ended | LedgerLines | Trouble, Field(discriminator="say")]
_ORDERS: TypeAdapter[Order] = TypeAdapter(Order)
_REPORTS: TypeAdapter[Report] = TypeAdapter(Report)


def read_order(line: bytes) -> Order:
    """An order from its line; Refused "agent-line" if it is none."""
    return _read(_ORDERS, line)


def read_report(line: bytes) -> Report:
    """A report from its line; Refused "agent-line" if it is none."""
    return _read(_REPORTS, line)


def _read(adapter: TypeAdapter, line: bytes) -> Any:
    try:
        return adapter.validate_json(line)
    except ValidationError as error:
        fields = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3])
        raise Refused("agent-line", f"not a line of this version: {fields}") from None
