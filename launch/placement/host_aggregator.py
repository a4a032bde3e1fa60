"""The aggregator of a host: its folder, its process, its address, and the lines that it records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.errors import Refused
from dpcfl_net.core.run_folder import WARNINGS, RunFolder
from dpcfl_net.launch.news_pipe import NewsPipe
from dpcfl_net.launch.placement import parents
from dpcfl_net.launch.placement.child import Child, role_environment, start_of, stop
from dpcfl_net.launch.placement.fork_server import AGGREGATOR_MAIN, FIRST_FREE
from dpcfl_net.launch.placement.local import STOP_S
from dpcfl_net.launch.placement.messages import (
    LOG_TAIL,
    PUBLIC_FILES,
    AggregatorEnded,
    AggregatorListens,
    AggregatorRecords,
    Message,
    StartAggregator,
)
from dpcfl_net.runtime.specs import AggregatorSpec
from dpcfl_net.transport import keys
from dpcfl_net.transport.keys import aggregator_key

FOLDER = "aggregator"  # below the agent's folder
ANY_PORT = "tcp://127.0.0.1:*"  # its workers are on the same host
LOOK_S = 0.05  # between looks at the address of an aggregator that starts
MOST_READ = 1 << 20  # bytes of records in one report
_LINE: TypeAdapter[dict[str, object]] = TypeAdapter(dict[str, object])


class HostAggregator:
    """Aggregator of the workers of one host; an agent runs it.

    Its folder is not that of the clients: it holds the public part of the job, the aggregator's key pair and its records.

    Args:
        folder: Its folder.
        number: Its number in the job.

    Attributes:
        address: Address that it listens on, also while it restarts; None before.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self._files, self._number, self._title = RunFolder(folder), number, aggregator_key(number)
        self.address: str | None = None
        self._child: Child | None = None
        self._losses: NewsPipe | None = None
        self._listens, self._log_from = False, 0
        self._tails = [_Tail(self._files.messages), _Tail(self._files.warnings)]

    @property
    def sentinels(self) -> list[int]:
        """A file descriptor that becomes readable when its process has ended; none while it does not run."""
        return [] if self._child is None else [self._child.sentinel]

    @property
    def starting(self) -> bool:
        """True while its process runs and does not listen yet."""
        return self._child is not None and not self._listens

    @property
    def listens(self) -> bool:
        """True if workers can connect to it."""
        return self._child is not None and self._listens

    def prepare_key(self, *, existing: bool) -> str:
        """Create its key pair, or check that it exists.

        Args:
            existing: True in a run that began earlier.

        Returns:
            Its public key.

        Raises:
            Refused: With code "stranger" if the pair must exist and does not.
        """
        folder = self._files.keys
        if existing and not keys.secret_path(folder, self._title).exists():
            raise Refused("stranger", f"no keys of {self._title} in {self._files.path}: it ran on another host")
        if not existing:
            keys.make_aggregator_keys(folder, [self._number])
        return keys.read_public(folder, self._title)

    def start(self, command: StartAggregator) -> None:
        """Start its process, on its previous address if it had one: its workers connect there again.

        Args:
            command: The public part of the job, and its arguments.

        Raises:
            Refused: With code "agent-line" if the files are not those of a job's public part.
        """
        if set(command.files) != PUBLIC_FILES:
            raise Refused(
                "agent-line", f"an aggregator gets {', '.join(sorted(PUBLIC_FILES))}, got {', '.join(sorted(command.files))}"
            )
        for name, text in command.files.items():
            write_atomically(self._files.path / name, text)
        self._files.address(self._title).unlink(missing_ok=True)
        self._files.logs.mkdir(exist_ok=True, mode=0o700)
        log = self._files.log(self._title)
        self._log_from = log.stat().st_size if log.exists() else 0
        spec = AggregatorSpec(
            self._files.protocol, self._number, command.operator_key, self.address or ANY_PORT, command.connect, self._files.keys,
            self._files.path, command.round_timeout_s, command.join_timeout_s, command.orphan_timeout_s, FIRST_FREE,
        )  # fmt: skip
        self._close_pipe()
        self._losses = NewsPipe()
        with self._losses.receiver as theirs:
            start = start_of(AGGREGATOR_MAIN, spec, role_environment())
            self._child, self._listens = parents.fork_role(self._title, start, log, (theirs.fileno(),)), False

    def lose(self, client: int) -> None:
        """Tell it that a client does not run again.

        Args:
            client: Client id.
        """
        if self._losses is not None:
            self._losses.tell(client)

    def signal(self, number: int) -> None:
        """Send a signal to its process, if it runs."""
        if self._child is not None:
            self._child.signal(number)

    def news(self) -> Iterator[Message]:
        """Yield what the launcher does not know yet: that it listens, and new records."""
        path = self._files.address(self._title)
        if self.starting and path.exists():
            self.address, self._listens = path.read_text(), True
            yield AggregatorListens(address=self.address)
        for tail in self._tails:
            yield from tail.new_lines()

    def ended(self) -> Iterator[Message]:
        """Yield its last records and its end, after its sentinel became readable."""
        assert self._child is not None
        child, self._child = self._child, None
        code = child.wait()
        child.close()
        assert code is not None
        for tail in self._tails:
            yield from tail.new_lines()
        yield AggregatorEnded(code=code, log=end_of_log(child.log, self._log_from, child.reason))

    def close(self) -> None:
        """End its process."""
        if self._child is not None:
            stop([self._child], STOP_S)
            self._child = None
        self._close_pipe()

    def _close_pipe(self) -> None:
        if self._losses is not None:
            self._losses.close()
            self._losses = None


def end_of_log(log: Path, start: int, reason: str) -> str:
    """Return the end of the log of a process that has ended; its last line tells the failure.

    Args:
        log: The log.
        start: Byte at which the process began to write.
        reason: Message of its failure, added if a full disk has kept it out of the log, or another thread wrote after it.
    """
    text = log.read_bytes()[start:][-LOG_TAIL:].decode(errors="replace") if log.exists() else ""
    return text if text.rstrip("\n").endswith(reason) else "\n".join(filter(None, (text.rstrip("\n"), reason)))


class _Tail:
    """Reads the complete lines that are added to a file of records from now on."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, path.stat().st_size if path.exists() else 0

    def new_lines(self) -> Iterator[AggregatorRecords]:
        while self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._at)
                content = file.read(MOST_READ)
            end = content.rfind(b"\n") + 1
            if not end:
                return
            self._at += end
            lines = [line for text in content[:end].splitlines() if (line := _parsed(text)) is not None]
            name = "warnings" if self._path.name == WARNINGS else "messages"
            yield AggregatorRecords.model_validate({"file": name, "lines": lines})


def _parsed(text: bytes) -> dict[str, object] | None:
    """Parse a line; None for the rest of one that a crash has cut, and for one nested so deeply that no report can hold it."""
    try:
        return _LINE.validate_json(text)
    except ValidationError:
        return None
