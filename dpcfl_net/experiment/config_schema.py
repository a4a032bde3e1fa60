"""Schema of a configuration: its sections, `Config`, and the JSON schema of both."""

from __future__ import annotations

import re
from itertools import accumulate, pairwise
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
)

from dpcfl_net.algorithms.base import Algorithm, find, registry
from dpcfl_net.core.config_messages import sentences
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import shown
from dpcfl_net.core.frozen import StrictModel
from dpcfl_net.core.protocol import LARGE_ROSTER
from dpcfl_net.core.roster import MOST_EPSILON
from dpcfl_net.core.signed_settings import LocalTraining, PrivacyTarget
from dpcfl_net.core.tuning import Tuning
from dpcfl_net.core.types import SANE_EPSILON
from dpcfl_net.data.settings import MOST_CLIENTS, DataSettings
from dpcfl_net.experiment.availability_settings import AvailabilitySettings
from dpcfl_net.experiment.communication_settings import CommunicationSettings
from dpcfl_net.experiment.network_settings import NetworkSettings
from dpcfl_net.federation.capabilities import Capabilities, Setting
from dpcfl_net.training import models
from dpcfl_net.transport.transcript import Mode

# Larger numbers are mistakes.
MOST_ROUNDS = 100_000
MOST_AGGREGATORS = 1_000
MOST_SECONDS = 1_000_000.0  # eleven days


def _folder_name(name: str) -> str:
    """Return the name if it is a valid name of a run folder."""
    odd = any(not letter.isprintable() or letter in "/\\" for letter in name)
    if odd or not 0 < len(name.encode()) <= 100 or name[0] in ".-~" or name != name.strip():
        rule = "1 to 100 bytes without slashes, control characters and outer spaces, not starting with a dot, a dash or a tilde"
        raise ValueError(f"is {shown(name)}: must be {rule}")
    return name


class Section(StrictModel):
    """A section of the configuration; unknown keys are errors."""

    model_config = ConfigDict(allow_inf_nan=False)


class ModelSettings(Section):
    """The `model` section."""

    name: str = Field(default="cnn", description=f"{', '.join(models.NAMES)}, or your own: package.module:function")


class DataSection(DataSettings):
    """The `data` section."""

    root: str | None = Field(
        default=None, min_length=1, description="folder of the data sets; null: $DPCFL_DATA, else the user's cache folder"
    )


def _text_keys(value: Any) -> Any:
    """Turn client ids that YAML read as numbers into text; other values stay, for the schema to refuse."""
    return {str(key): own for key, own in value.items()} if isinstance(value, dict) else value


def client_span(text: str) -> range | None:
    """Read a client id ("3") or a range of ids ("3-7"); None if it is neither."""
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text)
    return range(int(match[1]), int(match[2] or match[1]) + 1) if match else None


class PrivacySection(PrivacyTarget):
    """The `privacy` section."""

    @field_validator("epsilon", mode="before")
    @classmethod
    def _is_finite(cls, value: Any) -> Any:
        """Refuse an infinite epsilon, and name settings with almost no noise: a run has a guarantee or a reason why it has none."""
        if value is None or str(value).lower() in ("inf", "+inf", ".inf", "infinity", "none", "off"):
            raise ValueError(
                f"is {'null' if value is None else shown(value)}: must be a number from 0.000000001 to {MOST_EPSILON:,.0f}; "
                "for a baseline with almost no noise: privacy.epsilon=10000 runtime.max_epsilon=10000"
            )
        return value

    noise_seed: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{64}$",
        description="noise seeded: secret of all noise, 64 hex digits; null: a new one for each run, in its config.yaml",
    )
    epsilon_by_client: Annotated[dict[str, Annotated[float, Field(ge=1e-9, le=MOST_EPSILON)]], BeforeValidator(_text_keys)] = (
        Field(
            default={},
            description="clients with their own target epsilon: client id or range of ids (3-7) to epsilon; others have epsilon",
        )
    )

    def epsilons(self) -> dict[int, float]:
        """Return the own target epsilon of each client in `epsilon_by_client`."""
        return {i: epsilon for span, epsilon in self.epsilon_by_client.items() for i in client_span(span) or ()}

    def epsilon_problems(self, clients: int) -> list[str]:
        """List the problems of `epsilon_by_client`.

        Args:
            clients: Number of clients.
        """
        name, found, seen = "privacy.epsilon_by_client", list[str](), set[int]()
        for span in self.epsilon_by_client:
            ids = client_span(span)
            if ids is None or not ids or ids[-1] >= clients:
                found.append(
                    f"{name} names {span!r}: must be a client id or a range of ids such as 3-7, from 0 to {clients - 1}"
                )
                continue
            if twice := sorted(seen & set(ids)):
                found.append(f"{name} names client {twice[0]} twice: each client must be in one range")
            seen |= set(ids)
        if self.epsilon_by_client and (self.unit, self.trust) != ("sample", "untrusted-server"):
            why = "since the noise of a trusted server or of a secure sum protects all clients alike"
            found.append(f"{name} needs privacy.unit sample and privacy.trust untrusted-server, {why}")
        return found


