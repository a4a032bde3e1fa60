"""Emulated links of a run: a relay process between workers and coordinator, or a network namespace per client."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.experiment.job_files import Job
from dpcfl_net.experiment.network_settings import links_of
from dpcfl_net.transport.links.netem import NetemNetwork, problems
from dpcfl_net.transport.links.relay import RelaySpec

RELAY = "relay"


@dataclass
class Links:
    """The links of a run's clients.

    Args:
        files: Files of the run.
        config: Its configuration.
        job: Its job.

    Attributes:
        namespaces: Network namespace by client; empty without netem.
        bind: Address on which coordinator and observer listen; None: as without links.
    """

    files: RunFolder
    config: Config
    job: Job
    namespaces: Mapping[int, str] = field(default_factory=dict)
    bind: str | None = None

    def __post_init__(self) -> None:
        self._started = time.monotonic()
        self._stack = contextlib.ExitStack()
        self._schedules = links_of(self.config.network, self.config.data.clients)
        if self.config.network.how == "netem":
            spaces = self._stack.enter_context(NetemNetwork(self.job.protocol.run, self._schedules)).spaces
            self.namespaces = {space.client: space.name for space in spaces}
            self.bind = f"tcp://{spaces[0].host_address}:*"

    @property
    def relayed(self) -> bool:
        """True if a relay process is needed."""
        return self.config.network.how == "relay"

    def relay_spec(self, coordinator: str, listen: str, first_port: int | None = None) -> RelaySpec:
        """Return the arguments of the relay; it keeps its ports and its time after a crash.

        Args:
            coordinator: Address of the coordinator.
            listen: Address of this machine that workers reach.
            first_port: Port for client 0, followed by those of the others; None: any free ports.
        """
        fixed = {} if first_port is None else {client: first_port + client for client in range(len(self._schedules))}
        ports = fixed | {client: int(address.rpartition(":")[2]) for client, address in self.addresses().items()}
        return RelaySpec(
            coordinator, dict(enumerate(self._schedules)), self.files.address(RELAY), self.files.path / "links.jsonl",
            seed=self.config.seed, listen=listen.removeprefix("tcp://").rpartition(":")[0], ports=ports,
            elapsed_s=time.monotonic() - self._started,
        )  # fmt: skip

    def addresses(self) -> dict[int, str]:
        """Return the relay's address for each client; empty before it listens."""
        path = self.files.address(RELAY)
        return {int(client): address for client, address in json.loads(path.read_text()).items()} if path.exists() else {}

    def close(self) -> None:
        """Remove network namespaces."""
        self._stack.close()


def require_netem(config: Config) -> None:
    """Check that this machine can make the configured links, before anything is written.

    Args:
        config: Configuration of a run.

    Raises:
        ConfigError: If it asks for netem and this machine lacks something.
    """
    if config.network.how == "netem" and (lacking := problems()):
        raise ConfigError([f"network.how is 'netem', which needs more than this machine has: {problem}" for problem in lacking])


def refuse_remote(config: Config) -> None:
    """Refuse links that other hosts cannot have.

    Args:
        config: Configuration of a run on other hosts.

    Raises:
        ConfigError: For netem, which makes namespaces of this machine.
    """
    if config.network.how == "netem":
        raise ConfigError("network.how is 'netem': works on one machine only; must be 'relay' for workers on other hosts")
