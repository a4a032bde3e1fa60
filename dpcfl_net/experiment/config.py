"""Configuration of one experiment: schema, YAML, overrides, and error messages with the nearest valid name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from dpcfl_net.algorithms.base import Algorithm, registry
from dpcfl_net.algorithms.base import find as find_algorithm
from dpcfl_net.core import yaml_file
from dpcfl_net.core.config_messages import allowed_keys, known_keys, nearest_key, sentences
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import shown
from dpcfl_net.core.names import hint
from dpcfl_net.core.plugins import is_plugin
from dpcfl_net.core.plugins import load as load_function
from dpcfl_net.core.protocol import MOST_EPSILON, LocalTraining, PrivacyTarget
from dpcfl_net.core.types import SANE_EPSILON
from dpcfl_net.data import datasets
from dpcfl_net.data.partition import MOST_CLIENTS, DataSettings, open_set, plan_slices, shift_problems
from dpcfl_net.experiment.config_options import with_algorithm
from dpcfl_net.experiment.config_overrides import change, plain
from dpcfl_net.federation.capabilities import Capabilities, Setting
from dpcfl_net.training import models

PACKAGED = Path(__file__).parents[1] / "configs"  # configurations that come with the package
# Larger numbers are mistakes; within these limits making a job takes about a minute at most.
MOST_ROUNDS = 100_000
MOST_SECONDS = 1_000_000.0  # eleven days
MOST_ANSWERS = 2_000_000  # rounds times clients
MOST_STEPS = 500_000  # of one client's local training over the whole run


def _folder_name(name: str) -> str:
    """Return the name if it is a valid name of a run folder."""
    odd = any(not letter.isprintable() or letter in "/\\" for letter in name)
    if odd or not 0 < len(name.encode()) <= 100 or name[0] in ".-~" or name != name.strip():
        rule = "1 to 100 bytes without slashes, control characters and outer spaces, not starting with a dot, a dash or a tilde"
        raise ValueError(f"is {shown(name)}: must be {rule}")
    return name


class Section(BaseModel):
    """A section of the configuration; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ModelSettings(Section):
    """The `model` section."""

    name: str = Field(default="cnn", description=f"{', '.join(models.NAMES)}, or your own: package.module:function")


class DataSection(DataSettings):
    """The `data` section."""

    root: str | None = Field(
        default=None, description="folder of the data sets; null: $DPCFL_DATA, else the user's cache folder"
    )


class PrivacySection(PrivacyTarget):
    """The `privacy` section."""

    noise_seed: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{64}$",
        description="noise seeded: secret of all noise, 64 hex digits; null: a new one for each run, in its config.yaml",
    )


class BudgetSettings(Section):
    """The `ledger.budget` section."""

    epsilon: float = Field(gt=0, le=MOST_EPSILON, description="limit on the joint epsilon of all runs on a record")
    delta: float = Field(gt=0, lt=1, description="delta of that limit")


class LedgerSettings(Section):
    """The `ledger` section."""

    scope: Literal["run", "dataset"] = Field(
        default="run", description="run: budget of this run only; dataset: all runs on the same records are composed"
    )
    root: str | None = Field(default=None, description="scope dataset: folder of the record book, kept across runs")
    budget: BudgetSettings | None = Field(
        default=None,
        description="scope dataset: joint limit of all runs, {epsilon, delta}; null: no limit",
    )


class TransportSettings(Section):
    """The `runtime.transport` section."""

    security: Literal["curve", "none"] = Field(
        default="curve", description="curve: encrypted and authenticated; none: loopback only, declared in the statement"
    )


