"""What an algorithm is: options, a plan, a server half over plain state, client halves behind the gate."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from dpcfl_net.core import plugins
from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.core.files import shown
from dpcfl_net.core.names import hint
from dpcfl_net.core.protocol import ClientEntry, LocalTraining, PrivacyTarget, Protocol, invalid_fields
from dpcfl_net.core.types import ClientStep, State, TensorSpec
from dpcfl_net.federation.base import Federation
from dpcfl_net.privacy.events.base import Event
from dpcfl_net.privacy.slots import Slot

MODEL = TensorSpec("f4", ("p",))
MODELS = TensorSpec("f4", ("M", "p"))
INDEX = TensorSpec("i8")


class Options(BaseModel):
    """An algorithm's own settings: `dpcfl schema` and every error message are built from these."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


Method = TypeVar("Method", bound=Callable[..., Any])


def on_client(
    *, bundle: list[str], takes: Mapping[str, TensorSpec], gives: Mapping[str, TensorSpec]
) -> Callable[[Method], Method]:
    """Mark a method as a client half: it runs in the client's process, after the gate has debited the bundle."""

    def mark(method: Method) -> Method:
        method.client_step = ClientStep(method.__name__, tuple(bundle), dict(takes), dict(gives))  # type: ignore[attr-defined]
        return method

    return mark


def on_central_server(*, bundle: list[str]) -> Callable[[Method], Method]:
    """Mark a method as a curator half: it runs at a trusted server, after that server's own gate has debited the bundle."""

    def mark(method: Method) -> Method:
        method.central_step = ClientStep(method.__name__, tuple(bundle), {}, {})  # type: ignore[attr-defined]
        return method

    return mark


@dataclass(frozen=True)
class Setting:
    """What an algorithm may look at to say that its options cannot work; known before any key or noise is."""

    rounds: int
    clients: int
    local: LocalTraining
    privacy: PrivacyTarget
    validation: float = 0.0  # the share of its records that each client sets aside


class Algorithm:
    """One algorithm over one signed protocol. Subclasses live one to a file and are found by their `name`."""

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    claim_of_paper: str | None = None  # what the paper says that a run costs, where that differs from what holds
    protects: ClassVar[tuple[tuple[str, str], ...]] = (("sample", "untrusted-server"),)  # (unit, trust) it can run under
    covers: ClassVar[tuple[str, ...]] = ("model updates", "cluster selections")  # what an untrusted server's epsilon is of
    uses_oracle: ClassVar[bool] = False
    personal: ClassVar[bool] = False  # clients use models of their own, which only they can evaluate
    model_per_client: ClassVar[bool] = False  # row i of State.models is client i's, whatever its cluster
    Options: ClassVar[type[Options]] = Options

    def __init__(self, protocol: Protocol) -> None:
        self.protocol = protocol
        self.options: Any = self.Options.model_validate(protocol.options)
        self.clients = [entry.id for entry in protocol.roster]

    @classmethod
    def problems(cls, options: Any, setting: Setting) -> list[str]:
        """Why these options cannot work in this setting, a sentence each."""
        return []

    def unmet(self) -> list[str]:
        """Why the signed protocol itself cannot work or promise what it says: `problems`, for whoever did not configure it."""
        protocol = self.protocol
        held = max(entry.validation_records / (entry.records + entry.validation_records) for entry in protocol.roster)
        setting = Setting(protocol.rounds, len(protocol.roster), protocol.local, protocol.privacy, held)
        return self.problems(self.options, setting)

    @classmethod
    def plain_sgd(cls, options: Any, privacy: PrivacyTarget) -> bool:
        """Whether the local step is plain SGD, which knows momentum and weight decay, and not DP-SGD."""
        return False

    @property
    def caveats(self) -> list[str]:
        """Sentences that the statement adds to what is not covered."""
        return []

    @property
    def max_models(self) -> int:
        """The most models that may travel in one task: a bound that the wire enforces."""
        return 1

    @property
    def published_models(self) -> int:
        """The most rows that `State.models` may have."""
        return self.max_models

    def max_update_norm(self, client: ClientEntry) -> float:
        """The greatest norm that an honest client's update of one round can have.

        A round of S = K ceil(N/b) steps at learning rate lr adds clipped sums of about b records, each at most c long, and
        noise z c in p dimensions: lr S ((b + 12 sqrt(b) + 12) c + z c (sqrt(p) + 12)) / b bounds an honest client's norm but
        for chances below 1e-12. A full-batch step (b = N) is shorter than that.
        """
        local = self.protocol.local
        rate, steps = full_epochs(local, client)
        b, c, z, p = rate * client.records, local.clip, client.noise_multiplier, self.protocol.model.parameters
        return local.lr * steps * c * ((b + 12 * b**0.5 + 12) + z * (p**0.5 + 12)) / b

    def plan(self, client: ClientEntry) -> list[Slot]:
        """Every slot that this client may fill over the whole run, from public things alone."""
        raise NotImplementedError

    @property
    def expected_releases(self) -> float:
        """How many answers of clients a whole run asks for, in expectation."""
        return float(len(self.clients) * self.protocol.rounds)

    def central_plan(self) -> list[Slot]:
        """Every slot that a trusted server may fill over the whole run; none where no server is trusted."""
        return []

    def sound_events(self) -> list[Event] | None:
        """For a run whose own adjacency allows no finite epsilon: what its noise costs under replacement, if that is finite."""
        return None

    def models_of(self, client: int, cluster: int | None) -> tuple[int, ...]:
        """The rows of `State.models` whose outputs are added up for a client of a cluster; None: it has none."""
        return (client if self.model_per_client else cluster or 0,)

    def start(self, fed: Federation) -> State:
        """Server half, before round 1."""
        raise NotImplementedError

    def round(self, state: State, t: int, fed: Federation) -> State:
        """Server half, round t = 1..rounds."""
        raise NotImplementedError

    def describe(self, state: State) -> dict[str, Any]:
        """What the server's view of a round tells people: phase, MSS and the like; `more`: columns of this algorithm's own."""
        return {"phase": str(state.memory.get("phase", "single"))}

    def first_round(self, state: State) -> dict[str, Any] | None:
        """Arrays for the first-round picture, or None where there is none."""
        return None

    def personal_model(self, state: Mapping[str, Any]) -> Any:
        """A client's own model out of its state, for algorithms whose cluster models are not what clients use."""
        return None

    @classmethod
    def client_steps(cls) -> dict[str, ClientStep]:
        """The client halves by task name."""
        marked = (getattr(getattr(cls, name), "client_step", None) for name in dir(cls))
        return {half.kind: half for half in marked if half is not None}

    @classmethod
    def central_steps(cls) -> dict[str, ClientStep]:
        """The curator halves by name."""
        marked = (getattr(getattr(cls, name), "central_step", None) for name in dir(cls))
        return {half.kind: half for half in marked if half is not None}

    @property
    def dims(self) -> dict[str, int | tuple[int, int]]:
        """What the named sides of tensor specs stand for: p exact, M a range from 1 to `max_models`."""
        return {"p": self.protocol.model.parameters, "M": (1, self.max_models)}


