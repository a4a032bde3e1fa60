"""Checks of a configuration across its sections: combinations of settings, the algorithm, the data set and the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dpcfl_net.core.errors import ConfigError, DataMissing
from dpcfl_net.core.files import in_home, shown
from dpcfl_net.core.names import hint
from dpcfl_net.core.plugins import is_plugin, load
from dpcfl_net.data import datasets
from dpcfl_net.data.partition import open_set, plan_slices, shift_problems
from dpcfl_net.data.settings import is_own
from dpcfl_net.experiment.audit_checks import audit_problems
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.experiment.model_template import model_template
from dpcfl_net.experiment.network_checks import network_problems
from dpcfl_net.experiment.secure_sum_checks import secure_sum_problems
from dpcfl_net.federation.claim import adjacency_problem
from dpcfl_net.training import models

# Larger numbers are mistakes; within these limits making a job takes about a minute at most.
MOST_ANSWERS = 2_000_000  # rounds times clients
MOST_STEPS = 500_000  # of one client's local training over the whole run


# Functions, not pydantic validators: a validator that raises leaves no Config, so that the checks of other sections, the
# algorithm and the data set would have to wait for the next attempt.
def combination_problems(config: Config) -> list[str]:
    """Find problems of valid settings that cannot be combined.

    Args:
        config: A configuration whose fields are valid one by one.

    Returns:
        One sentence for each problem: field, value and allowed values.

    Raises:
        DataMissing: If the only problem is that the data set is not on this machine.
    """
    problems = config.availability.problems(config.rounds, config.data.client_count)
    if problems:  # the setting of all other checks needs a valid schedule
        return problems
    problems = model_problems(config.model.name)
    if (answers := config.rounds * config.data.client_count) > MOST_ANSWERS:
        problems.append(
            f"rounds is {config.rounds}: times {config.data.client_count} clients gives {answers:,}, "
            f"must be at most {MOST_ANSWERS:,}"
        )
    unknown_set = dataset_problems(config.data.dataset)
    missing: DataMissing | None = None
    if unknown_set:
        problems += unknown_set
    else:
        try:
            problems += _data_problems(config, known_model=not problems)
        except DataMissing as error:
            missing = error
        except ConfigError as error:
            problems += error.problems
    for check in _CHECKS:
        problems += check(config)
    if missing is not None and not problems:
        raise missing
    return problems + (missing.problems if missing is not None else [])


def _transcript_problems(config: Config) -> list[str]:
    """Problem of a transcript without messages."""
    if config.runtime.federation != "in-process" or config.output.transcript == "off":
        return []
    return ["output.transcript must be off where runtime.federation is 'in-process', which sends no messages"]


def _availability_problems(config: Config) -> list[str]:
    """Problem of a schedule without common rounds."""
    if not (config.availability.clients and config.capabilities.asynchronous):
        return []
    return [
        "availability names rounds of clients: algorithm.asynchronous must be null, since asynchronous clients have no common rounds"
    ]


def _communication_problems(config: Config) -> list[str]:
    """Problems of the form of updates."""
    up, canaries, problems = config.communication.up, config.audit.canaries, []
    if up.error_feedback and config.privacy.central:
        problems.append(
            "communication.up.error_feedback is true: needs privacy.trust untrusted-server, where a client releases noisy "
            "updates; the residual of a raw update would hold private data"
        )
    if canaries and up.form != "float32":
        problems.append(
            f"audit.canaries is {canaries}: the audit reads whole updates; communication.up must be float32, got {up.form!r}"
        )
    return problems


def _device_problems(config: Config) -> list[str]:
    """Problems of device settings."""
    runtime, problems = config.runtime, list[str]()
    if runtime.gpus and runtime.device not in ("auto", "cuda"):
        problems.append(f"runtime.gpus is {runtime.gpus}: runtime.device must be cuda or auto with it, got {runtime.device!r}")
    if runtime.federation == "in-process" and (runtime.gpus or runtime.device not in ("auto", "cpu")):
        problems.append(
            f"runtime.device is {runtime.device!r}, runtime.gpus {runtime.gpus}: must be auto or cpu, and empty, where "
            "runtime.federation is 'in-process', which computes on the CPU"
        )
    return problems


def _aggregator_problems(config: Config) -> list[str]:
    """Problems of settings that cannot be combined with aggregators."""
    runtime, clients, problems = config.runtime, config.data.client_count, []
    if not runtime.aggregators:
        return []
    asked = f"runtime.aggregators is {runtime.aggregators}:"
    if isinstance(runtime.aggregators, list):
        if sum(runtime.aggregators) != clients:
            problems.append(f"{asked} must add up to the number of clients, {clients}, got {sum(runtime.aggregators)}")
    elif runtime.aggregators > clients:
        problems.append(f"{asked} must be at most the number of clients, {clients}")
    if config.privacy.central:
        problems.append(
            f"{asked} must be 0 with privacy.trust 'trusted-server': an aggregator would read raw updates, so it would have to be "
            "trusted too"
        )
    if config.capabilities.asynchronous:
        problems.append(f"{asked} algorithm.asynchronous must be null: without common rounds there are no sums to send")
    if config.network.how != "off":
        problems.append(f"{asked} network.how must be 'off', got {config.network.how!r}: links are to the coordinator")
    if runtime.federation == "network" and clients > runtime.max_live_workers:
        problems.append(
            f"{asked} runtime.max_live_workers must be at least {clients}, got {runtime.max_live_workers}: aggregators do not "
            "start clients on demand"
        )
    if runtime.federation == "network" and config.output.transcript != "off":
        problems.append(
            f"{asked} output.transcript must be 'off', got {config.output.transcript!r}: aggregators write no transcript"
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
        pairs = ", or ".join(f"unit {unit} and trust {trust}" for unit, trust in config.capabilities.protects)
        problems.append(
            f"privacy.unit is {privacy.unit!r}, privacy.trust {privacy.trust!r}: {algorithm.name} works with {pairs}"
        )
    elif problem := adjacency_problem(privacy):
        problems.append(problem)
    if (privacy.adjacency, privacy.accountant, privacy.trust) == ("replace-one", "rdp", "untrusted-server"):
        problems.append("privacy.accountant is 'rdp': its moments are no bound under replace-one, use 'pld'")
    for name in ("momentum", "weight_decay"):
        value = getattr(config.local, name)
        if value and not config.capabilities.plain_sgd:
            problems.append(
                f"local.{name} is {value}: must be 0, since {algorithm.name} trains by DP-SGD, which does not use it"
            )
    return problems + privacy.epsilon_problems(config.data.client_count)


def _pace_problems(config: Config) -> list[str]:
    """Problems of local.pace and local.deadline_s."""
    local, problems = config.local, []
    secret_coins = config.privacy.secure and config.privacy.unit == "client"
    if local.deadline_s is not None and local.pace != "constant" and not secret_coins:
        problems.append(
            f"local.deadline_s is {local.deadline_s:g}: belongs to local.pace constant, got {local.pace!r}, or to privacy.unit client with "
            "privacy.trust secure-aggregation"
        )
    if local.pace == "constant" and config.capabilities.plain_sgd:
        problems.append(f"local.pace is 'constant': belongs to DP-SGD, which {config.algorithm['name']} does not run here")
    if local.pace == "constant" and config.ledger.scope == "dataset":
        problems.append(
            "local.pace is 'constant': the cost of cut batches is reserved in one run's delta; ledger.scope must be 'run'"
        )
    return problems


def _sampling_problems(config: Config) -> list[str]:
    """Problems of local.sampling."""
    if config.local.sampling == "poisson":
        return []
    asked, privacy, problems = f"local.sampling is {config.local.sampling!r}:", config.privacy, []
    if config.capabilities.plain_sgd:
        problems.append(f"{asked} belongs to DP-SGD, which {config.algorithm['name']} does not run here")
    if privacy.accountant == "rdp":
        problems.append(f"{asked} privacy.accountant must be 'pld', got 'rdp', which has no bound for it")
    if privacy.secure:
        problems.append(
            f"{asked} must be 'poisson' with privacy.trust 'secure-aggregation', whose sums are single steps of Poisson batches"
        )
    return problems


def _precision_problems(config: Config) -> list[str]:
    """Problems of local.precision, apart from the processor's."""
    if config.local.precision == "float32":
        return []
    asked, problems = f"local.precision is {config.local.precision!r}:", []
    if config.capabilities.plain_sgd:
        problems.append(f"{asked} belongs to DP-SGD, which {config.algorithm['name']} does not run here")
    if config.runtime.gpus or config.runtime.device not in ("auto", "cpu"):
        problems.append(
            f"{asked} it was checked on processors only; runtime.device must be cpu or auto, got {config.runtime.device!r}"
        )
    if config.audit.canaries:
        problems.append(f"{asked} canaries have no forward pass; with audit.canaries it must be 'float32'")
    return problems


