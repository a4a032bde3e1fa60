"""Hosts that ssh reaches, or any other command that a hosts file names for them (kubectl exec, ip netns exec)."""

from __future__ import annotations

import shlex
import socket
import subprocess
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dpcfl_net.core import yaml_file
from dpcfl_net.core.config_messages import known_keys, nearest_key, sentences
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.launch.placement.connection import CommandConnection
from dpcfl_net.launch.placement.remote import Host

ROOT = "~/.local/state/dpcfl"
# No passwords are asked for, and a host that is cut off is noticed within half a minute.
OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3")
DISCARD = 9  # a port to ask a route for; nothing is sent
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class Entry(BaseModel):
    """A host of the file: an ssh address, or `through`, a command that runs its last arguments there."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: Annotated[str, Field(pattern=NAME)]
    address: str | None = None
    options: list[str] = []  # for ssh, beside those of ~/.ssh/config
    through: list[str] = []
    workers: Annotated[int, Field(ge=1)] | None = None
    python: str | None = None
    data_root: str | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Entry:
        if (self.address is None) == (not self.through):
            raise ValueError("give address (for ssh) or through (a command), one of both")
        if self.options and self.through:
            raise ValueError("options are for ssh; put those of another command into through")
        if self.address is not None and self.address.startswith("-"):
            raise ValueError(f"address is {self.address!r}: must not begin with a dash")
        return self

    def command(self, python: str, root: str, run: str) -> list[str]:
        """What starts the agent there, with its standard input and output here."""
        agent = [
            self.python or python,
            "-m",
            "dpcfl_net.launch.placement.agent",
            "--root",
            root,
            "--run",
            run,
            "--node",
            self.name,
        ]
        if self.through:
            return [*self.through, *agent]
        assert self.address is not None
        return ["ssh", *OPTIONS, *self.options, self.address, "exec " + shlex.join(agent)]


class HostsFile(BaseModel):
    """The hosts, and what they have in common."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    hosts: Annotated[list[Entry], Field(min_length=1)]
    python: str = "python3"
    root: str = ROOT

    @model_validator(mode="after")
    def _names_differ(self) -> HostsFile:
        names = [entry.name for entry in self.hosts]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two hosts are called {twice[0]!r}")
        return self

    def dialled(self, run: str, logs: Path) -> list[Host]:
        """The hosts with the commands that reach them."""
        return [
            Host(
                entry.name,
                partial(CommandConnection, entry.command(self.python, self.root, run), logs / f"host_{entry.name}.log"),
                entry.workers,
                entry.data_root,
            )
            for entry in self.hosts
        ]


def read_hosts(path: Path) -> HostsFile:
    """Read a hosts file; ConfigError names what does not fit."""
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
    """This machine's address on the way to the first host; ConfigError if there is no telling."""
    entry = hosts.hosts[0]
    if entry.address is None:
        raise ConfigError("give --address, this machine's as workers reach it: the first host is not reached by ssh")
    told = subprocess.run(["ssh", "-G", *entry.options, entry.address], capture_output=True, text=True, check=False).stdout
    name = next((line.split(" ", 1)[1] for line in told.splitlines() if line.startswith("hostname ")), entry.address)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(name, DISCARD, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"no route to {entry.address} ({error}): give --address, this machine's as workers reach it"
        ) from None
