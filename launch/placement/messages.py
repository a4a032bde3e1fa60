"""Messages between a launcher and its agents: one strictly validated JSON object per line."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from dpcfl_net import __version__
from dpcfl_net.core.errors import Refused
from dpcfl_net.core.files import shown
from dpcfl_net.core.frozen import StrictModel
from dpcfl_net.core.run_folder import EXPERIMENT, PROTOCOL, ROSTER, signature_path
from dpcfl_net.experiment.config_schema import RuntimeSettings

# File names of a signed job.
PUBLIC_FILES = {PROTOCOL, signature_path(Path(PROTOCOL)).name, ROSTER}  # of its public part
FILES = {*PUBLIC_FILES, EXPERIMENT, signature_path(Path(EXPERIMENT)).name}
Counter = Annotated[str, Field(pattern=r"^[0-9]{1,18} [0-9a-f]{64}\n\z")]  # number and sha256 of a line of a ledger
LONGEST = 64 * 2**20  # bytes of a line; a job of many clients is long
LOG_TAIL = 8192  # bytes of a log in a report
# Text that the launcher prints: a host may not write to the operator's terminal anything but characters.
Name = Annotated[str, Field(max_length=256, pattern=r"^[^\x00-\x1f\x7f-\x9f]*\z")]
# End of a log with the message of a failure; both reach the terminal only as an error, whose control characters are replaced.
LogEnd = Annotated[str, Field(max_length=2 * LOG_TAIL)]


class Message(StrictModel):
    """Base of all messages; an unknown or mistyped field is an error."""

    def line(self) -> bytes:
        """Encode the message as one line."""
        return self.model_dump_json().encode() + b"\n"


class PrepareKeys(Message):
    """Command: create the keys of these clients, or check that they exist if `existing` is set.

    With `runtime` the host first checks that it has the GPUs which this asks for, before a job with the new keys is signed.
    """

    do: Literal["prepare-keys"] = "prepare-keys"
    clients: list[Annotated[int, Field(ge=0)]]
    existing: bool
    identities: bool = False  # True for a job with secure sums, whose clients also sign
    aggregator: Annotated[int, Field(ge=0)] | None = None  # number of the host's aggregator, which has a key pair, too
    runtime: RuntimeSettings | None = None


class CheckGpus(Message):
    """Command: check that the host has the GPUs which these settings ask for, as before a job that is not made yet."""

    do: Literal["check-gpus"] = "check-gpus"
    runtime: RuntimeSettings


class SetJob(Message):
    """Command: the signed job, by file name, and the settings shared by all workers.

    `counters` has number and hash of the last line of the operator's copy of each client's ledger: no worker starts unless the
    ledgers on the host hold these lines.
    """

    do: Literal["set-job"] = "set-job"
    files: dict[str, str]
    operator_key: str
    connect: str
    relayed: dict[int, str] = {}
    observer: str
    runtime: RuntimeSettings
    data_root: str | None
    firsts: list[Annotated[int, Field(ge=0)]]  # first client of each process on this host, in the order of its GPUs
    counters: dict[Annotated[int, Field(ge=0)], Counter] = {}


class StartAggregator(Message):
    """Command: start the host's aggregator, on its previous address if it ran before; `files`: the public part of the job."""

    do: Literal["start-aggregator"] = "start-aggregator"
    files: dict[str, str]
    operator_key: str
    connect: str
    round_timeout_s: float
    join_timeout_s: float
    orphan_timeout_s: float


class LoseClient(Message):
    """Command: tell the aggregator that a client does not run again."""

    do: Literal["lose-client"] = "lose-client"
    client: int = Field(ge=0)


class SignalAggregator(Message):
    """Command: send a signal to the aggregator."""

    do: Literal["signal-aggregator"] = "signal-aggregator"
    number: int = Field(ge=1, le=64)


class StartWorker(Message):
    """Command: start the worker process of clients first .. first + count - 1."""

    do: Literal["start"] = "start"
    first: int = Field(ge=0)
    count: int = Field(ge=1)
    group: bool


class GroupCommand(Message):
    """Command: forward "start N", "stop N" or "end" to the process of a group of clients."""

    do: Literal["group-command"] = "group-command"
    first: int
    word: str = Field(max_length=64)


class SendSignal(Message):
    """Command: send a signal to a worker process."""

    do: Literal["signal"] = "signal"
    first: int
    number: int = Field(ge=1, le=64)


class AgentHello(Message):
    """Report, always the first: version and resources of the host, memory in bytes; `clock` is its time, in seconds since 1970."""

    say: Literal["hello"] = "hello"
    version: Name
    host: Name
    cores: int = Field(ge=1, le=10**6)
    memory: int = Field(ge=0, le=2**60)
    gpus: Annotated[list[Name], Field(max_length=1024)]
    clock: float = Field(default_factory=time.time, ge=0, le=10**11)