def _ledger_problems(config: Config) -> list[str]:
    """Problems of the section `ledger`."""
    ledger, clients, live, problems = config.ledger, config.data.client_count, config.runtime.max_live_workers, []
    if ledger.scope == "run":
        if ledger.root or ledger.budget:
            problems.append("ledger.root and ledger.budget belong to scope dataset; ledger.scope is 'run'")
        return problems
    if ledger.root is None:
        problems.append("ledger.root is missing: scope dataset needs a folder that is kept after the run")
    else:
        try:
            in_home(ledger.root, "ledger.root")
        except ConfigError as error:
            problems += error.problems
    if not config.runtime.durable:
        problems.append("runtime.durable is false: ledger.scope 'dataset' composes all runs on a record and needs true")
    if config.privacy.central and config.runtime.federation == "network" and clients > live:
        problems.append(
            "ledger.scope is 'dataset': with a trusted server the guarantee concerns every client of the roster, but clients that "
            f"are never started have no record book; runtime.max_live_workers must be at least {clients}, got {live}"
        )
    return problems


def _personal_model_problems(config: Config) -> list[str]:
    """Problems of settings that need personal models, or models at the server."""
    name, problems = config.algorithm["name"], []
    if config.output.personal_models and not config.capabilities.personal:
        problems.append(f"output.personal_models is true: must be false, since {name} has no personal models")
    if config.data.central_test is not None and config.capabilities.personal:
        problems.append(
            f"data.central_test is {config.data.central_test}: must be null with {name}, whose personal models stay with their "
            "clients, so that the observer cannot evaluate them"
        )
    return problems


