"""The configuration of one experiment: schema, YAML, overrides, and every mistake named at once with the nearest right name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from dpcfl_net import models
from dpcfl_net.algorithms.base import Algorithm, Setting, find, registry
from dpcfl_net.data import datasets
from dpcfl_net.data.partition import DataSettings, open_set, plan_slices, shift_problems
from dpcfl_net.errors import ConfigError
from dpcfl_net.plugins import is_plugin
from dpcfl_net.plugins import load as load_function
from dpcfl_net.protocol import LocalTraining, PrivacyTarget
from dpcfl_net.types import SANE_EPSILON


class Section(BaseModel):
    """Closed: an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ModelSettings(Section):
    name: str = Field(default="cnn", description=f"{', '.join(models.NAMES)}, or your own: package.module:function")


class DataSection(DataSettings):
    root: str | None = Field(
        default=None, description="folder of the data sets; null: $DPCFL_DATA, else the user's cache folder"
    )


class PrivacySection(PrivacyTarget):
    noise_seed: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{64}$",
        description="noise seeded: what all noise follows from, 64 hex digits; null: drawn anew for each run, whose config.yaml has it",
    )


class BudgetSettings(Section):
    epsilon: float = Field(gt=0, description="most epsilon that all runs on a record may promise together")
    delta: float = Field(gt=0, lt=1, description="at this delta")


class LedgerSettings(Section):
    scope: Literal["run", "dataset"] = Field(
        default="run", description="run: this run's budget alone; dataset: all runs on the same records are composed"
    )
    root: str | None = Field(default=None, description="scope dataset: folder of the record book, which outlives runs")
    budget: BudgetSettings | None = Field(
        default=None,
        description="scope dataset: what all runs together may promise, {epsilon, delta}; null: counted, not bounded",
    )


class TransportSettings(Section):
    security: Literal["curve", "none"] = Field(default="curve", description="none: loopback only, and the statement says so")


class RuntimeSettings(Section):
    federation: Literal["network", "in-process"] = Field(
        default="network",
        description="in-process: all clients in one process without sockets, same bits; for sweeps and quick looks",
    )
    transport: TransportSettings = Field(default=TransportSettings(), description="how bytes travel")
    slots: int | Literal["auto"] = Field(
        default="auto", description="workers that may compute on the CPU at once; auto: one per core"
    )
    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|cuda|cuda:[0-9]{1,3})$",
        description="where workers compute: auto (GPUs if there are any and torch is built with CUDA), cpu, cuda (all GPUs), "
        "cuda:N (one, from 0); a GPU's bits are not the CPU's",
    )
    gpus: list[Annotated[str, Field(pattern=r"^(GPU|MIG)-[0-9A-Za-z/-]+$")]] = Field(
        default=[], description="UUIDs of the GPUs or MIG slices to use and no other, as nvidia-smi -L prints them"
    )
    gpu_placement: Literal["round-robin", "free-memory"] = Field(
        default="round-robin", description="how workers are dealt out to several GPUs: in turn, or by free memory"
    )
    slots_per_gpu: int = Field(default=1, ge=1, description="workers that may compute on one GPU at once, the others wait")
    gpu_memory_fraction: float | None = Field(
        default=None, gt=0, le=1, description="most of a GPU's memory that one worker may allocate; null: no cap"
    )
    round_timeout_s: float = Field(default=600, gt=0, description="a client that has not answered by then is missing")
    join_timeout_s: float = Field(default=120, gt=0, description="how long the coordinator waits for its clients")
    max_epsilon: float | None = Field(
        default=None,
        gt=0,
        description=f"workers refuse a promise above this, and with a number also a job without any; null: {SANE_EPSILON:g}, and jobs "
        "that declare that they have none",
    )
    max_delta: float | None = Field(
        default=None, gt=0, lt=1, description="workers refuse a larger delta; null: 1 over the records (or clients) protected"
    )
    orphan_timeout_s: float = Field(default=60, gt=0, description="a worker without a coordinator for so long leaves")
    quorum: float = Field(default=1.0, gt=0, le=1, description="fraction of clients that must answer a round")
    max_restarts: int = Field(default=2, ge=0, description="how often one crashed worker is started again")
    max_live_workers: int = Field(
        default=100, ge=1, description="most clients connected at once; where there are more, each comes when its turn comes"
    )
    clients_per_worker: int = Field(default=1, ge=1, description="clients that share one process; each keeps its own identity")


