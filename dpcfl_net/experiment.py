"""From a configuration to a signed job: slices, plan, calibrated noise, and the two parts."""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import ValidationError

from dpcfl_net.algorithms.base import Algorithm, find
from dpcfl_net.config import Config
from dpcfl_net.data import cache
from dpcfl_net.data.partition import DataSettings, Slice, open_set, plan_slices
from dpcfl_net.errors import ConfigError, Refused
from dpcfl_net.federation.claim import noisy_plans, plan_events, protected, unprotected
from dpcfl_net.files import read_bytes
from dpcfl_net.job import (
    EXPERIMENT,
    PROTOCOL,
    Audit,
    ClientEntry,
    Experiment,
    ModelTemplate,
    PrivacyTarget,
    Protocol,
    canonical,
    derive_seed,
    digest,
    invalid_fields,
    read_experiment,
    read_protocol,
)
from dpcfl_net.plugins import is_plugin
from dpcfl_net.privacy.remembered import remembered
from dpcfl_net.types import DPSGDSlot, Slot
from dpcfl_net.wire import keys

if TYPE_CHECKING:
    from torch import nn

OPERATOR, COORDINATOR, OBSERVER = "operator", "coordinator", "observer"


@dataclass(frozen=True)
class Job:
    """Both parts as the operator holds them."""

    protocol: Protocol
    experiment: Experiment

    @property
    def algorithm(self) -> Algorithm:
        return algorithm_of(self.protocol)


def client_key(client: int) -> str:
    """The name of a client's key files."""
    return f"client_{client:04d}"


def make_keys(folder: Path, clients: int) -> None:
    """Key pairs for everybody of one run on one machine: operator, coordinator, observer and the clients."""
    make_operator_keys(folder)
    make_client_keys(folder, range(clients))


def make_operator_keys(folder: Path) -> None:
    """The operator's signing key, and the key pairs of coordinator and observer."""
    keys.write_operator_key(folder, OPERATOR)
    for name in (COORDINATOR, OBSERVER):
        keys.write_keypair(folder, name)


def make_client_keys(folder: Path, clients: Iterable[int]) -> None:
    """The key pairs of some clients, where these will run."""
    for client in clients:
        keys.write_keypair(folder, client_key(client))


def algorithm_of(protocol: Protocol) -> Algorithm:
    """The algorithm that a protocol names; Refused for one, or for options, that this version or folder does not have."""
    try:
        return find(protocol.algorithm)(protocol)
    except ConfigError as error:
        raise Refused("algorithm", f"the job's {error}") from error
    except ValidationError as error:
        raise Refused("algorithm", f"the job's options of {protocol.algorithm}: {invalid_fields(error)}") from None


def make_job(config: Config, key_folder: Path) -> Job:
    """Slices, roster, plan and noise for a configuration, with the public keys found in `key_folder`.

    Raises ConfigError when no noise reaches the target or canaries cannot be placed, DataMissing when the data set is not here.
    """
    images = open_set(config.data, config.data.root)
    truth = config.data.true_clusters
    n, insecure = len(truth), config.privacy.noise == "seeded"
    # A seed of few bits is guessed in no time: what must stay hidden from the server hangs on the salt. Only a run that
    # is stamped INSECURE hangs everything on the seed, so that it repeats bit for bit.
    salt = seeded_salt(config.seed) if insecure else os.urandom(32)
    root = str(config.seed).encode()
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
        noise_seed=seeded_noise(salt).hex() if insecure else None,
        audit=_audit(config, n, hashlib.sha256(b"audit\0" + salt).digest() if insecure else os.urandom(32)),
    )
    protocol = Protocol(
        run=seeded_run(salt) if insecure else os.urandom(16).hex(),
        name=config.name,
        algorithm=config.algorithm["name"],
        options=config.options.model_dump(mode="json"),
        rounds=config.rounds,
        local=config.local,
        privacy=config.privacy,
        model=model_template(
            config.model.name,
            images.input_shape,
            images.classes,
            derive_seed(root, "initial model"),
            task=images.task,
            by_record=not config.algorithm_class.plain_sgd(config.options, config.privacy),
        ),
        roster=[
            ClientEntry(
                id=i,
                public_key=keys.read_public(key_folder, client_key(i)),
                records=len(pieces[k].train_rows),
                validation_records=len(pieces[k].validation_rows),
                noise_multiplier=None,
            )
            for i, k in enumerate(order)
        ],
        coordinator_key=keys.read_public(key_folder, COORDINATOR),
        observer_key=keys.read_public(key_folder, OBSERVER),
        server_seed=hashlib.sha256(b"server\0" + root).hexdigest(),
        ledger_scope=config.ledger.scope,
        security=config.runtime.transport.security,
        oracle=experiment.true_clusters if config.algorithm_class.uses_oracle else None,
        experiment_hash=digest(experiment),
    )
    protocol = calibrated(protocol)
    if experiment.audit is not None and (problems := _audit_problems(protocol, experiment.audit)):
        raise ConfigError(problems)
    return Job(protocol, experiment)


