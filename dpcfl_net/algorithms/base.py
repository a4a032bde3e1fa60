"""Interface of an algorithm: options, plan, server rounds over plain state, and client steps behind the privacy gate."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError, model_validator

from dpcfl_net.core import plugins
from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.core.files import shown
from dpcfl_net.core.frozen import FrozenModel, invalid_fields
from dpcfl_net.core.names import hint
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.roster import ClientEntry
from dpcfl_net.core.signatures import misfit
from dpcfl_net.core.signed_settings import LocalTraining
from dpcfl_net.core.types import ClientStep, NoEffect, State, TensorSpec
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.capabilities import Capabilities, Setting, declared_steps
from dpcfl_net.federation.secure.stages import MASKING
from dpcfl_net.privacy.slots import Slot, given

if TYPE_CHECKING:
    from dpcfl_net.privacy.secure_sum import SumCode


class Options(FrozenModel):
    """Options of an algorithm; `dpcfl schema` and error messages are built from them.

    Attributes:
        earlier_names: Earlier names of options, which are accepted, and their present names.
        added: Options that are omitted where they have their default, so that the hash of jobs without them is unchanged.
        why_synchronous: Reason why the algorithm has no asynchronous rounds.
    """

    model_config = ConfigDict(allow_inf_nan=False)
    earlier_names: ClassVar[Mapping[str, str]] = {}
    why_synchronous: ClassVar[str] = (
        "only dp-fedavg, dp-fedprox, dp-ifca, global, oracle and r-dpcfl have it, whose clusters do not change after the first rounds"
    )

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "asynchronous" in values and "asynchronous" not in cls.model_fields:
            raise ValueError(f"asynchronous is not possible with this algorithm: {cls.why_synchronous}")
        return cls.with_present_names(values) if isinstance(values, Mapping) else values

    @classmethod
    def with_present_names(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Rename options that are given by an earlier name, as in jobs and configurations of earlier versions.

        Args:
            values: Options by name.

        Returns:
            The same options by their present names.

        Raises:
            ValueError: If an option is given by both names.
        """
        for earlier, present in cls.earlier_names.items():
            if earlier in values and present in values:
                raise ValueError(f"{earlier} is the earlier name of {present}: give one of the two")
        return {cls.earlier_names.get(name, name): value for name, value in values.items()}

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Build options from a configuration or job, in whose JSON tuples and sets are lists, and paths and bytes are text.

        Args:
            values: Options by name.

        Raises:
            ValidationError: If one of them is not allowed.
        """
        try:
            return cls.model_validate(values, strict=True)
        except ValidationError as error:
            refused = {item["loc"][0] for item in error.errors() if item["loc"]}
            from_json = {name: cls._from_json(name, value) if name in refused else value for name, value in values.items()}
            if from_json == values:
                raise
            return cls.model_validate(from_json, strict=True)

    def unused(self, name: str, where: str) -> list[NoEffect]:
        """List the problem with an option that has no effect, unless it has its default; in a section, one for each option.

        Args:
            name: Option or section with a default, which the algorithm does not use.
            where: Setting in which it has no effect, such as "labels gaussian".
        """
        value, default = getattr(self, name), type(self).model_fields[name].default
        pairs = {name: (value, default)}
        if isinstance(value, Options):
            pairs = {f"{name}.{key}": (getattr(value, key), getattr(default, key)) for key in type(value).model_fields}
        return [
            NoEffect(
                option,
                f"algorithm.{option} is {shown(given)}: must be {shown(usual)} (the default) with {where}, where it has no effect",
            )
            for option, (given, usual) in pairs.items()
            if given != usual
        ]

    @classmethod
    def _from_json(cls, name: str, value: Any) -> Any:
        """The value that an option's JSON stands for; the JSON itself if it stands for none."""
        with contextlib.suppress(ValueError, TypeError, KeyError):
            if json.loads(text := json.dumps(value)) == value:
                annotation: Any = cls.model_fields[name].annotation
                return TypeAdapter(annotation).validate_json(text, strict=True)
        return value


