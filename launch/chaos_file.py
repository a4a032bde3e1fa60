"""The file of `dpcfl run --chaos FILE`: its schema, and error messages with line, field, value and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from dpcfl_net.core import yaml_file
from dpcfl_net.core.config_messages import allowed_keys, known_keys, located_sentences, nearest_key
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import read_text, shown
from dpcfl_net.core.frozen import StrictModel
from dpcfl_net.transport.faults import MessageFaults, MessageRule, Partition

MOST_SECONDS = 3600.0
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0, le=MOST_SECONDS)]
Duration = Annotated[float, Field(gt=0, le=MOST_SECONDS)]
Round = Annotated[int, Field(ge=0, le=100_000)]
ClientId = Annotated[int, Field(ge=0)]
Kind = Literal["hello", "welcome", "task", "result", "credit", "ack", "heartbeat", "error", "bye"]


def _without_all(clients: Any) -> Any:
    """Return None for "all"."""
    if isinstance(clients, str):
        if clients != "all":
            raise ValueError(f"is {shown(clients)}: must be all, or a list of client ids as [1, 2]")
        return None
    return clients


def _in_order(pair: list[Any]) -> list[Any]:
    """Return a pair of bounds whose first does not exceed the second."""
    if pair[0] > pair[1]:
        raise ValueError(f"is {pair}: the first must not exceed the second")
    return pair


def _target(*words: str) -> Any:
    """Type of the name of a process: a client, some random clients, or one of `words`."""

    def check(name: str) -> str:
        if name not in words and not re.fullmatch(r"client [0-9]{1,6}|random [1-9][0-9]{0,5} clients?", name):
            raise ValueError(f"is {shown(name)}: must be client N, random N clients, {', '.join(words[:-1])} or {words[-1]}")
        return name

    return Annotated[str, AfterValidator(check)]


Clients = Annotated[Annotated[list[ClientId], Field(min_length=1)] | None, BeforeValidator(_without_all)]
Rounds = Annotated[list[Round], Field(min_length=2, max_length=2), AfterValidator(_in_order)]
Target: Any = _target("coordinator", "observer", "relay", "parent", "parent of all processes", "all")
DiskTarget: Any = _target("coordinator", "observer", "all")


class Section(StrictModel):
    """A section of the file; unknown keys are errors."""

    model_config = ConfigDict(allow_inf_nan=False)


class Delay(Section):
    """`messages[].delay`."""

    share: Share = Field(description="probability that a message is late")
    seconds: Annotated[list[Seconds], Field(min_length=2, max_length=2), AfterValidator(_in_order)] = Field(
        description="shortest and longest delay"
    )


class MessageSection(Section):
    """One entry of `messages`."""

    clients: Clients = Field(default=None, description="client ids, or all")
    direction: Literal["up", "down", "both"] = Field(default="both", description="up: to the coordinator; down: from it")
    rounds: Rounds | None = Field(default=None, description="first and last round; null: all")
    kinds: Annotated[list[Kind], Field(min_length=1)] = Field(
        default=["task", "result", "ack"], description="kinds of messages"
    )
    drop: Share = Field(default=0.0, description="probability that a message is lost")
    duplicate: Share = Field(default=0.0, description="probability that it arrives twice")
    delay: Delay | None = Field(default=None, description="late messages; later ones wait for them")
    reorder: Share = Field(default=0.0, description="probability that the next message overtakes it")
    corrupt: Share = Field(default=0.0, description="probability that one bit is flipped")

    def rule(self) -> MessageRule:
        """Return the rule for the coordinator's endpoint."""
        delay = self.delay or Delay(share=0.0, seconds=[0.0, 0.0])
        return MessageRule(
            _ids(self.clients), self.direction, _pair(self.rounds), tuple(self.kinds), self.drop, self.duplicate,
            delay.share, (delay.seconds[0], delay.seconds[1]), self.reorder, self.corrupt,
        )  # fmt: skip


class PartitionSection(Section):
    """One entry of `partitions`."""

    clients: Clients = Field(description="client ids, or all")
    rounds: Rounds = Field(description="first and last round in which nothing passes in either direction")


class Moment(Section):
    """`at` of a process fault."""

    round: Annotated[int, Field(ge=1, le=100_000)] = Field(description="the round")
    step: Literal["sent", "charged", "answered", "done"] = Field(
        default="sent",
        description="sent: the client's task was sent; charged: its ledger was charged; answered: its result arrived; "
        "done: the round's figures were written; of all processes, or one that is no client: the first client's",
    )
    task: str | None = Field(default=None, description="name of the client step; null: the round's first")

    @model_validator(mode="after")
    def _with_task(self) -> Moment:
        if self.task is not None and self.step == "done":
            raise ValueError("task belongs to the steps sent, charged and answered")
        return self

    def __str__(self) -> str:
        return f"round {self.round} {self.step}" + (f" {self.task}" if self.task else "")