class BudgetSettings(Section):
    """The `ledger.budget` section."""

    epsilon: float = Field(gt=0, le=MOST_EPSILON, description="limit on the joint epsilon of all runs on a record")
    delta: float = Field(gt=0, lt=1, description="delta of that limit")


class LedgerSettings(Section):
    """The `ledger` section."""

    scope: Literal["run", "dataset"] = Field(
        default="run",
        description="run: budget of this run only; dataset: all runs on the same records with this scope and root are composed",
    )
    root: str | None = Field(
        default=None, min_length=1, description="scope dataset: folder of the record book, kept across runs"
    )
    budget: BudgetSettings | None = Field(
        default=None,
        description="scope dataset: joint limit of all runs, {epsilon, delta}; null: no limit",
    )


class TransportSettings(Section):
    """The `runtime.transport` section."""

    security: Literal["curve", "none"] = Field(
        default="curve", description="curve: encrypted and authenticated; none: loopback only, declared in the statement"
    )


def _number_or_sizes(value: Any) -> Any:
    """Refuse what is neither a number of aggregators nor a list of group sizes, in one sentence."""
    sizes = value if isinstance(value, list) else [1]
    is_number = type(value) is int and 0 <= value <= MOST_AGGREGATORS
    are_sizes = isinstance(value, list) and 0 < len(value) <= MOST_AGGREGATORS
    if (is_number or are_sizes) and all(type(size) is int and size >= 1 for size in sizes):
        return value
    raise ValueError(
        f"is {shown(value)}: must be a number from 0 to {MOST_AGGREGATORS:,}, or a list with the number of clients of each "
        "aggregator, at least 1, as [5, 3]"
    )


GpuUuid = Annotated[str, Field(pattern=r"^(GPU|MIG)-[0-9A-Za-z/-]+$")]