class Algorithm(ABC):
    """One algorithm for one signed protocol. Each subclass is in a separate file and is found by its `name`.

    Besides the members below, a subclass defines client steps (`on_client`) and, for a trusted server, central steps
    (`on_central_server`).

    Attributes:
        name: Name in configurations.
        paper: Source: paper and algorithm.
        Options: Pydantic model of the algorithm's options.
        protocol: The signed protocol.
        options: Validated options.
        clients: Client ids, 0 to n - 1.
        setting: Public facts of the run that the options are checked against.
        capabilities: What the algorithm protects, needs and publishes under these options.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    Options: ClassVar[type[Options]] = Options

    def __init__(self, protocol: Protocol) -> None:
        self.protocol = protocol
        self.options: Any = self.Options.read(protocol.options)
        self.clients = protocol.clients
        self.setting = Setting.of(protocol)
        self.capabilities = self.capabilities_for(self.options, self.setting)

    @classmethod
    def capabilities_for(cls, options: Any, setting: Setting) -> Capabilities:
        """Build the record of what the algorithm protects, needs and publishes.

        Args:
            options: Options, which may still have `problems`.
            setting: Public facts of the run.
        """
        return Capabilities(expected_releases=float(setting.clients * setting.rounds))

    @classmethod
    def problems(cls, options: Any, setting: Setting) -> list[str]:
        """List the problems of options in a setting.

        Args:
            options: Validated options.
            setting: Public facts of the run.

        Returns:
            One sentence for each problem: field, value and allowed values.
        """
        return []

    @abstractmethod
    def plan(self, client: ClientEntry) -> list[Slot]:
        """List every slot that a client may fill over the whole run, from public facts only.

        Args:
            client: The client's roster entry.
        """

    def central_plan(self) -> list[Slot]:
        """List every slot that a trusted server may fill over the whole run; empty if no server is trusted.

        A `ParticipationSlot` stands for one of each client.
        """
        return []

    def secure_group(self, t: int) -> tuple[int, ...] | None:
        """Return the clients of the secure sum of a round; None if the server may add up any group, each with all its noise.

        Args:
            t: Round.
        """
        return None

    def secure_code(self, participants: int) -> SumCode | None:
        """Build the code of a secure sum with this many participants.

        It depends on public facts only, since all participants and the server must use the same. Its noise multiplier is that of
        the roster, and `honest` is the number of answers that a sum needs less the job's colluders.

        Args:
            participants: Clients of the sum, 1 to the number of clients.

        Returns:
            The code; None if the algorithm has no secure sum of this size, as without `trust: secure-aggregation`.

        Raises:
            ValueError: If such a sum does not fit into 32 bits.
        """
        return None

    @abstractmethod
    def start(self, fed: Federation) -> State:
        """Build the server's state before round 1.

        Args:
            fed: Federation of the clients.
        """

    @abstractmethod
    def round(self, state: State, t: int, fed: Federation) -> State:
        """Run a round on the server.

        Args:
            state: State after the round before.
            t: Round, 1 to rounds.
            fed: Federation of the clients.

        Returns:
            The state after the round.
        """


Method = TypeVar("Method", bound=Callable[..., Any])


def on_client(
    *, charges: list[str], takes: Mapping[str, TensorSpec], gives: Mapping[str, TensorSpec]
) -> Callable[[Method], Method]:
    """Mark a method as a client step: it runs in the client's process after the gate has charged its slots.

    Args:
        charges: Names of the plan's slots that one task fills.
        takes: Tensors that the server sends.
        gives: Tensors of the release.

    Raises:
        ValueError: If `charges` is no list of names, or is empty: nothing would pay for the release, or bound how often it is asked for.
            If `takes` or `gives` does not map names to TensorSpecs.
    """

    def mark(method: Method) -> Method:
        _require_slots("client step", method.__name__, charges)
        _require_tensors(method.__name__, "takes", takes)
        _require_tensors(method.__name__, "gives", gives)
        method.client_step = ClientStep(method.__name__, tuple(charges), dict(takes), dict(gives))  # type: ignore[attr-defined]
        return method

    return mark


def on_central_server(*, charges: list[str], clients_in: str = "") -> Callable[[Method], Method]:
    """Mark a method as a central step: it runs at a trusted server after the server's gate has charged its slots.

    Args:
        charges: Names of the central plan's slots that one round fills.
        clients_in: Tensor of the step with the ids of the clients that are charged, if `charges` are participations.

    Raises:
        ValueError: If `charges` is no list of names, or is empty.
    """

    def mark(method: Method) -> Method:
        _require_slots("central step", method.__name__, charges)
        method.central_step = ClientStep(method.__name__, tuple(charges), {}, {}, clients_in)  # type: ignore[attr-defined]
        return method

    return mark


def _require_slots(what: str, name: str, charges: list[str]) -> None:
    """ValueError for a step that charges nothing, or whose slots are no list: each letter of a text would be a slot."""
    if not isinstance(charges, list | tuple) or not all(isinstance(slot, str) for slot in charges):
        example = charges if isinstance(charges, str) else "train"
        raise ValueError(f"charges of {what} {name!r} is {shown(charges)}: must be a list of names, {[example]!r}")
    if not charges:
        raise ValueError(
            f"charges of {what} {name!r} is {charges!r}: must name at least one slot of the plan, which pays for the release"
        )


def _require_tensors(step: str, argument: str, tensors: Mapping[str, TensorSpec]) -> None:
    """ValueError for tensors of a client step that are not named, or not described by a `TensorSpec`."""
    named = isinstance(tensors, Mapping) and all(isinstance(name, str) for name in tensors)
    if not named or not all(isinstance(spec, TensorSpec) for spec in tensors.values()):
        raise ValueError(
            f"{argument} of client step {step!r} is {shown(tensors)}: must map names to TensorSpecs, as {{'model': MODEL}}; "
            "{} for no tensors"
        )


def full_epochs(local: LocalTraining, client: ClientEntry) -> tuple[float, int, Literal["poisson", "allocation"]]:
    """Compute sampling rate and steps of one round of local DP-SGD.

    Args:
        local: Local training.
        client: The client's roster entry.

    Returns:
        Rate, steps and sampling of a `DPSGDSlot`: (b/N, K ceil(N/b), "poisson") or (1 / ceil(N/b), K ceil(N/b), "allocation").
    """
    batch = min(local.batch_size, client.records)
    batches = -(-client.records // batch)
    rate = 1 / batches if local.sampling == "allocation" else batch / client.records
    return rate, local.epochs * batches, local.sampling


def dpsgd_norm(algorithm: Algorithm, client: ClientEntry) -> float:
    """Bound the L2 norm of an honest client's update after one round of DP-SGD.

    A round of S = K ceil(N/b) steps at learning rate lr adds sums over about b records of gradients of norm at most c, and
    noise of deviation z c in p dimensions. Its norm is at most lr S ((b + 12 sqrt(b) + 12) c + z c (sqrt(p) + 12)) / b except
    with probability below 1e-12. The bound also holds for a full-batch step (b = N).

    Args:
        algorithm: The job's algorithm.
        client: The client's roster entry.
    """
    local, p = algorithm.protocol.local, algorithm.protocol.model.parameters
    rate, steps, _ = full_epochs(local, client)
    b, c, z = rate * client.records, local.clip, given(client.noise_multiplier)
    return local.lr * steps * c * ((b + 12 * b**0.5 + 12) + z * (p**0.5 + 12)) / b


def noisy_sum_norm(client: ClientEntry, *, ratio: float, bound: float, size: int) -> float:
    """Bound the L2 norm of what an honest client's `noisy_sum` returns.

    N records add rows of norm at most B, and the noise has deviation r z B in each of m numbers. The norm is at most
    N B + r z B (sqrt(m) + 12) except with probability below exp(-72) (Gaussian concentration), and rounding to float32 makes it
    longer by less than 2^-20 of itself.

    Args:
        client: The client's roster entry.
        ratio: r, the `ratio` of the sum's slot.
        bound: B, to which the mechanism clips each row.
        size: m, numbers in the sum.
    """
    noise = ratio * given(client.noise_multiplier) * (math.sqrt(size) + 12)
    return bound * (client.records + noise) * (1 + 2.0**-20)


def any_norm(algorithm: Algorithm, client: ClientEntry) -> float:
    """Return inf, the bound of a raw update: a trusted server clips it, or nothing protects it.

    Args:
        algorithm: The job's algorithm.
        client: The client's roster entry.
    """
    return math.inf


MODEL = TensorSpec("f4", ("p",))
MODELS = TensorSpec("f4", ("M", "p"))
INDEX = TensorSpec("i8")
UPDATE = TensorSpec("f4", ("p",), max_norm=dpsgd_norm)
EXACT_UPDATE = TensorSpec("f4", ("p",), max_norm=dpsgd_norm, exact=True)
RAW_UPDATE = TensorSpec("f4", ("p",), max_norm=any_norm)

# Positional arguments of the methods of an algorithm.
_CALLS = {
    "capabilities_for": ("options", "setting"),
    "problems": ("options", "setting"),
    "plan": ("client",),
    "central_plan": (),
    "secure_group": ("t",),
    "secure_code": ("participants",),
    "start": ("fed",),
    "round": ("state", "t", "fed"),
}


@cache
def registry() -> dict[str, type[Algorithm]]:
    """Return every algorithm of this package by name."""
    package = importlib.import_module("dpcfl_net.algorithms")
    found: dict[str, type[Algorithm]] = {}
    for module in pkgutil.iter_modules(package.__path__):
        loaded = importlib.import_module(f"dpcfl_net.algorithms.{module.name}")
        for value in vars(loaded).values():
            if isinstance(value, type) and issubclass(value, Algorithm) and value.name:
                found[value.name] = value
    return dict(sorted(found.items()))


def find(name: str) -> type[Algorithm]:
    """Find an algorithm.

    Args:
        name: Name of an algorithm of this package, or `package.module:Class`.

    Raises:
        ConfigError: If there is no such algorithm, or the class is not derived from `Algorithm`, lacks one of its methods, has one
            that cannot be called as the algorithm's, or has options of another kind.
    """
    if not plugins.is_plugin(name):
        if name not in registry():
            known = f"must be one of {', '.join(registry())} or package.module:Class"
            raise ConfigError(f"algorithm.name is {shown(name)}: {known}{hint(name, registry())}")
        return registry()[name]
    plugin = plugins.load("algorithm.name", name)
    if not (isinstance(plugin, type) and issubclass(plugin, Algorithm)):
        raise ConfigError(f"algorithm.name is {name!r}: must be a class derived from dpcfl_net.algorithms.base.Algorithm")
    if missing := sorted(plugin.__abstractmethods__):
        raise ConfigError(f"algorithm.name is {name!r}: the class must define {', '.join(missing)}")
    if not (isinstance(plugin.Options, type) and issubclass(plugin.Options, Options)):
        raise ConfigError(
            f"algorithm.name is {name!r}: its Options must be a class derived from dpcfl_net.algorithms.base.Options"
        )
    if "name" in plugin.Options.model_fields:
        raise ConfigError(
            f"algorithm.name is {name!r}: its Options have an option 'name', which is the key of the algorithm itself: give the option another name"
        )
    if problems := _signature_problems(plugin):
        raise ConfigError([f"algorithm.name is {name!r}: {problem}" for problem in problems])
    return plugin


def _signature_problems(algorithm: type[Algorithm]) -> list[str]:
    """Find methods and steps of a class that cannot be called as they are: a step would fail after its charge."""
    unbuilt, problems = object.__new__(algorithm), []
    for method, parameters in _CALLS.items():
        owner = (
            algorithm if method in ("capabilities_for", "problems") else unbuilt
        )  # class methods, called before there is a job
        if reason := misfit(getattr(owner, method), *parameters):
            problems.append(f"`{method}` is called as {method}({', '.join(parameters)}), and {reason}")
    for kind, step in declared_steps(algorithm).items():
        tensors = step.takes.keys() - (MASKING if MASKING.keys() <= step.takes.keys() else ())
        called = ", ".join(["me", *(f"{tensor}=..." for tensor in step.takes if tensor in tensors)])
        if reason := misfit(getattr(unbuilt, kind, None), "me", **dict.fromkeys(tensors)):
            problems.append(f"client step {kind!r} is called as {kind}({called}), the names in its `takes`, and {reason}")
    return problems


def algorithm_of(protocol: Protocol) -> Algorithm:
    """Build the algorithm that a protocol names.

    Args:
        protocol: The signed protocol.

    Raises:
        Refused: If this version or folder does not have the algorithm, or its options are invalid.
    """
    try:
        return find(protocol.algorithm)(protocol)
    except ConfigError as error:
        raise Refused("algorithm", f"the job's {error}") from error
    except ValidationError as error:
        raise Refused("algorithm", f"the job's options of {protocol.algorithm}: {invalid_fields(error)}") from None