def seeded_salt(seed: int) -> bytes:
    """The salt of a run with `noise: seeded`, which is no secret: seeds are small numbers."""
    return hashlib.sha256(f"salt/{seed}".encode()).digest()


def seeded_run(salt: bytes) -> str:
    """The public name of such a run; it shows whether a seed was guessed right."""
    return hashlib.sha256(b"run\0" + salt).hexdigest()[:32]


def seeded_noise(salt: bytes) -> bytes:
    """What all noise of such a run comes from."""
    return hashlib.sha256(b"noise\0" + salt).digest()


def _audit(config: Config, clients: int, secret: bytes) -> Audit | None:
    chosen = config.audit.client
    if not config.audit.canaries:
        return None
    return Audit(
        canaries=config.audit.canaries, clients=list(range(clients)) if chosen == "all" else [chosen], secret=secret.hex()
    )


def _audit_problems(protocol: Protocol, audit: Audit) -> list[str]:
    """Why these canaries cannot measure this run: no DP-SGD, no claim, no place."""
    algorithm, asked, problems = algorithm_of(protocol), f"audit.canaries is {audit.canaries}:", []
    entries = [protocol.client(client) for client in audit.clients]
    if not all(any(isinstance(slot, DPSGDSlot) for slot in algorithm.plan(entry)) for entry in entries):
        problems.append(f"{asked} the plan of {protocol.algorithm} holds no DP-SGD")
    if protocol.unprotected:
        problems.append(f"{asked} {protocol.algorithm} claims no finite epsilon ({protocol.unprotected[0]})")
    fewest = min(entry.records for entry in entries)
    if audit.canaries > fewest:
        problems.append(f"{asked} must be at most the {fewest} records of a client")
    if audit.canaries > protocol.model.parameters:
        problems.append(f"{asked} must be at most the {protocol.model.parameters} parameters of {protocol.model.name}")
    return problems


def model_template(
    name: str, input_shape: tuple[int, ...], classes: int, seed: int,
    task: Literal["classification", "regression"] = "classification", by_record: bool = True,
) -> ModelTemplate:  # fmt: skip
    """The pinned layout of a model; ConfigError if DP-SGD (`by_record`) or the plain engine cannot train it."""
    from dpcfl_net import models
    from dpcfl_net.privacy.dpsgd import Evaluator, Trainer

    module = models.build(name, input_shape, classes)
    if is_plugin(name):
        _check_own_model(name, module, input_shape, classes, seed, by_record)
    try:
        if by_record:
            Trainer(module, clip=1.0, learning_rate=0.1, batch_size=2, task=task)
        else:
            Evaluator(module, task)
    except ConfigError as error:
        raise ConfigError([f"model.name is {name!r}: {problem}" for problem in error.problems]) from error
    layout = [(key, list(shape)) for key, shape in models.layout(module)]
    parameters = sum(math.prod(shape) for _, shape in layout)
    return ModelTemplate(
        name=name, task=task, input_shape=list(input_shape), classes=classes, layout=layout, parameters=parameters,
        initial_seed=seed,
    )  # fmt: skip


def _check_own_model(
    name: str, module: nn.Module, input_shape: tuple[int, ...], classes: int, seed: int, by_record: bool
) -> None:
    from dpcfl_net import models
    from dpcfl_net.privacy import model_check

    try:
        model_check.check(module, input_shape, classes, by_record)
    except ConfigError as error:
        raise ConfigError([f"model.name is {name!r}: {problem}" for problem in error.problems]) from error
    # Every process draws the first values for itself.
    first, second = (models.initial(name, input_shape, classes, seed) for _ in range(2))
    if not np.array_equal(first, second):
        raise ConfigError(
            f"model.name is {name!r}: called twice under one torch seed it gives different parameters: draw with torch alone"
        )


def calibrated(protocol: Protocol) -> Protocol:
    """The same protocol with z_i solved from what each client's plan protects; equal plans are solved once.

    ConfigError if no noise reaches the target, or if a budget over several runs is asked for without a finite epsilon.
    """
    algorithm = algorithm_of(protocol)
    solved: dict[tuple[Slot, ...], float | None] = {}
    reasons = sorted({reason for plan in noisy_plans(algorithm) for reason in unprotected(list(plan))})
    if reasons and protocol.ledger_scope == "dataset":
        raise ConfigError(f"ledger.scope is 'dataset': {protocol.algorithm} has no finite epsilon to add up ({reasons[0]})")
    for plan in noisy_plans(algorithm):
        noisy = protected(list(plan))
        solved[plan] = _noise_multiplier(noisy, protocol.privacy) if noisy else None
    if protocol.privacy.trust == "trusted-server":
        (z,) = solved.values()
        return protocol.model_copy(update={"curator_noise_multiplier": z, "unprotected": reasons})
    roster = [e.model_copy(update={"noise_multiplier": solved[tuple(algorithm.plan(e))]}) for e in protocol.roster]
    return protocol.model_copy(update={"roster": roster, "unprotected": reasons})


