"""Hosts reached by ssh or another command, such as kubectl exec, and the hosts file."""

from __future__ import annotations

import shlex
import subprocess
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationError, model_validator

from dpcfl_net.core import yaml_file
from dpcfl_net.core.config_messages import known_keys, nearest_key, sentences
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import shown
from dpcfl_net.core.frozen import StrictModel
from dpcfl_net.experiment.config_schema import GpuUuid
from dpcfl_net.launch.placement import routes
from dpcfl_net.launch.placement.base import agent_command
from dpcfl_net.launch.placement.connection import CommandConnection
from dpcfl_net.launch.placement.remote import Host
from dpcfl_net.transport.sockets import is_loopback

ROOT = "~/.local/state/dpcfl"
# Never asks for a password; detects a lost connection within 30 s.
OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3")
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Text = Annotated[str, Field(min_length=1)]
# No shell expands a tilde: the agent's command is quoted for ssh, and `through` has none.
Program = Annotated[str, Field(min_length=1), AfterValidator(lambda path: _without_tilde(path))]


def _without_tilde(path: str) -> str:
    if path.startswith("~"):
        raise ValueError(f"is {shown(path)}: must be the whole path on the host, or the name of a program")
    return path


class Entry(StrictModel):
    """A host of the hosts file.

    Attributes:
        name: Unique name.
        address: Address for ssh.
        options: Arguments of ssh, in addition to ~/.ssh/config.
        through: Instead of `address`: a command that runs its last arguments on the host.
        workers: Share of the worker processes; None: number of cores.
        python: Python interpreter there; None: that of the file.
        data_root: Folder of the data sets there.
        gpus: UUIDs of the only GPUs or MIG slices to use there, in place of `runtime.gpus`; empty: those.
    """

    name: Annotated[str, Field(pattern=NAME)]
    address: Text | None = None
    options: list[str] = []
    through: list[str] = []
    workers: Annotated[int, Field(ge=1)] | None = None
    python: Program | None = None
    data_root: Text | None = None
    gpus: list[GpuUuid] = []

    @model_validator(mode="after")
    def _one_way(self) -> Entry:
        if (self.address is None) == (not self.through):
            raise ValueError("give either address (for ssh) or through (a command)")
        if self.options and self.through:
            raise ValueError("options are for ssh; append the options of another command to through")
        if self.address is not None and self.address.startswith("-"):
            raise ValueError(f"address is {self.address!r}: must not begin with a dash")
        return self

    def command(self, python: str, root: str, run: str, *, cpu: bool) -> list[str]:
        """Return the command that runs the agent there, connected to its standard input and output."""
        agent = agent_command(self.python or python, root, run, self.name, cpu=cpu)
        if self.through:
            return [*self.through, *agent]
        assert self.address is not None
        return ["ssh", *OPTIONS, *self.options, self.address, "exec " + shlex.join(agent)]


class HostsFile(StrictModel):
    """Content of a hosts file.

    Attributes:
        hosts: The hosts.
        python: Python interpreter on the hosts.
        root: Folder for keys and ledgers on the hosts.
    """

    hosts: Annotated[list[Entry], Field(min_length=1)]
    python: Program = "python3"
    root: Text = ROOT

    @model_validator(mode="after")
    def _names_differ(self) -> HostsFile:
        names = [entry.name for entry in self.hosts]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two hosts have the name {twice[0]!r}")
        return self

    def make_hosts(self, run: str, logs: Path, *, cpu: bool) -> list[Host]:
        """Return the hosts with their connections.

        Args:
            run: Name of the run.
            logs: Folder of the logs on this machine.
            cpu: True if no worker may use a GPU.
        """
        return [
            Host(
                entry.name,
                partial(
                    CommandConnection, entry.command(self.python, self.root, run, cpu=cpu), logs / f"host_{entry.name}.log"
                ),
                entry.workers,
                entry.data_root,
                gpus=tuple(entry.gpus),
            )
            for entry in self.hosts
        ]


def read_hosts(path: Path) -> HostsFile:
    """Read a hosts file.

    Args:
        path: YAML file.

    Raises:
        ConfigError: With every invalid field.
    """
    document = yaml_file.load(path)
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must hold a mapping with the key hosts")
    try:
        return HostsFile.model_validate(document)
    except ValidationError as error:
        keys = [*known_keys(HostsFile), *(f"hosts.0.{name}" for name in Entry.model_fields)]
        raise ConfigError([f"{path}: {sentence}" for sentence in sentences(error, lambda key: _hint(key, keys))]) from None


def _hint(path: str, keys: list[str]) -> str:
    near = nearest_key(path, keys)
    return f", did you mean {near.rpartition('.')[2]!r}?" if near else ""


def own_address(hosts: HostsFile) -> str:
    """Return the address of this machine on the route to the first host that is another machine.

    Args:
        hosts: The hosts file.

    Raises:
        ConfigError: If there is no route, or if it cannot be told from the hosts that are reached by ssh.
    """
    names = (_host_name(entry) for entry in hosts.hosts if entry.address is not None)
    found = "" if hosts.hosts[0].address is None else routes.own_address(names)
    if not found or (is_loopback(found) and any(entry.through for entry in hosts.hosts)):
        raise ConfigError(
            "give --address, the address of this machine for workers: it is detected only if the first host has an ssh address, "
            "and one of these hosts is another machine"
        )
    return found


def _host_name(entry: Entry) -> str:
    """Return the name or address to which ssh would connect."""
    assert entry.address is not None
    settings = subprocess.run(["ssh", "-G", *entry.options, entry.address], capture_output=True, text=True, check=False).stdout
    return next((line.split(" ", 1)[1] for line in settings.splitlines() if line.startswith("hostname ")), entry.address)