def _name_problems(field: str, name: str, known: Iterable[str]) -> list[str]:
    if name in known or is_plugin(name):
        return []
    return [f"{field} is {shown(name)}: must be one of {', '.join(known)} or package.module:function{hint(name, known)}"]


def dataset_problems(dataset: object) -> list[str]:
    """Return a sentence for each unknown name in `data.dataset`; none for a value that is no text."""
    names = dataset.split(datasets.MIX) if isinstance(dataset, str) else []
    return [text for name in names for text in _name_problems("data.dataset", name, datasets.NAMES)]


def _option_problems(config: Config) -> list[str]:
    """Problems that the algorithm finds; ConfigError if its method returns no list of texts, as one of a user's own may."""
    found: Any = config.algorithm_class.problems(config.options, config.setting)
    if not isinstance(found, list | tuple) or not all(isinstance(text, str) for text in found):
        name, got = config.algorithm["name"], shown(found)
        raise ConfigError(f"{name}: `problems` returned {got}: must be a list of sentences, empty without a problem")
    return list(found)


def model_problems(name: object) -> list[str]:
    """Return a sentence for each problem of `model.name`, without the data; none for a value that is no text."""
    if not isinstance(name, str):
        return []
    if not is_plugin(name):
        return _name_problems("model.name", name, models.NAMES)
    try:
        load("model.name", name)
    except ConfigError as error:
        return error.problems
    return []


def _data_problems(config: Config, known_model: bool) -> list[str]:
    """Problems of settings with the data set and the model; plugins are called before anything starts."""
    images = open_set(config.data, config.data.root)
    problems = shift_problems(config.data, images)
    by_record = not config.capabilities.plain_sgd
    if known_model and (images.task == "regression" or is_plugin(config.model.name) or is_own(config.data.dataset)):
        try:
            model_template(config.model.name, images, seed=0, by_record=by_record, batch_size=config.local.batch_size)
        except ConfigError as error:
            problems += error.problems
    try:
        counts = [len(piece.train_rows) for piece in plan_slices(config.data, images, seed=0)]
    except ConfigError as error:
        return problems + error.problems
    # Plain SGD accepts a short batch; DP-SGD samples with rate b / N, at most 1.
    if by_record and config.local.batch_size > min(counts):
        problems.append(f"local.batch_size is {config.local.batch_size}: must not exceed the {min(counts)} records of a client")
    steps = config.rounds * config.local.epochs * -(-max(counts) // config.local.batch_size)
    if steps > MOST_STEPS:
        problems.append(
            f"rounds is {config.rounds}, local.epochs {config.local.epochs}, local.batch_size {config.local.batch_size}: "
            f"a client of {max(counts)} records takes {steps:,} steps, must be at most {MOST_STEPS:,}"
        )
    return problems


_CHECKS = (
    _ledger_problems, _privacy_problems, secure_sum_problems, _transcript_problems, _device_problems,
    _aggregator_problems, _pace_problems, _sampling_problems, _precision_problems, audit_problems, _availability_problems,
    network_problems, _communication_problems, _personal_model_problems, _option_problems,
)  # fmt: skip