def _noise_multiplier(plan: list[Slot], privacy: PrivacyTarget) -> float:
    """z for a plan: solved once on a host, and held to the target by every worker's host again before data is read."""
    from dpcfl_net.privacy import accounting

    def solve() -> float:
        return accounting.calibrate(
            lambda z: plan_events(plan, z, privacy.adjacency),
            privacy.epsilon,
            privacy.delta,
            adjacency=privacy.adjacency,
            accountant=privacy.accountant,
        )

    slots = [[type(slot).__name__, *asdict(slot).values(), count] for slot, count in Counter(plan).items()]
    asked = {"noise": slots, "epsilon": privacy.epsilon, "delta": privacy.delta, "adjacency": privacy.adjacency,
             "accountant": privacy.accountant}  # fmt: skip
    try:
        z: float = remembered(cache.folder() / "claims", asked, solve)
    except ValueError as error:
        raise ConfigError(f"privacy.epsilon is {privacy.epsilon}: {error}") from None
    return z


def write_job(job: Job, folder: Path, key_folder: Path) -> None:
    """protocol.json and experiment.json with the operator's signatures, and the operator's public key beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in ((PROTOCOL, job.protocol), (EXPERIMENT, job.experiment)):
        data = canonical(part)
        (folder / name).write_bytes(data)
        (folder / f"{name}.sig").write_text(keys.sign(key_folder / f"{OPERATOR}.secret", data))
    (folder / "operator.pub").write_text((key_folder / f"{OPERATOR}.public").read_text())


def read_job(folder: Path, operator_key: str) -> Job:
    """Both parts, refused unless the pinned operator signed them and they belong together.

    The last one is kept by the content of its files: a process that is forked where it was read need not verify it again.
    """
    content = hashlib.sha256()
    for name in (PROTOCOL, EXPERIMENT):
        for path in (folder / name, folder / f"{name}.sig"):
            content.update(hashlib.sha256(read_bytes(path) if path.exists() else b"").digest())
    return _read_job(folder, operator_key, content.hexdigest())


@lru_cache(maxsize=1)
def _read_job(folder: Path, operator_key: str, content: str) -> Job:
    protocol = read_signed_protocol(folder / PROTOCOL, operator_key)
    experiment = read_experiment(folder / EXPERIMENT, protocol)
    _check_signature(folder / EXPERIMENT, operator_key)
    return checked(Job(protocol, experiment))


def checked(job: Job) -> Job:
    """The job, refused unless its algorithm and options are known here and its experiment is of the roster's clients."""
    algorithm_of(job.protocol)
    experiment, clients = job.experiment, list(range(len(job.protocol.roster)))
    try:
        DataSettings.model_validate(experiment.data)
    except ValidationError as error:
        raise Refused("job-invalid", f"the experiment's data: {invalid_fields(error)}") from None
    whose = {"the roster's ids": [entry.id for entry in job.protocol.roster], "slices": sorted(experiment.slices)}
    for name, numbers in whose.items():
        if numbers != clients:
            raise Refused("job-invalid", f"{name} must be 0 to {len(clients) - 1}, each once")
    if len(experiment.true_clusters) != len(clients):
        raise Refused("job-invalid", f"true_clusters names {len(experiment.true_clusters)} clients, the roster {len(clients)}")
    return job


def read_signed_protocol(path: Path, operator_key: str) -> Protocol:
    """The protocol, refused unless the pinned operator signed it."""
    protocol = read_protocol(path)
    _check_signature(path, operator_key)
    return protocol


def _check_signature(path: Path, operator_key: str) -> None:
    signature = path.with_name(path.name + ".sig")
    if not signature.exists() or not keys.verify(
        operator_key, read_bytes(path), read_bytes(signature).decode(errors="replace").strip()
    ):
        raise Refused("operator-signature", f"{path.name} is not signed by the operator whose key is pinned here")


def client_slice(job: Job, client: int, root: str | None) -> tuple[DataSettings, Slice]:
    """Where a client's records are; of the data set it reads what the plan needs: sizes, labels or roles."""
    return experiment_slice(job.experiment, client, root)


def experiment_slice(experiment: Experiment, client: int, root: str | None) -> tuple[DataSettings, Slice]:
    """As `client_slice`, from the experiment part alone."""
    settings = DataSettings.model_validate(experiment.data)
    images = open_set(settings, root)
    return settings, plan_slices(settings, images, experiment.partition_seed)[experiment.slices[client]]
