"""From a configuration to a job: partition, roster, plan, calibrated noise, and both parts of the job."""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from dpcfl_net.algorithms.base import algorithm_of
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.frozen import digest
from dpcfl_net.core.plugins import is_plugin, short
from dpcfl_net.core.plugins import load as load_function
from dpcfl_net.core.protocol import AggregatorEntry, Protocol
from dpcfl_net.core.roster import ClientEntry, Roster
from dpcfl_net.core.seeds import derive_seed
from dpcfl_net.core.signed_settings import ModelTemplate, PrivacyTarget
from dpcfl_net.data import cache
from dpcfl_net.data.datasets import Images
from dpcfl_net.data.partition import DataSettings, open_set, plan_slices
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.experiment.job_files import Audit, Experiment, Job
from dpcfl_net.federation.claim import SEEDED, NoisyPlan, noisy_plans, plan_events, protected, without_guarantee
from dpcfl_net.federation.plan_examples import plan_examples, plan_key
from dpcfl_net.federation.secure_claim import secure_sum_problem
from dpcfl_net.privacy.accounting.cache import cached, cost
from dpcfl_net.privacy.randomness import derive
from dpcfl_net.privacy.slots import DPSGDSlot, SecureSlot, Slot
from dpcfl_net.transport import keys
from dpcfl_net.transport.identities import read_identities


@dataclass(frozen=True)
class Secrets:
    """Random values of a job.

    Attributes:
        salt: 32 bytes that hide the experiment part behind its hash.
        audit: 32 bytes for canaries.
        run: 16 bytes, the public run id.
        noise: 32 bytes for seeded noise; None if each task draws its own.
    """

    salt: bytes
    audit: bytes
    run: bytes
    noise: bytes | None

    @classmethod
    def of(cls, config: Config) -> Secrets:
        """Draw the values from the operating system, or derive them from `privacy.noise_seed` and the seed if noise is seeded.

        Args:
            config: The configuration.
        """
        if config.privacy.noise == "os":
            return cls(os.urandom(32), os.urandom(32), os.urandom(16), None)
        seed = config.privacy.noise_seed
        root = os.urandom(32) if seed is None else bytes.fromhex(seed)
        salt, audit, run, noise = (derive(root, purpose, config.seed) for purpose in ("salt", "audit", "run", "noise"))
        return cls(salt, audit, run[:16], noise)


def with_noise_seed(config: Config) -> Config:
    """Return the configuration with a new noise seed if it needs one and has none.

    Args:
        config: The configuration.
    """
    privacy = config.privacy
    if privacy.noise == "os" or privacy.noise_seed is not None:
        return config
    return config.model_copy(update={"privacy": privacy.model_copy(update={"noise_seed": os.urandom(32).hex()})})


def make_job(config: Config, key_folder: Path, on_step: Callable[[str], None] = lambda step: None) -> Job:
    """Create the job of a configuration.

    Args:
        config: The configuration.
        key_folder: Folder with the public keys of all processes.
        on_step: Called with each step that may take long, before it begins.

    Returns:
        Both parts of the job.

    Raises:
        ConfigError: If no noise meets the target, canaries cannot be placed, or this processor lacks the precision.
        DataMissing: If the data set is not on this machine.
    """
    on_step(f"data set {short(config.data.dataset)}")
    images = open_set(config.data, config.data.root)
    if config.local.precision != "float32":
        _check_precision(config, images)
    truth = config.data.true_clusters
    # A short seed can be guessed, so everything hidden from the server derives from 256-bit secrets. With seeded noise one such
    # secret gives all of them, so that the run repeats bit for bit.
    secrets = Secrets.of(config)
    n, salt, root = len(truth), secrets.salt, str(config.seed).encode()
    order = np.random.Generator(np.random.PCG64(derive_seed(salt, "permutation"))).permutation(n)
    settings = DataSettings.model_validate(config.data.model_dump(exclude={"root"}))
    pieces = plan_slices(settings, images, derive_seed(root, "partition"))
    experiment = Experiment(
        salt=salt.hex(),
        seed=config.seed,
        data=settings.model_dump(mode="json"),
        partition_seed=derive_seed(root, "partition"),
        slices=[int(k) for k in order],
        true_clusters=[truth[k] for k in order],
        noise_seed=secrets.noise.hex() if secrets.noise is not None else None,
        audit=_audit(config, n, secrets.audit),
    )
    public = keys.read_client_keys(key_folder, n)
    signing: Sequence[str | None] = read_identities(key_folder, n) if config.privacy.secure else [None] * n
    own_epsilon = config.privacy.epsilons()
    on_step(f"layout of model {short(config.model.name)}")
    protocol = Protocol(
        run=secrets.run.hex(),
        name=config.name,
        algorithm=config.algorithm["name"],
        options=config.options.model_dump(mode="json"),
        rounds=config.rounds,
        local=config.local,
        privacy=PrivacyTarget.model_validate(config.privacy.model_dump(exclude={"noise_seed", "epsilon_by_client"})),
        model=model_template(
            config.model.name,
            images,
            derive_seed(root, "initial model"),
            by_record=not config.capabilities.plain_sgd,
            batch_size=config.local.batch_size,
        ),
        roster=Roster.of(
            ClientEntry(
                id=i,
                public_key=public[i],
                records=len(pieces[k].train_rows),
                validation_records=len(pieces[k].validation_rows),
                noise_multiplier=None,
                rounds=config.availability.spans(i, config.rounds),
                identity=signing[i],
                epsilon=own_epsilon.get(i),
            )
            for i, k in enumerate(order)
        ),
        coordinator_key=keys.read_public(key_folder, keys.COORDINATOR),
        observer_key=keys.read_public(key_folder, keys.OBSERVER),
        server_seed=hashlib.sha256(b"server\0" + root).hexdigest(),
        ledger_scope=config.ledger.scope,
        security=config.runtime.transport.security,
        communication=config.communication.signed(),
        aggregators=_aggregators(config.runtime.groups(n), key_folder),
        tuning=config.tuning,
        oracle=experiment.true_clusters if config.capabilities.uses_oracle else None,
        experiment_hash=digest(experiment),
    )
    on_step(f"noise multiplier for epsilon {config.privacy.epsilon:g}")
    protocol = calibrated(protocol)
    if experiment.audit is not None and (problems := _audit_problems(protocol, experiment.audit)):
        raise ConfigError(problems)
    return Job(protocol, experiment)