class RuntimeSettings(Section):
    """The `runtime` section."""

    federation: Literal["network", "in-process"] = Field(
        default="network",
        description="in-process: all clients in one process without sockets, same bits; for sweeps and quick tests",
    )
    transport: TransportSettings = Field(default=TransportSettings(), description="transport of messages")
    slots: Annotated[int, Field(ge=1, le=10_000)] | Literal["auto"] = Field(
        default="auto", description="workers that may compute on the CPU at once; auto: one per core"
    )
    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|cuda|cuda:[0-9]{1,3})$",
        description="device of the workers: auto (GPUs if available and torch is built with CUDA), cpu, cuda (all GPUs), "
        "cuda:N (one, from 0); results on a GPU differ in bits from the CPU",
    )
    gpus: list[Annotated[str, Field(pattern=r"^(GPU|MIG)-[0-9A-Za-z/-]+$")]] = Field(
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
        default=600, gt=0, le=MOST_SECONDS, description="seconds after which a client without an answer is missing"
    )
    join_timeout_s: float = Field(
        default=120, gt=0, le=MOST_SECONDS, description="seconds that the coordinator waits for its clients"
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
    max_restarts: int = Field(default=2, ge=0, le=1_000, description="restarts of one crashed worker")
    max_live_workers: int = Field(
        default=100,
        ge=1,
        le=MOST_CLIENTS,
        description="maximum number of clients connected at once; others connect in turn",
    )
    clients_per_worker: int = Field(
        default=1, ge=1, le=MOST_CLIENTS, description="clients per process; each has its own identity"
    )


class OutputSettings(Section):
    """The `output` section."""

    transcript: Annotated[
        Literal["off", "headers", "full"], BeforeValidator(lambda value: "off" if value is False else value)
    ] = Field(default="headers", description="content of the server's transcript")  # YAML reads a bare off as false
    keep_checkpoints: int = Field(default=2, ge=1, le=MOST_ROUNDS, description="number of newest checkpoints to keep")
    evaluate_every: int = Field(
        default=1,
        ge=1,
        le=MOST_ROUNDS,
        description="interval of the observer's evaluations in rounds; the last round is always evaluated",
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
        description="canaries in the record slots of an audited client, which has no other records, for `dpcfl audit`; 0: none",
    )
    client: Annotated[int, Field(ge=0, lt=MOST_CLIENTS)] | Literal["all"] = Field(
        default="all", description="audited client of the roster; its accuracy is meaningless"
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
    algorithm: dict[str, Any] = Field(description="name and options of the algorithm")
    algorithms: dict[str, dict[str, Any]] = Field(default={}, description="options and `local` overrides by algorithm")
    ledger: LedgerSettings = Field(default=LedgerSettings(), description="scope of the ledgers")
    runtime: RuntimeSettings = Field(default=RuntimeSettings(), description="processes and transport")
    output: OutputSettings = Field(default=OutputSettings(), description="files that a run writes")
    audit: AuditSettings = Field(default=AuditSettings(), description="canaries for a lower bound on epsilon")

    @model_serializer(mode="wrap")
    def _without_empty_audit(self, standard: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Omit `audit` when unset so that the configuration's bytes are unchanged.
        return {key: value for key, value in standard(self).items() if key != "audit" or self.audit.canaries}

    @property
    def algorithm_class(self) -> type[Algorithm]:
        return find_algorithm(self.algorithm["name"])

    @property
    def options(self) -> Any:
        """Validated options of the chosen algorithm."""
        return self.algorithm_class.Options.model_validate({k: v for k, v in self.algorithm.items() if k != "name"})

    @property
    def setting(self) -> Setting:
        """Public facts that the algorithm's options are checked against."""
        return Setting(self.rounds, sum(self.data.clients), self.local, self.privacy, self.data.validation)

    @property
    def capabilities(self) -> Capabilities:
        """What the chosen algorithm protects, needs and publishes under its options."""
        return self.algorithm_class.capabilities_for(self.options, self.setting)


def find(name: str | Path) -> Path:
    """Find a configuration by path or by the name of a packaged one.

    Args:
        name: Path of a YAML file, or a name such as "quickstart" or "r_dpcfl/fmnist_rotation". A file takes precedence over a name.

    Returns:
        Path of the YAML file.

    Raises:
        ConfigError: If it is neither; the message suggests the nearest packaged name.
    """
    packaged, text = packaged_names(), str(name)
    if not os.path.isfile(name) and (plain := text.removesuffix(".yaml").removeprefix("configs/")) in packaged:
        return PACKAGED / f"{plain}.yaml"
    if not os.path.exists(name):  # False also for an invalid file name
        raise ConfigError(f"no such configuration file: {name}{hint(text.removesuffix('.yaml'), packaged)}")
    return Path(name)


def packaged_names() -> list[str]:
    """Names of the configurations that come with the package, sorted."""
    return sorted(str(path.relative_to(PACKAGED).with_suffix("")) for path in PACKAGED.rglob("*.yaml"))


def load(source: str | Path | Mapping[str, Any] | Config, overrides: Iterable[str] | Mapping[str, Any] = ()) -> Config:
    """Load and check one configuration.

    Args:
        source: Path of a YAML file, name of a packaged configuration (see `find`), a document, or a configuration to change.
        overrides: `key=value` texts with YAML values, or a mapping. Keys are dotted; nested mappings are merged. Another
            `algorithm.name` drops the options of a configuration's algorithm.

    Returns:
        The checked configuration.

    Raises:
        ConfigError: Lists every problem: field, value and allowed values.
    """
    changes = overrides if isinstance(overrides, Mapping) else list(overrides)
    document = source_document(source)
    if isinstance(source, Config):
        wanted = change({}, changes).get("algorithm")
        if isinstance(wanted, dict) and wanted.get("name", source.algorithm["name"]) != source.algorithm["name"]:
            document["algorithm"] = {}
    return resolve(change(document, changes))


def source_document(source: str | Path | Mapping[str, Any] | Config) -> dict[str, Any]:
    """Return a copy of the document that `load` starts from; errors as `find`."""
    if isinstance(source, Config):
        return source.model_dump(mode="json")
    return dict(plain(source)) if isinstance(source, Mapping) else read_document(find(source))


def read_kept(path: Path) -> Config:
    """Read the resolved configuration of a run folder, without the data set; ConfigError naming the file if it is damaged."""
    try:
        return Config.model_validate(read_document(path), strict=True)
    except ValidationError as error:
        raise ConfigError([f"{path}: {problem}" for problem in sentences(error, _key_hint)]) from None


def read_document(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file without validation; ConfigError if the file holds no mapping."""
    document = yaml_file.load(path)
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must hold a mapping of keys to values")
    return document


def resolve(document: Mapping[str, Any]) -> Config:
    """Validate a document, merge the chosen algorithm's options, and check combinations of settings.

    `data.sha256` of a plugin data set is filled in.

    Args:
        document: A configuration as written.

    Raises:
        ConfigError: Lists every problem.
    """
    problems: list[str] = []
    document = _with_dependent_defaults(with_algorithm(document, problems, _key_hint))
    config: Config | None = None
    try:
        config = Config.model_validate(document, strict=True)
    except ValidationError as error:
        problems += sentences(error, _key_hint)
    if config is not None and not problems:
        problems += _combination_problems(config)
    if problems or config is None:
        raise ConfigError(list(dict.fromkeys(problems)))
    sha256 = open_set(config.data, config.data.root).sha256
    return config.model_copy(update={"data": config.data.model_copy(update={"sha256": sha256})})


def _with_dependent_defaults(document: Mapping[str, Any]) -> dict[str, Any]:
    """Set defaults that depend on other settings: no transcript in one process unless requested."""
    runtime, output = document.get("runtime"), document.get("output", {})
    in_process = isinstance(runtime, dict) and runtime.get("federation") == "in-process"
    if not in_process or not isinstance(output, dict) or "transcript" in output:
        return dict(document)
    return {**document, "output": {**output, "transcript": "off"}}


# Functions, not pydantic validators: a validator that raises leaves no Config, so that the checks of other sections, the
# algorithm and the data set would have to wait for the next attempt.
def _combination_problems(config: Config) -> list[str]:
    """Problems of valid settings that cannot be combined."""
    problems = _model_problems(config.model.name)
    if (answers := config.rounds * sum(config.data.clients)) > MOST_ANSWERS:
        problems.append(
            f"rounds is {config.rounds}: times {sum(config.data.clients)} clients gives {answers:,}, "
            f"must be at most {MOST_ANSWERS:,}"
        )
    unknown_set = _name_problems("data.dataset", config.data.dataset, datasets.NAMES)
    if unknown_set:
        problems += unknown_set
    else:
        try:
            problems += _data_problems(config, known_model=not problems)
        except ConfigError as error:
            problems += error.problems
    if config.ledger.scope == "dataset" and config.ledger.root is None:
        problems.append("ledger.root is missing: scope dataset needs a folder that is kept after the run")
    if config.ledger.scope == "run" and (config.ledger.root or config.ledger.budget):
        problems.append("ledger.root and ledger.budget belong to scope dataset; ledger.scope is 'run'")
    problems += _privacy_problems(config)
    if config.runtime.federation == "in-process" and config.output.transcript != "off":
        problems.append("output.transcript must be off where runtime.federation is 'in-process', which sends no messages")
    problems += _device_problems(config.runtime)
    problems += _ledger_problems(config)
    problems += _pace_problems(config)
    problems += _audit_problems(config)
    if config.output.personal_models and not config.capabilities.personal:
        problems.append(
            f"output.personal_models is true: must be false, since {config.algorithm['name']} has no personal models"
        )
    return problems + config.algorithm_class.problems(config.options, config.setting)


def _device_problems(runtime: RuntimeSettings) -> list[str]:
    """Problems of device settings."""
    problems = []
    if runtime.gpus and runtime.device not in ("auto", "cuda"):
        problems.append(f"runtime.gpus is {runtime.gpus}: runtime.device must be cuda or auto with it, got {runtime.device!r}")
    if runtime.federation == "in-process" and (runtime.gpus or runtime.device not in ("auto", "cpu")):
        problems.append(
            f"runtime.device is {runtime.device!r}, runtime.gpus {runtime.gpus}: must be auto or cpu, and none, where "
            "runtime.federation is 'in-process', which computes on the CPU"
        )
    return problems


def _privacy_problems(config: Config) -> list[str]:
    """Problems of privacy settings that the algorithm does not support."""
    privacy, algorithm = config.privacy, config.algorithm_class
    problems = []
    if privacy.noise_seed is not None and privacy.noise != "seeded":
        problems.append(f"privacy.noise_seed belongs to privacy.noise seeded, got {privacy.noise!r}")
    if privacy.noise == "seeded" and config.ledger.scope == "dataset":
        problems.append(
            "ledger.scope is 'dataset': needs privacy.noise os, since runs with seeded noise have no epsilon to compose"
        )
    if (privacy.unit, privacy.trust) not in config.capabilities.protects:
        pairs = ", or ".join(f"unit {unit} with trust {trust}" for unit, trust in config.capabilities.protects)
        problems.append(
            f"privacy.unit is {privacy.unit!r}, privacy.trust {privacy.trust!r}: {algorithm.name} works with {pairs}"
        )
    if (privacy.adjacency, privacy.accountant, privacy.trust) == ("replace-one", "rdp", "untrusted-server"):
        problems.append("privacy.accountant is 'rdp': replace-one has no sound Renyi bound here, use 'pld'")
    for name in ("momentum", "weight_decay"):
        value = getattr(config.local, name)
        if value and not config.capabilities.plain_sgd:
            problems.append(
                f"local.{name} is {value}: must be 0, since {algorithm.name} trains by DP-SGD, which does not use it"
            )
    return problems


def _pace_problems(config: Config) -> list[str]:
    """Problems of local.pace and local.deadline_s."""
    local, problems = config.local, []
    if local.deadline_s is not None and local.pace != "constant":
        problems.append(f"local.deadline_s is {local.deadline_s:g}: belongs to local.pace constant, got {local.pace!r}")
    if local.pace == "constant" and config.capabilities.plain_sgd:
        problems.append(f"local.pace is 'constant': belongs to DP-SGD, which {config.algorithm['name']} does not run here")
    if local.pace == "constant" and config.ledger.scope == "dataset":
        problems.append(
            "local.pace is 'constant': the cost of cut batches is reserved in one run's delta; ledger.scope must be 'run'"
        )
    return problems


def _ledger_problems(config: Config) -> list[str]:
    """Problem of a record book that would miss clients of the run."""
    clients, live = sum(config.data.clients), config.runtime.max_live_workers
    whole = config.runtime.federation == "in-process" or clients <= live
    if (config.ledger.scope, config.privacy.trust) != ("dataset", "trusted-server") or whole:
        return []
    return [
        f"ledger.scope is 'dataset': with a trusted server the guarantee concerns every client of the roster, but clients that "
        f"are never started have no record book; runtime.max_live_workers must be at least {clients}, got {live}"
    ]


def _audit_problems(config: Config) -> list[str]:
    """Problems of an audit that are known before the plan."""
    audit, privacy, clients = config.audit, config.privacy, sum(config.data.clients)
    if not audit.canaries:
        return []
    problems, asked = [], f"audit.canaries is {audit.canaries}:"
    if privacy.unit == "client" or config.capabilities.plain_sgd:
        problems.append(
            f"{asked} canaries are records under DP-SGD, which {config.algorithm['name']} with privacy.unit {privacy.unit!r} "
            "does not run"
        )
    if config.runtime.federation == "in-process":
        problems.append(f"{asked} the audit reads a transcript: runtime.federation must be 'network'")
    elif config.output.transcript != "full":
        problems.append(
            f"{asked} the audit reads a transcript: output.transcript must be 'full', got {config.output.transcript!r}"
        )
    if config.ledger.scope == "dataset":
        problems.append(f"{asked} canaries are not records: ledger.scope must be 'run', got 'dataset'")
    if audit.client != "all" and not 0 <= audit.client < clients:
        problems.append(f"audit.client is {audit.client}: must be 0 to {clients - 1}, or all")
    return problems


def _name_problems(field: str, name: str, known: Iterable[str]) -> list[str]:
    if name in known or is_plugin(name):
        return []
    return [f"{field} is {shown(name)}: must be one of {', '.join(known)} or package.module:function{hint(name, known)}"]


def _model_problems(name: str) -> list[str]:
    if not is_plugin(name):
        return _name_problems("model.name", name, models.NAMES)
    try:
        load_function("model.name", name)
    except ConfigError as error:
        return error.problems
    return []


def _data_problems(config: Config, known_model: bool) -> list[str]:
    """Problems of settings with the data set and the model; plugins are called before anything starts."""
    images = open_set(config.data, config.data.root)
    problems = shift_problems(config.data, images)
    by_record = not config.capabilities.plain_sgd
    if known_model and (images.task == "regression" or is_plugin(config.model.name) or is_plugin(config.data.dataset)):
        from dpcfl_net.experiment.build import model_template

        try:
            model_template(config.model.name, images, seed=0, by_record=by_record, batch_size=config.local.batch_size)
        except ConfigError as error:
            problems += error.problems
    try:
        records = min(len(piece.train_rows) for piece in plan_slices(config.data, images, seed=0))
    except ConfigError as error:
        return problems + error.problems
    # Plain SGD accepts a short batch; DP-SGD samples with rate b / N, at most 1.
    if by_record and config.local.batch_size > records:
        problems.append(f"local.batch_size is {config.local.batch_size}: must not exceed the {records} records of a client")
    steps = config.rounds * config.local.epochs * -(-records // config.local.batch_size)
    if steps > MOST_STEPS:
        problems.append(
            f"rounds is {config.rounds}, local.epochs {config.local.epochs}, local.batch_size {config.local.batch_size}: "
            f"a client of {records} records takes {steps:,} steps, must be at most {MOST_STEPS:,}"
        )
    return problems


def _key_hint(path: str, first: Iterable[str] = ()) -> str:
    """Hint about an unknown key: its algorithm, or the most similar key; keys in `first` are more likely."""
    options = {name: known_keys(algorithm.Options, "algorithm.") for name, algorithm in registry().items()}
    owners = [name for name, keys in options.items() if path in keys]
    if owners:
        return f", an option of {', '.join(owners)}"
    first = list(first)
    everywhere = [*first, *known_keys(Config), *(key for keys in options.values() for key in keys)]
    if near := nearest_key(path, everywhere):
        return f", did you mean {near!r}?"
    allowed = allowed_keys(path, first) or allowed_keys(path, everywhere)
    return f": must be one of {', '.join(allowed)}" if allowed else ""


def schema() -> dict[str, Any]:
    """Return the JSON schema of the configuration with the options of every algorithm."""
    document = Config.model_json_schema()
    options = {name: cls.Options.model_json_schema() for name, cls in registry().items()}
    for name, part in options.items():
        document.setdefault("$defs", {}).update(part.pop("$defs", {}))
        part["properties"] = {**part.get("properties", {}), "name": {"const": name}}
        part["title"] = name
    document["properties"]["algorithm"] = {
        "description": "name (or your own: package.module:Class) and options",
        "anyOf": list(options.values()),
    }
    return document