class OutputSettings(Section):
    transcript: Annotated[
        Literal["off", "headers", "full"], BeforeValidator(lambda value: "off" if value is False else value)
    ] = Field(default="headers", description="what the server's transcript keeps")  # YAML reads a bare off as false
    keep_checkpoints: int = Field(default=2, ge=1, description="newest checkpoints that are kept")
    evaluate_every: int = Field(default=1, ge=1, description="the observer evaluates every so many rounds, and the last")


class AuditSettings(Section):
    canaries: int = Field(
        default=0,
        ge=0,
        description="record slots of an audited client that hold canaries, all others empty, for `dpcfl audit`; 0: no audit",
    )
    client: int | Literal["all"] = Field(
        default="all", description="which client of the roster is audited; its accuracy means nothing then"
    )


class Config(Section):
    """One YAML file is one experiment; `dpcfl schema` prints this with every algorithm's options."""

    name: str = Field(description="the run folder is named after it")
    seed: int = Field(default=0, ge=0, description="every random purpose derives a seed of its own from it")
    data: DataSection = Field(description="what the clients hold")
    model: ModelSettings = Field(default=ModelSettings(), description="the model template")
    rounds: int = Field(ge=2, description="rounds of the whole run (E)")
    local: LocalTraining = Field(default=LocalTraining(), description="the local step")
    privacy: PrivacySection = Field(description="what every client is promised")
    algorithm: dict[str, Any] = Field(description="name, and options of that algorithm")
    algorithms: dict[str, dict[str, Any]] = Field(default={}, description="options and `local` overrides by algorithm")
    ledger: LedgerSettings = Field(default=LedgerSettings(), description="what a ledger covers")
    runtime: RuntimeSettings = Field(default=RuntimeSettings(), description="processes and transport")
    output: OutputSettings = Field(default=OutputSettings(), description="what a run leaves behind")
    audit: AuditSettings = Field(default=AuditSettings(), description="canaries that measure epsilon from below")

    @model_serializer(mode="wrap")
    def _as_written(self, standard: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # An experiment that is not audited is the same, to the byte, as where audits are unknown.
        return {key: value for key, value in standard(self).items() if key != "audit" or self.audit.canaries}

    @property
    def algorithm_class(self) -> type[Algorithm]:
        return find(self.algorithm["name"])

    @property
    def options(self) -> Any:
        """The chosen algorithm's validated options."""
        return self.algorithm_class.Options.model_validate({k: v for k, v in self.algorithm.items() if k != "name"})


def load(path: Path, overrides: Iterable[str] = ()) -> Config:
    """Read a YAML file and `key=value` overrides; ConfigError holds every problem that was found."""
    try:
        document = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"no such configuration file: {path}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must hold a mapping of keys to values")
    for item in overrides:
        _override(document, item)
    return resolve(document)


def _override(document: dict[str, Any], item: str) -> None:
    key, equals, text = item.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {item!r} is not key=value, for example privacy.epsilon=3")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {item!r}: {error}") from None
    *path, last = key.split(".")
    at = document
    for part in path:
        nested = at.get(part)
        if nested is None:
            nested = at[part] = {}
        if not isinstance(nested, dict):
            raise ConfigError(f"override {key!r}: {part!r} is a value, not a section")
        at = nested
    at[last] = value


