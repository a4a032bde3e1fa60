"""From a configuration to a job: partition, roster, model, calibrated noise, and both parts of the job."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dpcfl_net.algorithms.base import algorithm_of
from dpcfl_net.algorithms.client_level import ClientLevel
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.frozen import digest
from dpcfl_net.core.job_differences import differences
from dpcfl_net.core.protocol import AggregatorEntry, Protocol
from dpcfl_net.core.roster import ClientEntry, Roster
from dpcfl_net.core.seeds import derive_seed
from dpcfl_net.core.signed_settings import ModelTemplate, PrivacyTarget
from dpcfl_net.data.datasets import Images
from dpcfl_net.data.partition import open_set, plan_slices
from dpcfl_net.data.settings import DataSettings
from dpcfl_net.data.slices import Slice
from dpcfl_net.experiment.calibration import calibrated
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.experiment.job_files import Audit, Experiment, Job
from dpcfl_net.experiment.model_template import check_precision, model_template
from dpcfl_net.federation.claim import SEEDED
from dpcfl_net.privacy.randomness import derive
from dpcfl_net.privacy.slots import DPSGDSlot, SecureSlot
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

    salt: bytes = field(repr=False)
    audit: bytes = field(repr=False)
    run: bytes
    noise: bytes | None = field(repr=False)

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
    on_step(f"data set {config.data.dataset}")
    images = open_set(config.data, config.data.root)
    if config.local.precision != "float32":
        check_precision(config, images)
    # A short seed can be guessed, so everything hidden from the server derives from 256-bit secrets. With seeded noise one such
    # secret gives all of them, so that the run repeats bit for bit.
    secrets = Secrets.of(config)
    clients = len(config.data.true_clusters)
    order = np.random.Generator(np.random.PCG64(derive_seed(secrets.salt, "permutation"))).permutation(clients).tolist()
    settings = _data_settings(config)
    pieces = plan_slices(settings, images, _seed_of(config, "partition"))
    experiment = _experiment(config, settings, order, secrets)
    public = keys.read_client_keys(key_folder, clients)
    signing: Sequence[str | None] = read_identities(key_folder, clients) if config.privacy.secure else [None] * clients
    on_step(f"layout of model {config.model.name}")
    model = _model(config, images)
    roster = _roster(config, (pieces[k] for k in order), public, signing)
    protocol = _protocol(config, experiment, model, roster, secrets.run, key_folder)
    protocol = calibrated(protocol, on_step)
    if experiment.audit is not None and (problems := _audit_problems(protocol, experiment.audit)):
        raise ConfigError(problems)
    return Job(protocol, experiment)


def changed_settings(config: Config, job: Job) -> list[str]:
    """List the settings of a configuration that differ from those in a job; a run of the job uses the latter.

    Args:
        config: The configuration, such as that in the folder of a run.
        job: The job.

    Returns:
        One line for each setting, "here" in the configuration and "there" in the job. Settings that are not part of the job, such as
        timeouts, are not compared.
    """
    protocol, experiment = job.protocol, job.experiment
    data = _data_settings(config).model_dump(mode="json")
    found = [
        *differences(protocol.model_copy(update=_signed_settings(config)), _with_names_of(config, protocol)),
        *differences(experiment.model_copy(update={"seed": config.seed, "data": data}), experiment),
    ]
    secret = b"" if experiment.audit is None else bytes.fromhex(experiment.audit.secret)
    if _audit(config, len(protocol.roster), secret) != experiment.audit:
        found.append("audit: other canaries here than there")
    if config.model.name != protocol.model.name:
        found.append(f"model.name: {config.model.name!r} here, {protocol.model.name!r} there")
    groups = [(group[0], group[-1]) for group in config.runtime.groups(len(protocol.roster))]
    if groups != [(entry.first, entry.last) for entry in protocol.aggregators]:
        found.append("runtime.aggregators: other groups of clients here than there")
    epsilons = config.privacy.epsilons()
    for entry in protocol.roster:
        spans = config.availability.spans(entry.id, config.rounds)
        pairs = ("availability", spans, entry.rounds), ("epsilon", epsilons.get(entry.id), entry.epsilon)
        if different := [
            f"{name} of client {entry.id}: {here} here, {there} there" for name, here, there in pairs if here != there
        ]:
            return [*found, *different]
    return found


def _with_names_of(config: Config, protocol: Protocol) -> Protocol:
    """Return the protocol with the options of the configuration's algorithm by their present names."""
    if config.algorithm["name"] != protocol.algorithm:
        return protocol
    present = config.algorithm_class.Options.with_present_names(protocol.options)
    return protocol.model_copy(update={"options": present})


def _root(config: Config) -> bytes:
    return str(config.seed).encode()


def _seed_of(config: Config, purpose: str) -> int:
    """Derive a seed from the configuration's seed, which can be guessed."""
    return derive_seed(_root(config), purpose)


def _data_settings(config: Config) -> DataSettings:
    return DataSettings.model_validate(config.data.model_dump(exclude={"root"}))