class ProcessFault(Section):
    """One entry of `processes`: either `kill` or `stop`."""

    kill: Target | None = Field(default=None, description="process that gets SIGKILL")
    stop: Target | None = Field(default=None, description="process that gets SIGSTOP, and SIGCONT after `seconds`")
    at: Moment = Field(description="when")
    seconds: Duration | None = Field(default=None, description="stop: how long")

    @model_validator(mode="after")
    def _one_action(self) -> ProcessFault:
        if (self.kill is None) == (self.stop is None):
            raise ValueError("must have either kill or stop")
        if (self.stop is None) != (self.seconds is None):
            raise ValueError("seconds belongs to stop, which needs it")
        return self

    @property
    def action(self) -> str:
        """Kind of the fault: "kill" or "stop"."""
        return "kill" if self.stop is None else "stop"

    @property
    def target(self) -> str:
        """The process."""
        return self.kill or self.stop or ""


class DiskFault(Section):
    """One entry of `disk`."""

    full: DiskTarget = Field(description="processes whose files do not grow any more")
    at: Moment = Field(description="when")
    seconds: Duration = Field(description="how long")

    @property
    def action(self) -> str:
        """Kind of the fault."""
        return "full"

    @property
    def target(self) -> str:
        """The processes."""
        return self.full


class ChaosFile(Section):
    """A whole chaos file."""

    seed: int = Field(ge=0, description="seed of all draws; the same seed and job give the same faults")
    messages: list[MessageSection] = Field(default=[], description="the first entry that covers a message applies to it")
    partitions: list[PartitionSection] = Field(default=[], description="clients that cannot be reached in some rounds")
    processes: list[ProcessFault] = Field(default=[], description="signals to processes")
    disk: list[DiskFault] = Field(default=[], description="writes that fail")

    def message_faults(self) -> MessageFaults | None:
        """Return the faults for the coordinator's endpoint; None without any."""
        if not self.messages and not self.partitions:
            return None
        partitions = tuple(Partition(_ids(found.clients), (found.rounds[0], found.rounds[1])) for found in self.partitions)
        return MessageFaults(self.seed, tuple(found.rule() for found in self.messages), partitions)


def _ids(clients: list[int] | None) -> tuple[int, ...] | None:
    return None if clients is None else tuple(clients)


def _pair(rounds: list[int] | None) -> tuple[int, int] | None:
    return None if rounds is None else (rounds[0], rounds[1])


def read_chaos(path: Path, clients: int, rounds: int) -> ChaosFile:
    """Read and check a chaos file.

    Args:
        path: The file.
        clients: Number of clients of the run.
        rounds: Rounds of the run.

    Returns:
        Its content.

    Raises:
        ConfigError: With line, field, value and what is allowed for every problem.
    """
    text = read_text(path, yaml_file.MOST_BYTES)
    found = yaml_file.parse(text, str(path))
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: must be a section of keys and values, as seed: 7")
    try:
        plan = ChaosFile.model_validate(found)
    except ValidationError as error:
        located = located_sentences(error, _hint)
        raise ConfigError([f"{path}, line {_line(text, place)}: {sentence}" for place, sentence in located]) from None
    if problems := [f"{path}, line {_line(text, place)}: {text_}" for place, text_ in _outside(plan, clients, rounds)]:
        raise ConfigError(problems)
    return plan


def _outside(plan: ChaosFile, clients: int, rounds: int) -> Iterable[tuple[tuple[str | int, ...], str]]:
    """Yield place and description of each client and round that the run does not have."""
    sections: dict[str, Sequence[MessageSection | PartitionSection]] = {
        "messages": plan.messages,
        "partitions": plan.partitions,
    }
    for name, found in sections.items():
        for index, section in enumerate(found):
            for client in section.clients or []:
                if client >= clients:
                    allowed = f"must be a client of the run, 0 to {clients - 1}"
                    yield (name, index, "clients"), f"{name}.{index}.clients holds {client}: {allowed}"
    faults: dict[str, Sequence[ProcessFault | DiskFault]] = {"processes": plan.processes, "disk": plan.disk}
    for name, listed in faults.items():
        for index, fault in enumerate(listed):
            word, _, number = fault.target.partition(" ")
            if word == "client" and int(number) >= clients:
                allowed = f"must be a client of the run, 0 to {clients - 1}"
                yield (name, index, fault.action), f"{name}.{index}.{fault.action} is '{fault.target}': {allowed}"
            if fault.at.round > rounds:
                allowed = f"must be a round of the run, 1 to {rounds}"
                yield (name, index, "at", "round"), f"{name}.{index}.at.round is {fault.at.round}: {allowed}"


def _line(text: str, place: Iterable[str | int]) -> int:
    """Return the line of a value, or of the innermost section around a missing one."""
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    for part in place:
        if isinstance(node, yaml.MappingNode):
            inner = next((value for key, value in node.value if key.value == str(part)), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            inner = node.value[part]
        else:
            inner = None
        if inner is None:
            break
        node = inner
    return 0 if node is None else int(node.start_mark.line) + 1


_SECTIONS: dict[str, type[Section]] = {
    "messages": MessageSection,
    "partitions": PartitionSection,
    "processes": ProcessFault,
    "disk": DiskFault,
}


def _hint(path: str) -> str:
    """Hint about an unknown key: the nearest one, or all of its section."""
    parts = path.split(".")
    model = _SECTIONS.get(parts[0], ChaosFile) if len(parts) > 2 else ChaosFile
    name = ".".join(parts[2:]) if len(parts) > 2 else path
    keys = known_keys(model)
    if near := nearest_key(name, keys):
        return f", did you mean {near!r}?"
    return f": must be one of {', '.join(allowed_keys(name, keys) or keys)}"
