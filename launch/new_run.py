"""A new run folder: its name, keys, signed job and resolved configuration."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from dpcfl_net.core import yaml_file
from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.core.files import check_text, in_home
from dpcfl_net.core.plugins import short
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.types import Policy
from dpcfl_net.experiment.build import make_job, with_noise_seed
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.experiment.job_files import write_job
from dpcfl_net.federation.claim import hold_to_policy
from dpcfl_net.launch.drafts import remove_left_drafts
from dpcfl_net.launch.placement.placements import KeyOwners, LocalPlacement, Placement
from dpcfl_net.results.compare import SECRETS
from dpcfl_net.training.devices import deal
from dpcfl_net.transport.keys import make_operator_keys


def check_gpus(config: Config) -> None:
    """Check that this machine has the GPUs of a run whose workers it starts.

    Hosts of `dpcfl launch` check their own GPUs, so that the launcher's host needs none.

    Args:
        config: The configuration.

    Raises:
        ConfigError: If a GPU that the configuration asks for is missing, as `devices.assign`.
        RunFailed: As `visible_gpus`.
    """
    if config.runtime.federation == "network":  # otherwise everything is computed on the CPU
        deal(config.runtime, 1)


def new_folder(config: Config, out: Path) -> Path:
    """Create an empty run folder named after the configuration and the time, and remove what killed preparations left beside it.

    Args:
        config: The configuration.
        out: Parent of the folder.

    Returns:
        The folder.

    Raises:
        OSError: If it cannot be created.
        ConfigError: If no name is free, or `out` is not Unicode.
    """
    check_text(str(out), "out")
    remove_left_drafts(out)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    stem = f"{config.name}-{short(config.algorithm['name'])}-{stamp}"
    for count in range(100):
        folder = out / (stem if not count else f"{stem}-{count}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if not folder.exists():  # `out` exists and is not a folder
                raise
            continue
        return folder
    raise ConfigError(f"no free name for a run folder {out / stem}")


def prepare(
    folder: Path, config: Config, placement: Placement | None = None, on_step: Callable[[str], None] = lambda step: None
) -> None:
    """Write all that a run starts from: keys, the signed job and the resolved configuration.

    Args:
        folder: The run folder.
        config: The configuration.
        placement: Hosts of the workers, where the clients' keys are created; None: this machine.
        on_step: Called with each step that may take long, before it begins.

    Raises:
        ConfigError: If the job cannot be made, or its clients would refuse it.
    """
    keys, clients = RunFolder(folder).keys, config.data.client_count
    on_step(f"keys of clients: {clients}")
    make_operator_keys(keys)
    (placement or LocalPlacement()).make_keys(keys, KeyOwners.of(config))
    config = with_noise_seed(config)
    job = make_job(config, keys, on_step)
    check_policy(job.protocol, config)
    write_config(folder, config)
    write_job(job, folder, keys)


def check_policy(protocol: Protocol, config: Config) -> None:
    """Check the job against the limits of the clients that the run will start, before each of them refuses it.

    Args:
        protocol: The job's protocol.
        config: The configuration, which sets the limits.

    Raises:
        ConfigError: If a client would refuse the job.
    """
    policy = Policy(config.runtime.max_epsilon, config.runtime.max_delta)
    for client in {(entry.records, entry.epsilon): entry.id for entry in reversed(list(protocol.roster))}.values():
        try:
            hold_to_policy(protocol, client, policy)
        except Refused as refusal:
            raise ConfigError(
                f"the worker of client {client} would refuse the job: {refusal.reason}; runtime.max_epsilon and runtime.max_delta set the limits"
            ) from None


def write_config(folder: Path, config: Config) -> None:
    """Write the resolved configuration, which `dpcfl run` accepts as CONFIG; with mode 0600 if it holds the secret of seeded noise.

    The folder of the record book is written as an absolute path, so that the run is resumed and reported with the same book from any folder.

    Args:
        folder: The run folder, created if missing.
        config: The configuration.

    Raises:
        OSError: If it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    document = config.model_dump(mode="json", exclude={"algorithms"})
    if config.ledger.root is not None:
        document["ledger"]["root"] = str(in_home(config.ledger.root, "ledger.root").resolve())
    write_atomically(
        RunFolder(folder).config, yaml_file.dump(document), mode=mode_of({"privacy": {"noise_seed": config.privacy.noise_seed}})
    )


def mode_of(config: Mapping[str, Any], changed: Collection[str] = ()) -> int:
    """Return the mode of a file that holds a configuration: the secret of seeded noise is for its owner only.

    Args:
        config: The configuration.
        changed: Dotted keys of settings beside it in the file.
    """
    privacy = config.get("privacy")
    given = isinstance(privacy, Mapping) and privacy.get("noise_seed") is not None
    return 0o600 if given or not set(SECRETS).isdisjoint(changed) else 0o666