def resolve(document: Mapping[str, Any]) -> Config:
    """Validate a document, apply what it says of the chosen algorithm, and check what only a person would notice.

    The content of a data set of the user's own is pinned: `data.sha256` is filled in.
    """
    problems: list[str] = []
    document = _with_algorithm(document, problems)
    config: Config | None = None
    try:
        config = Config.model_validate(document, strict=True)
    except ValidationError as error:
        problems += [_sentence(e) for e in error.errors()]
    if config is not None and not problems:
        problems += _impossible(config)
    if problems or config is None:
        raise ConfigError(list(dict.fromkeys(problems)))
    sha256 = open_set(config.data, config.data.root).sha256
    return config.model_copy(update={"data": config.data.model_copy(update={"sha256": sha256})})


def _with_algorithm(document: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Fold `algorithms.<name>` into `algorithm` and `local`; numbers like 5 are taken where 5.0 is meant."""
    merged = dict(document)
    chosen = merged.get("algorithm")
    if not isinstance(chosen, dict) or "name" not in chosen:
        problems.append("algorithm.name is missing: " + ", ".join(registry()))
        return merged
    name, by_name = chosen["name"], merged.get("algorithms") or {}
    for listed in by_name if isinstance(by_name, dict) else ():
        if listed not in registry() and not is_plugin(str(listed)):
            problems.append(f"unknown algorithm 'algorithms.{listed}'{_near(listed, registry())}")
    try:
        algorithm = find(str(name))
    except ConfigError as error:
        problems += [f"{problem}{_near(str(name), registry())}" for problem in error.problems]
        return merged
    own = by_name.get(name) if isinstance(by_name, dict) else None
    own = dict(own) if isinstance(own, dict) else {}
    local = own.pop("local", None)
    if isinstance(local, dict):
        merged["local"] = {**(merged.get("local") or {}), **local}
    options = _deep(own, {k: v for k, v in chosen.items() if k != "name"})
    try:
        options = algorithm.Options.model_validate(options, strict=True).model_dump(mode="json")
    except ValidationError as error:
        problems += [_sentence(e, ("algorithm",)) for e in error.errors()]
    merged["algorithm"] = {"name": name, **options}
    return merged


def _deep(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        out[key] = _deep(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return out


def _impossible(config: Config) -> list[str]:
    """Settings that each pass alone and cannot work together."""
    problems = _unknown_model(config.model.name)
    unknown_set = _unknown("data.dataset", config.data.dataset, datasets.NAMES)
    if unknown_set:
        problems += unknown_set
    else:
        try:
            problems += _of_data(config, known_model=not problems)
        except ConfigError as error:
            problems += error.problems
    if isinstance(config.runtime.slots, int) and config.runtime.slots < 1:
        problems.append(f"runtime.slots is {config.runtime.slots}: must be at least 1, or auto")
    if config.ledger.scope == "dataset" and config.ledger.root is None:
        problems.append("ledger.root is missing: scope dataset needs a folder that outlives the run")
    if config.ledger.scope == "run" and (config.ledger.root or config.ledger.budget):
        problems.append("ledger.root and ledger.budget belong to scope dataset; ledger.scope is 'run'")
    problems += _unprotectable(config)
    if config.runtime.federation == "in-process" and config.output.transcript != "off":
        problems.append(
            "output.transcript must be off where runtime.federation is 'in-process': no message crosses a wire there"
        )
    problems += _undivided(config.runtime)
    problems += _uncounted(config)
    problems += _unpaced(config)
    problems += _unauditable(config)
    setting = Setting(config.rounds, sum(config.data.clients), config.local, config.privacy, config.data.validation)
    return problems + config.algorithm_class.problems(config.options, setting)


def _undivided(runtime: RuntimeSettings) -> list[str]:
    """Devices that contradict each other, or what is to compute on them."""
    problems = []
    if runtime.gpus and runtime.device not in ("auto", "cuda"):
        problems.append(f"runtime.gpus is {runtime.gpus}: runtime.device must be cuda or auto then, got {runtime.device!r}")
    if runtime.federation == "in-process" and (runtime.gpus or runtime.device not in ("auto", "cpu")):
        problems.append(
            f"runtime.device is {runtime.device!r}, runtime.gpus {runtime.gpus}: must be auto or cpu, and none, where "
            "runtime.federation is 'in-process', which computes on the CPU"
        )
    return problems


def _unprotectable(config: Config) -> list[str]:
    """What the algorithm cannot promise: a unit, a server, an accountant, a local step that it does not know."""
    privacy, algorithm = config.privacy, config.algorithm_class
    problems = []
    if privacy.noise_seed is not None and privacy.noise != "seeded":
        problems.append(f"privacy.noise_seed belongs to privacy.noise seeded, got {privacy.noise!r}")
    if privacy.noise == "seeded" and config.ledger.scope == "dataset":
        problems.append(
            "ledger.scope is 'dataset': needs privacy.noise os, since runs with seeded noise have no epsilon to compose"
        )
    if (privacy.unit, privacy.trust) not in algorithm.protects:
        pairs = ", or ".join(f"unit {unit} with trust {trust}" for unit, trust in algorithm.protects)
        problems.append(
            f"privacy.unit is {privacy.unit!r}, privacy.trust {privacy.trust!r}: {algorithm.name} works with {pairs}"
        )
    if (privacy.adjacency, privacy.accountant, privacy.trust) == ("replace-one", "rdp", "untrusted-server"):
        problems.append("privacy.accountant is 'rdp': replace-one has no sound Renyi bound here, use 'pld'")
    for name in ("momentum", "weight_decay"):
        value = getattr(config.local, name)
        if value and not algorithm.plain_sgd(config.options, privacy):
            problems.append(f"local.{name} is {value}: must be 0, the local step of {algorithm.name} is DP-SGD, which has none")
    return problems


def _unpaced(config: Config) -> list[str]:
    """Why time would be seen all the same, or need not be hidden."""
    local, problems = config.local, []
    if local.deadline_s is not None and local.pace != "constant":
        problems.append(f"local.deadline_s is {local.deadline_s:g}: belongs to local.pace constant, got {local.pace!r}")
    if local.pace == "constant" and config.algorithm_class.plain_sgd(config.options, config.privacy):
        problems.append(f"local.pace is 'constant': belongs to DP-SGD, which {config.algorithm['name']} does not run here")
    if local.pace == "constant" and config.ledger.scope == "dataset":
        problems.append(
            "local.pace is 'constant': what cut batches cost is kept in one run's delta; ledger.scope must be 'run'"
        )
    return problems


def _uncounted(config: Config) -> list[str]:
    """Why a record book would not count all that a run promises."""
    clients, live = sum(config.data.clients), config.runtime.max_live_workers
    whole = config.runtime.federation == "in-process" or clients <= live
    if (config.ledger.scope, config.privacy.trust) != ("dataset", "trusted-server") or whole:
        return []
    return [
        f"ledger.scope is 'dataset': with a trusted server every client of the roster is in the promise, drawn or not, and clients "
        f"that are never started enter no book; runtime.max_live_workers must be at least {clients}, got {live}"
    ]


def _unauditable(config: Config) -> list[str]:
    """Why canaries cannot measure this run, as far as that is known before its plan is."""
    audit, privacy, clients = config.audit, config.privacy, sum(config.data.clients)
    if not audit.canaries:
        return []
    problems, asked = [], f"audit.canaries is {audit.canaries}:"
    if privacy.unit == "client" or config.algorithm_class.plain_sgd(config.options, privacy):
        problems.append(
            f"{asked} canaries are records under DP-SGD, and {config.algorithm['name']} with privacy.unit {privacy.unit!r} has none"
        )
    if config.runtime.federation == "in-process":
        problems.append(f"{asked} what the server sees is read from a transcript: runtime.federation must be 'network'")
    elif config.output.transcript != "full":
        problems.append(
            f"{asked} what the server sees is read from a transcript: output.transcript must be 'full', got {config.output.transcript!r}"
        )
    if config.ledger.scope == "dataset":
        problems.append(f"{asked} canaries are nobody's records: ledger.scope must be 'run', got 'dataset'")
    if audit.client != "all" and not 0 <= audit.client < clients:
        problems.append(f"audit.client is {audit.client}: must be 0 to {clients - 1}, or all")
    return problems


def _unknown(field: str, name: str, known: Iterable[str]) -> list[str]:
    if name in known or is_plugin(name):
        return []
    return [f"{field} is {name!r}: must be one of {', '.join(known)} or package.module:function{_near(name, known)}"]


def _unknown_model(name: str) -> list[str]:
    if not is_plugin(name):
        return _unknown("model.name", name, models.NAMES)
    try:
        load_function("model.name", name)
    except ConfigError as error:
        return error.problems
    return []


def _of_data(config: Config, known_model: bool) -> list[str]:
    """What does not go together with the records that are there; what is the user's own is tried before anything starts."""
    images = open_set(config.data, config.data.root)
    problems = shift_problems(config.data, images)
    by_record = not config.algorithm_class.plain_sgd(config.options, config.privacy)
    if known_model and (images.task == "regression" or is_plugin(config.model.name) or is_plugin(config.data.dataset)):
        from dpcfl_net.build import model_template

        try:
            model_template(
                config.model.name, images.input_shape, images.classes, seed=0, task=images.task, by_record=by_record,
                batch_size=config.local.batch_size,
            )  # fmt: skip
        except ConfigError as error:
            problems += error.problems
    try:
        records = min(len(piece.train_rows) for piece in plan_slices(config.data, images, seed=0))
    except ConfigError as error:
        return problems + error.problems
    # Plain SGD takes a short batch; DP-SGD's is drawn with the rate b / N, at most 1.
    if by_record and config.local.batch_size > records:
        problems.append(f"local.batch_size is {config.local.batch_size}: must not exceed the {records} records of a client")
    return problems


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every dotted key of the schema, the algorithms' options among them."""
    keys: list[str] = []
    for name, info in model.model_fields.items():
        path = f"{prefix}{name}"
        keys.append(path)
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            keys += known_keys(kind, path + ".")
    if model is Config:
        for algorithm in registry().values():
            keys += known_keys(algorithm.Options, "algorithm.")
    return keys


def _near(word: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(names), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def nearest_key(path: str) -> str:
    """Whose option it is, or the known key most like a mistyped one: first by its whole path, then by its last word anywhere."""
    owners = [name for name, algorithm in registry().items() if path in known_keys(algorithm.Options, "algorithm.")]
    if owners:
        return f", an option of {', '.join(owners)}"
    keys = list(dict.fromkeys(known_keys()))
    whole = difflib.get_close_matches(path, keys, n=1, cutoff=0.85)
    if whole:
        return f", did you mean {whole[0]!r}?"
    last = path.rsplit(".", 1)[-1]
    close = difflib.get_close_matches(last, [k.rsplit(".", 1)[-1] for k in keys], n=1, cutoff=0.7)
    if close:
        return f", did you mean {next(k for k in keys if k.rsplit('.', 1)[-1] == close[0])!r}?"
    return ""


def _sentence(error: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> str:
    """One pydantic error as a person would say it: field, value, what is allowed."""
    path = ".".join(
        str(p)
        for p in (*prefix, *error["loc"])
        if not (isinstance(p, str) and p[:1].isupper()) and p not in ("int", "float", "str")
    )
    kind, value, context = error["type"], error.get("input"), error.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown key {path!r}{nearest_key(path)}"
    if kind == "missing":
        return f"{path} is missing"
    message = str(error["msg"])
    if kind == "literal_error":
        message = f"must be {context['expected']}"
    elif kind == "value_error":
        message = message.removeprefix("Value error, ")
        return f"{path}: {message}"
    else:
        message = message[:1].lower() + message[1:]
        message = message.replace("input should be", "must be")
    return f"{path} is {value!r}: {message}"


def schema() -> dict[str, Any]:
    """JSON schema of the configuration, with the options of every algorithm."""
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