def _aggregators(groups: list[range], key_folder: Path) -> list[AggregatorEntry]:
    """Aggregators with their public keys."""
    return [
        AggregatorEntry(public_key=keys.read_public(key_folder, keys.aggregator_key(k)), first=group[0], last=group[-1])
        for k, group in enumerate(groups)
    ]


def _check_precision(config: Config, images: Images) -> None:
    """Raise ConfigError if this processor or the model's engine lacks local.precision."""
    from dpcfl_net.training import models
    from dpcfl_net.training.dpsgd import Trainer

    local = config.local
    module = models.build(config.model.name, images.input_shape, images.classes)
    Trainer(
        module, clip=local.clip, learning_rate=local.lr, batch_size=local.batch_size, precision=local.precision,
        input_shape=tuple(images.input_shape),
    )  # fmt: skip


def _audit(config: Config, clients: int, secret: bytes) -> Audit | None:
    chosen = config.audit.client
    if not config.audit.canaries:
        return None
    return Audit(
        canaries=config.audit.canaries, clients=list(range(clients)) if chosen == "all" else [chosen], secret=secret.hex()
    )


def _audit_problems(protocol: Protocol, audit: Audit) -> list[str]:
    """Reasons why canaries cannot measure this run."""
    algorithm, asked, problems = algorithm_of(protocol), f"audit.canaries is {audit.canaries}:", []
    entries = [protocol.client(client) for client in audit.clients]
    if not all(any(isinstance(slot, DPSGDSlot | SecureSlot) for slot in algorithm.plan(entry)) for entry in entries):
        problems.append(f"{asked} the plan of {protocol.algorithm} holds no DP-SGD")
    if set(protocol.unprotected) - {SEEDED}:
        problems.append(f"{asked} {protocol.algorithm} claims no finite epsilon ({protocol.unprotected[0]})")
    fewest = min(entry.records for entry in entries)
    if audit.canaries > fewest:
        problems.append(f"{asked} must be at most the {fewest} records of a client")
    if audit.canaries > protocol.model.parameters:
        problems.append(f"{asked} must be at most the {protocol.model.parameters} parameters of {protocol.model.name}")
    return problems


def model_template(name: str, images: Images, seed: int, *, by_record: bool = True, batch_size: int = 32) -> ModelTemplate:
    """Return the fixed layout of a model that the engines can train.

    Args:
        name: Name of the model, as for `models.build`.
        images: Data set that the model is for.
        seed: Seed of the initial values.
        by_record: True if DP-SGD trains the model (else plain SGD).
        batch_size: Expected batch, for the check of a plugin model.

    Raises:
        ConfigError: If the engine cannot train the model.
    """
    spec: dict[str, Any] = {
        "model": name,
        "input_shape": images.input_shape,
        "classes": images.classes,
        "task": images.task,
        "by_record": by_record,
        "batch_size": batch_size,
    }
    from dpcfl_net.training import models

    plain = models.convolutional_layout(name, tuple(images.input_shape), images.classes)
    if is_plugin(name):
        layout = _layout(**spec)
    elif plain is not None and images.task == "classification":  # every engine trains these
        layout = [(key, shape) for key, shape in plain]
    else:  # cached per host, so that torch need not be loaded
        folder = Path(models.__file__).parent
        source = [version("torch"), *(hashlib.sha256((folder / file).read_bytes()).hexdigest() for file in models.FILES)]
        layout = cached(cache.folder() / "models", {**spec, "source": source}, lambda: _layout(**spec))
    return ModelTemplate(
        name=name, task=images.task, input_shape=list(images.input_shape), classes=images.classes,
        layout=[(key, shape) for key, shape in layout], parameters=sum(math.prod(shape) for _, shape in layout),
        initial_seed=seed,
    )  # fmt: skip