def _experiment(config: Config, settings: DataSettings, order: list[int], secrets: Secrets) -> Experiment:
    """Experiment part; `order` gives the slice of each client."""
    truth = config.data.true_clusters
    return Experiment(
        salt=secrets.salt.hex(),
        seed=config.seed,
        data=settings.model_dump(mode="json"),
        partition_seed=_seed_of(config, "partition"),
        slices=order,
        true_clusters=[truth[k] for k in order],
        noise_seed=secrets.noise.hex() if secrets.noise is not None else None,
        audit=_audit(config, len(truth), secrets.audit),
    )


def _model(config: Config, images: Images) -> ModelTemplate:
    return model_template(
        config.model.name,
        images,
        _seed_of(config, "initial model"),
        by_record=not config.capabilities.plain_sgd,
        batch_size=config.local.batch_size,
    )


def _roster(config: Config, pieces: Iterable[Slice], public: Sequence[str], signing: Sequence[str | None]) -> Roster:
    """Roster before calibration; slices and keys are in the clients' order."""
    own_epsilon = config.privacy.epsilons()
    return Roster.of(
        ClientEntry(
            id=i,
            public_key=public[i],
            records=len(piece.train_rows),
            validation_records=len(piece.validation_rows),
            noise_multiplier=None,
            rounds=config.availability.spans(i, config.rounds),
            identity=signing[i],
            epsilon=own_epsilon.get(i),
        )
        for i, piece in enumerate(pieces)
    )


def _protocol(
    config: Config, experiment: Experiment, model: ModelTemplate, roster: Roster, run: bytes, key_folder: Path
) -> Protocol:
    """Protocol part before calibration."""
    return Protocol(
        **_signed_settings(config),
        run=run.hex(),
        model=model,
        roster=roster,
        coordinator_key=keys.read_public(key_folder, keys.COORDINATOR),
        observer_key=keys.read_public(key_folder, keys.OBSERVER),
        server_seed=hashlib.sha256(b"server\0" + _root(config)).hexdigest(),
        aggregators=_aggregators(config.runtime.groups(len(roster)), key_folder),
        oracle=experiment.true_clusters if config.capabilities.uses_oracle else None,
        experiment_hash=digest(experiment),
    )


def _signed_settings(config: Config) -> dict[str, Any]:
    """Fields of the protocol that the configuration alone determines."""
    return {
        "name": config.name,
        "algorithm": config.algorithm.get("name"),
        "options": config.options.model_dump(mode="json"),
        "rounds": config.rounds,
        "local": config.local,
        "privacy": PrivacyTarget.model_validate(config.privacy.model_dump(exclude={"noise_seed", "epsilon_by_client"})),
        "ledger_scope": config.ledger.scope,
        "security": config.runtime.transport.security,
        "communication": config.communication.signed(),
        "tuning": config.tuning,
    }


def _aggregators(groups: list[range], key_folder: Path) -> list[AggregatorEntry]:
    """Aggregators with their public keys."""
    return [
        AggregatorEntry(public_key=keys.read_public(key_folder, keys.aggregator_key(k)), first=group[0], last=group[-1])
        for k, group in enumerate(groups)
    ]


def _audit(config: Config, clients: int, secret: bytes) -> Audit | None:
    chosen = config.audit.client
    if not config.audit.canaries:
        return None
    audited = [chosen] if chosen != "all" else list(range(clients))
    if config.privacy.unit == "client":
        audited = audited[: config.audit.canaries]
    return Audit(canaries=config.audit.canaries, clients=audited, secret=secret.hex())


def _audit_problems(protocol: Protocol, audit: Audit) -> list[str]:
    """Reasons why canaries cannot measure this run."""
    algorithm, asked, problems = algorithm_of(protocol), f"audit.canaries is {audit.canaries}:", []
    entries, whole = [protocol.client(client) for client in audit.clients], protocol.privacy.unit == "client"
    if not whole and not all(
        any(isinstance(slot, DPSGDSlot | SecureSlot) for slot in algorithm.plan(entry)) for entry in entries
    ):
        problems.append(f"{asked} the plan of {protocol.algorithm} holds no DP-SGD")
    if set(protocol.unprotected) - {SEEDED}:
        problems.append(f"{asked} {protocol.algorithm} claims no finite epsilon ({protocol.unprotected[0]})")
    if len(targets := {protocol.epsilon_of(entry) for entry in entries}) > 1:
        problems.append(
            f"{asked} the audited clients have epsilon {min(targets):g} to {max(targets):g}, and an audit tests one claim: "
            "audit.client must be the number of one client"
        )
    fewest = min(entry.records for entry in entries)
    if audit.canaries > fewest and not whole:
        problems.append(f"{asked} must be at most the {fewest} records of a client")
    if whole and not isinstance(algorithm, ClientLevel):
        problems.append(
            f"{asked} {protocol.algorithm} is not derived from algorithms.client_level.ClientLevel, which lays out the sums that an audit reads"
        )
    if audit.canaries > protocol.model.parameters:
        problems.append(f"{asked} must be at most the {protocol.model.parameters} parameters of {protocol.model.name}")
    return problems