class RuntimeSettings(Section):
    """The `runtime` section."""

    federation: Literal["network", "in-process"] = Field(
        default="network",
        description="in-process: all clients in one process without sockets, for sweeps and quick tests; with one noise_seed the same bits",
    )
    transport: TransportSettings = Field(default=TransportSettings(), description="transport of messages")
    slots: Annotated[int, Field(ge=1, le=10_000)] | Literal["auto"] = Field(
        default="auto", description="workers that may compute on the CPU at once; auto: one per usable core"
    )
    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|cuda|cuda:[0-9]{1,3})$",
        description="device of the workers: auto (GPUs if available and torch is built with CUDA), cpu, cuda (all GPUs), "
        "cuda:N (one, from 0); results on a GPU differ in bits from the CPU",
    )
    gpus: list[GpuUuid] = Field(
        default=[], description="UUIDs of the only GPUs or MIG slices to use, as printed by nvidia-smi -L"
    )
    gpu_placement: Literal["round-robin", "free-memory"] = Field(
        default="round-robin", description="assignment of workers to several GPUs: in turn, or by free memory"
    )
    slots_per_gpu: int = Field(
        default=1, ge=1, le=1_000, description="workers that may compute on one GPU at once; others wait"
    )
    gpu_memory_fraction: float | None = Field(
        default=None, gt=0, le=1, description="fraction of a GPU's memory that one worker may allocate; null: no limit"
    )
    round_timeout_s: float = Field(
        default=600,
        gt=0,
        le=MOST_SECONDS,
        description="seconds from its turn to compute after which a client without an answer is missing",
    )
    join_timeout_s: float = Field(
        default=120, gt=0, le=MOST_SECONDS, description="seconds that the coordinator waits for its clients"
    )
    pause_s: float = Field(
        default=300,
        ge=0,
        le=MOST_SECONDS,
        description="seconds that a round below the quorum waits for clients to return; 0: the run fails at once",
    )
    max_epsilon: float | None = Field(
        default=None,
        gt=0,
        le=MOST_EPSILON,
        description="workers refuse a job with a larger epsilon, and a job without a guarantee; null: "
        f"{SANE_EPSILON:g}, and jobs that declare that they have no guarantee are accepted",
    )
    max_delta: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="workers refuse a larger delta; null: 1 / number of protected records (or clients)",
    )
    orphan_timeout_s: float = Field(
        default=60, gt=0, le=MOST_SECONDS, description="seconds without a coordinator after which a worker leaves"
    )
    quorum: float = Field(default=1.0, gt=0, le=1, description="fraction of clients that must answer a round")
    max_restarts: int = Field(default=2, ge=0, le=1_000, description="restarts of each process that crashes")
    max_live_workers: int = Field(
        default=100,
        ge=1,
        le=10_000,
        description="maximum number of clients connected at once; others connect in turn",
    )
    durable: bool = Field(
        default=True,
        description="flush each charge, answer and checkpoint to the disk; false: a crash of the machine, not of a process, may "
        "lose charges, and a host with DPCFL_DURABLE=1 flushes in any case",
    )
    clients_per_worker: int = Field(
        default=1,
        ge=1,
        le=MOST_CLIENTS,
        description=f"clients per process; each has its own identity; if unset with {LARGE_ROSTER:,} clients or more: a 32nd of them, at least 100",
    )
    aggregators: Annotated[int | list[int], BeforeValidator(_number_or_sizes)] = Field(
        default=0,
        description="aggregator processes; each adds the answers of its share of the clients, so that the server handles an "
        f"answer per aggregator; at most {MOST_AGGREGATORS:,}; 0: none; a list: the number of clients of each; part of the signed job",
    )

    def groups(self, clients: int) -> list[range]:
        """Return the clients of each aggregator, in order; empty without aggregators.

        Args:
            clients: Number of clients; a list of sizes must add up to it.
        """
        if isinstance(self.aggregators, list):
            ends = list(accumulate(self.aggregators))
            return [range(start, end) for start, end in pairwise([0, *ends])]
        count = self.aggregators
        return [range(clients * k // count, clients * (k + 1) // count) for k in range(count)]

    def worker_processes(self, clients: int) -> int:
        """Return the largest number of worker processes at a time; 0 for a run in one process.

        Args:
            clients: Number of clients.
        """
        if self.federation == "in-process":
            return 0
        size = self.clients_per_worker
        return min(clients, self.max_live_workers) if size == 1 else -(-clients // size)


class OutputSettings(Section):
    """The `output` section."""

    transcript: Mode = Field(
        default="headers",
        description="the server's record of its messages: off: none; headers: without tensors; full: with tensors",
    )
    keep_checkpoints: int = Field(default=2, ge=1, le=MOST_ROUNDS, description="number of newest checkpoints to keep")
    evaluate_every: Annotated[int, Field(ge=1, le=MOST_ROUNDS)] | Literal["auto"] = Field(
        default=1,
        description="interval of the observer's evaluations in rounds; the last round is always evaluated; auto: the smallest "
        "interval at which evaluation takes at most a tenth of the computation of the clients",
    )
    personal_models: bool = Field(
        default=False, description="export the personal models of clients on this machine at the end of the run"
    )


class AuditSettings(Section):
    """The `audit` section."""

    canaries: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="canaries in the record slots of an audited client, which has no other records, for `dpcfl audit`; with privacy.unit "
        "client: the number of clients that are a canary each, while others send zeros; 0: none",
    )
    client: Annotated[int, Field(ge=0, lt=MOST_CLIENTS)] | Literal["all"] = Field(
        default="all", description="audited client of the roster; its accuracy is meaningless"
    )


class NetworkSection(NetworkSettings):
    """The `network` section: links, and the cores of the clients in virtual time."""

    cores: Annotated[int, Field(ge=1, le=10_000)] | None = Field(
        default=None, description="clock virtual: cores that all clients share; null: each client has a separate device"
    )


class Config(Section):
    """An experiment, one YAML file; `dpcfl schema` prints this with every algorithm's options."""

    name: Annotated[str, AfterValidator(_folder_name)] = Field(description="name of the experiment and its run folders")
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed from which the seed of every random purpose is derived")
    data: DataSection = Field(description="data of the clients")
    model: ModelSettings = Field(default=ModelSettings(), description="the model template")
    rounds: int = Field(ge=2, le=MOST_ROUNDS, description="rounds of the whole run (E)")
    local: LocalTraining = Field(default=LocalTraining(), description="local training")
    privacy: PrivacySection = Field(description="guarantee to every client")
    communication: CommunicationSettings = Field(default=CommunicationSettings(), description="forms of messages")
    algorithm: dict[str, Any] = Field(description="name and options of the algorithm")
    algorithms: dict[str, dict[str, Any]] = Field(default={}, description="options and `local` overrides by algorithm")
    ledger: LedgerSettings = Field(default=LedgerSettings(), description="scope of the ledgers")
    runtime: RuntimeSettings = Field(default=RuntimeSettings(), description="processes and transport")
    output: OutputSettings = Field(default=OutputSettings(), description="files that a run writes")
    network: NetworkSection = Field(default=NetworkSection(), description="links of the clients; not part of the signed job")
    audit: AuditSettings = Field(default=AuditSettings(), description="canaries for a lower bound on epsilon")
    availability: AvailabilitySettings = Field(
        default=AvailabilitySettings(), description="rounds in which clients are there; public"
    )
    tuning: Tuning | None = Field(
        default=None, description="how settings were chosen, for the privacy statement; filled in by `dpcfl tune`"
    )

    @model_serializer(mode="wrap")
    def _without_unused_sections(self, standard: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Omit these sections when unset so that the configuration's bytes are unchanged.
        used = {
            "audit": bool(self.audit.canaries),
            "communication": not self.communication.usual,
            "network": self.network != NetworkSection(),
            "availability": bool(self.availability.clients),
            "tuning": self.tuning is not None,
        }
        return {key: value for key, value in standard(self).items() if used.get(key, True)}

    @property
    def algorithm_class(self) -> type[Algorithm]:
        return find(str(self.algorithm.get("name")))  # a damaged file may lack it

    @property
    def options(self) -> Any:
        """Validated options of the chosen algorithm; ConfigError if one is not allowed."""
        try:
            return self.algorithm_class.Options.read({k: v for k, v in self.algorithm.items() if k != "name"})
        except ValidationError as error:
            raise ConfigError(sentences(error, lambda key: "", "algorithm")) from None

    @property
    def setting(self) -> Setting:
        """Public facts that the algorithm's options are checked against."""
        clients = self.data.client_count
        spans = (self.availability.spans(client, self.rounds) for client in self.availability.clients)
        away = sum(found is not None and found[0][0] > 1 for found in spans)
        return Setting(
            self.rounds,
            clients,
            self.local,
            self.privacy,
            self.data.validation,
            away_at_first=away,
            upload=self.communication.up,
        )

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the chosen algorithm under its options; ConfigError if its method returns something else."""
        found = self.algorithm_class.capabilities_for(self.options, self.setting)
        if not isinstance(found, Capabilities):
            name, got = self.algorithm["name"], type(found).__name__
            raise ConfigError(f"{name}: `capabilities_for` returned {got}: must be Capabilities")
        return found


def schema() -> dict[str, Any]:
    """Return the JSON schema of the configuration with the options of every algorithm."""
    document = Config.model_json_schema()
    options = {name: cls.Options.model_json_schema() for name, cls in registry().items()}
    for name, part in options.items():
        document.setdefault("$defs", {}).update(part.pop("$defs", {}))
        part["properties"] = {**part.get("properties", {}), "name": {"const": name}}
        part["title"] = name
    document["properties"]["algorithm"] = {
        "description": "name (or your own: package.module:Class) and options; or the name alone",
        "anyOf": [*options.values(), {"type": "string", "examples": list(options)}],
    }
    document["properties"]["model"]["anyOf"] = [{"$ref": document["properties"]["model"].pop("$ref")}, {"type": "string"}]
    return document