def _layout(
    model: str, input_shape: tuple[int, ...], classes: int, task: str, by_record: bool, batch_size: int
) -> list[tuple[str, list[int]]]:
    """Name and shape of each parameter; ConfigError as `model_template`."""
    from dpcfl_net.training import models
    from dpcfl_net.training.dpsgd import Evaluator, Trainer

    module = models.skeleton(model, input_shape, classes)  # the values are not read: 45 MB of a ResNet-18
    try:
        if is_plugin(model):
            _check_own_model(model, input_shape, classes, by_record, batch_size)
        elif by_record:
            Trainer(module, clip=1.0, learning_rate=0.1, batch_size=batch_size, task=task)
        else:
            Evaluator(module, task)
    except ConfigError as error:
        raise ConfigError([f"model.name is {model!r}: {problem}" for problem in error.problems]) from error
    return [(key, list(shape)) for key, shape in models.layout(module)]


# Functions whose model passed in this process: a job checks its model twice, a sweep many times.
_passed: dict[tuple[Any, ...], Callable[..., Any]] = {}


def _check_own_model(name: str, input_shape: tuple[int, ...], classes: int, by_record: bool, batch_size: int) -> None:
    import torch

    from dpcfl_net.training import model_check, models

    function = load_function("model.name", name)
    key = (id(function), input_shape, classes, by_record, batch_size)
    if _passed.get(key) is function:
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = models.build(name, input_shape, classes)
    model_check.check(module, input_shape, classes, by_record, batch_size)
    # Every process draws the initial values independently.
    first, second = (models.initial(name, input_shape, classes, 0) for _ in range(2))
    if not np.array_equal(first, second):
        raise ConfigError(
            "called twice under one torch seed it gives different parameters: draw random numbers with torch only"
        )
    _passed[key] = function


def calibrated(protocol: Protocol) -> Protocol:
    """Return the protocol with calibrated noise multipliers; equal plans are solved once.

    With secure sums all clients get the largest one.

    Args:
        protocol: The protocol.

    Raises:
        ConfigError: If no noise meets the target, a dataset ledger is requested without a finite epsilon, or the noise of secure
            sums is too coarse.
    """
    algorithm = algorithm_of(protocol)
    solved: dict[NoisyPlan, float | None] = {}
    reasons = without_guarantee(algorithm)
    if reasons and protocol.ledger_scope == "dataset":
        raise ConfigError(f"ledger.scope is 'dataset': {protocol.algorithm} has no finite epsilon to compose ({reasons[0]})")
    for charged in noisy_plans(algorithm):
        noisy = protected(list(charged.plan))
        solved[charged] = _noise_multiplier(noisy, charged.epsilon, protocol) if noisy else None
    if protocol.privacy.trust == "trusted-server":
        (z,) = solved.values()
        return protocol.model_copy(update={"curator_noise_multiplier": z, "unprotected": reasons})
    if protocol.privacy.secure:  # the shares of a sum's noise must fit together; a larger multiplier costs less
        solved = dict.fromkeys(solved, max((z for z in solved.values() if z is not None), default=None))
    noise = {plan_key(algorithm, e): solved[NoisyPlan.of(algorithm, e)] for e in plan_examples(algorithm)}
    roster = [e.model_copy(update={"noise_multiplier": noise[plan_key(algorithm, e)]}) for e in protocol.roster]
    result = protocol.model_copy(update={"roster": Roster.of(roster), "unprotected": reasons})
    if problem := secure_sum_problem(algorithm_of(result)):
        raise ConfigError(problem)
    return result


def _noise_multiplier(plan: list[Slot], epsilon: float, protocol: Protocol) -> float:
    """Noise multiplier of a plan, cached per host; every worker's host verifies its epsilon before it reads data."""
    from dpcfl_net.privacy.accounting import accountant

    privacy, delta, folder = protocol.privacy, protocol.accounted_delta, cache.folder() / "claims"
    how = privacy.adjacency, privacy.accountant

    def solve() -> float:
        found = accountant.calibrate(lambda z: plan_events(plan, z, privacy.adjacency), epsilon, delta, *how)
        # The search ended with this epsilon: workers of this host verify the claim without computing it again.
        events = plan_events(plan, found, privacy.adjacency)
        cached(folder, cost(events, delta, *how), lambda: accountant.epsilon(events, delta, *how))
        return found

    slots = [[type(slot).__name__, *asdict(slot).values(), count] for slot, count in Counter(plan).items()]
    asked = {"noise": slots, "epsilon": epsilon, "delta": delta, "adjacency": privacy.adjacency,
             "accountant": privacy.accountant}  # fmt: skip
    try:
        z: float = cached(folder, asked, solve)
    except ValueError as error:
        raise ConfigError(f"privacy.epsilon is {epsilon}: {error}") from None
    return z