def full_epochs(local: LocalTraining, client: ClientEntry) -> tuple[float, int]:
    """(q, K ceil(N/b)): sampling rate and steps of one round of local DP-SGD."""
    batch = min(local.batch_size, client.records)
    return batch / client.records, local.epochs * -(-client.records // batch)


@cache
def registry() -> dict[str, type[Algorithm]]:
    """Every algorithm by name: whatever file in this package defines one."""
    package = importlib.import_module("dpcfl_net.algorithms")
    found: dict[str, type[Algorithm]] = {}
    for module in pkgutil.iter_modules(package.__path__):
        loaded = importlib.import_module(f"dpcfl_net.algorithms.{module.name}")
        for value in vars(loaded).values():
            if isinstance(value, type) and issubclass(value, Algorithm) and value.name:
                found[value.name] = value
    return dict(sorted(found.items()))


def find(name: str) -> type[Algorithm]:
    """The algorithm `name`, or the class `package.module:Class` of the user's own; ConfigError for what is neither."""
    if not plugins.is_plugin(name):
        if name not in registry():
            known = f"must be one of {', '.join(registry())} or package.module:Class"
            raise ConfigError(f"algorithm.name is {shown(name)}: {known}{hint(name, registry())}")
        return registry()[name]
    own = plugins.load("algorithm.name", name)
    if not (isinstance(own, type) and issubclass(own, Algorithm)):
        raise ConfigError(f"algorithm.name is {name!r}: must be a class derived from dpcfl_net.algorithms.base.Algorithm")
    return own


def algorithm_of(protocol: Protocol) -> Algorithm:
    """The algorithm that a protocol names; Refused for one, or for options, that this version or folder does not have."""
    try:
        return find(protocol.algorithm)(protocol)
    except ConfigError as error:
        raise Refused("algorithm", f"the job's {error}") from error
    except ValidationError as error:
        raise Refused("algorithm", f"the job's options of {protocol.algorithm}: {invalid_fields(error)}") from None