class _Versioned(BaseModel):
    """The part of a first report that all versions have."""

    say: Literal["hello"]
    version: Name


class PublicKeys(Message):
    """Report: public keys by client, and identities if the command asks for them; the secret keys stay on the host."""

    say: Literal["keys"] = "keys"
    keys: dict[int, str]
    identities: dict[int, str] = {}
    aggregator: str | None = None  # public key of the host's aggregator


class GpusChecked(Message):
    """Report: the host has the GPUs that were asked for."""

    say: Literal["gpus-checked"] = "gpus-checked"


class JobAccepted(Message):
    """Report: the job is stored; device of each worker process, the UUID of a GPU or "cpu"."""

    say: Literal["job-accepted"] = "job-accepted"
    devices: list[Name]


class WorkerEnded(Message):
    """Report: a worker process has ended; `log` is the end of its log, at most 8 KiB."""

    say: Literal["ended"] = "ended"
    first: int
    code: int
    log: LogEnd


class AggregatorListens(Message):
    """Report: the aggregator listens on this address of its host; workers that wait for it start now."""

    say: Literal["aggregator-listens"] = "aggregator-listens"
    address: Name


class AggregatorEnded(Message):
    """Report: the aggregator has ended; `log` is the end of its log, at most 8 KiB."""

    say: Literal["aggregator-ended"] = "aggregator-ended"
    code: int
    log: LogEnd


class AggregatorRecords(Message):
    """Report: lines that the aggregator has added to one of its files of records."""

    say: Literal["aggregator-records"] = "aggregator-records"
    file: Literal["messages", "warnings"]
    lines: list[dict[str, Any]]


class LedgerUpdate(Message):
    """Report: a client's ledger from byte `at` on, and its counter. It holds only entries of the public plan."""

    say: Literal["ledger"] = "ledger"
    client: int = Field(ge=0)
    at: int = Field(ge=0)
    lines: str
    counter: Counter


class AgentError(Message):
    """Report, always the last: why the agent stops, and its exit code, which is also that of its workers: 0 would be no failure."""

    say: Literal["error"] = "error"
    reason: LogEnd
    code: int = Field(ge=1, le=255)


AgentCommand = Annotated[
    PrepareKeys
    | CheckGpus
    | SetJob
    | StartAggregator
    | LoseClient
    | SignalAggregator
    | StartWorker
    | GroupCommand
    | SendSignal,
    Field(discriminator="do"),
]
AgentReport = Annotated[
    AgentHello | PublicKeys | GpusChecked | JobAccepted | AggregatorListens | AggregatorEnded | AggregatorRecords | WorkerEnded
    | LedgerUpdate | AgentError,
    Field(discriminator="say"),
]  # fmt: skip
_COMMANDS: TypeAdapter[AgentCommand] = TypeAdapter(AgentCommand)
_REPORTS: TypeAdapter[AgentReport] = TypeAdapter(AgentReport)


def read_command(line: bytes) -> AgentCommand:
    """Parse a command.

    Args:
        line: One line, without the newline.

    Raises:
        Refused: With code "agent-line" if it is not a command of this version.
    """
    return _read(_COMMANDS, line, "no command: only the launcher may write to an agent")


def read_report(line: bytes) -> AgentReport:
    """Parse a report.

    Args:
        line: One line, without the newline.

    Raises:
        Refused: With code "agent-line" if it is not a report of this version.
    """
    return _read(_REPORTS, line, "no message: only the agent may write there, and no start-up file of a shell")


def read_first_report(line: bytes) -> AgentReport:
    """Parse the first line of a host, which may run another version, or print a greeting before its agent starts.

    Args:
        line: One line, without the newline.

    Raises:
        Refused: "version" for the hello of another version, whatever else it holds; "agent-line" for no report of this version.
    """
    try:
        version = _Versioned.model_validate_json(line).version
    except ValidationError:
        version = __version__
    if version != __version__:
        raise Refused("version", f"dpcfl_net {version} is installed there, {__version__} on this machine")
    return read_report(line)


def _read(adapter: TypeAdapter, line: bytes, unless_json: str) -> Any:
    try:
        return adapter.validate_json(line)
    except ValidationError as error:
        problems = error.errors()[:3]
        if problems[0]["type"] == "json_invalid":
            raise Refused("agent-line", f"{shown(line.decode(errors='replace'))} is {unless_json}") from None
        fields = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in problems)
        raise Refused("agent-line", f"not a message of this version: {fields}") from None
