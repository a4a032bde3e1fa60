"""Where the workers of a run are: here, or on hosts that agents run on. Each makes the clients' keys where they are used."""

from __future__ import annotations

import secrets
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.types import Policy
from dpcfl_net.experiment.config import Config
from dpcfl_net.launch.placement.base import Launcher, Node
from dpcfl_net.launch.placement.messages import FILES, Brief, Enrol
from dpcfl_net.launch.placement.remote import HELLO_S, Host, Post, RemoteLauncher, close_all, node_of, place
from dpcfl_net.runtime.worker_spec import Terms, WorkerSpec
from dpcfl_net.training.devices import deal
from dpcfl_net.transport.keys import OBSERVER, client_key, make_client_keys, public_path, read_public


def terms_of(config: Config) -> Terms:
    """On what terms the workers of a run serve, by its configuration."""
    ledger, policy = config.ledger, Policy(config.runtime.max_epsilon, config.runtime.max_delta)
    if ledger.root is None:
        return Terms(policy)
    budget = None if ledger.budget is None else (ledger.budget.epsilon, ledger.budget.delta)
    return Terms(policy, Path(ledger.root).expanduser().resolve(), budget)


class Site(Protocol):
    """A place for all workers of one run."""

    def capacity(self) -> list[Node]:
        """The hosts, or shares of hosts, that workers are put on."""

    def enrol(self, keys: Path, clients: int, size: int) -> None:
        """Have every client's key pair made where it will run, `size` clients to a process; public keys go to the folder `keys`."""

    def bind(self, role: str) -> str:
        """Where the coordinator, or the observer, shall listen."""

    def reached(self, address: str) -> str:
        """How workers reach what listens at `address`."""

    def preload(self, job: tuple[Path, str, str | None] | None = None) -> None:
        """Have loaded what every worker needs, as `local.preload`, while nobody waits for it yet."""

    def launcher(self, folder: Path, config: Config, operator_key: str, connect: str, observer: str) -> Launcher:
        """What starts the workers of the job in `folder`."""

    def devices(self) -> dict[str, int]:
        """How many worker processes compute on what: "cpu", or a GPU's UUID; as far as is known."""

    def close(self) -> None:
        """End whatever runs there."""


class Here:
    """This machine: everything on loopback."""

    def __init__(self) -> None:
        self._launcher: Launcher | None = None
        self._devices: list[str] = []
        self._slots: tuple[Path, int] | None = None

    def capacity(self) -> list[Node]:
        """See `Site`."""
        from dpcfl_net.launch.placement.local import here

        return [here()]

    def enrol(self, keys: Path, clients: int, size: int) -> None:
        """See `Site`."""
        make_client_keys(keys, range(clients))

    def bind(self, role: str) -> str:
        """See `Site`."""
        return "tcp://127.0.0.1:*"

    def reached(self, address: str) -> str:
        """See `Site`."""
        return address

    def preload(self, job: tuple[Path, str, str | None] | None = None) -> None:
        """See `Site`."""
        from dpcfl_net.launch.placement.local import preload

        preload(job)

    def launcher(self, folder: Path, config: Config, operator_key: str, connect: str, observer: str) -> Launcher:
        """See `Site`."""
        from dpcfl_net.launch.placement.local import LocalLauncher, own_slots

        runtime, files = config.runtime, RunFolder(folder)
        self._slots = own_slots(runtime, secrets.token_hex(8))
        firsts = range(0, sum(config.data.clients), runtime.clients_per_worker)
        spec = WorkerSpec(
            folder, 0, connect, observer, files.keys, operator_key, files.ledgers, terms_of(config), config.data.root,
            self._slots, runtime.orphan_timeout_s,
        )  # fmt: skip
        devices = deal(runtime, len(firsts))
        self._devices = [device.uuid or "cpu" for device in devices]
        self._launcher = LocalLauncher(spec, files.logs, dict(zip(firsts, devices, strict=True)))
        return self._launcher

    def devices(self) -> dict[str, int]:
        """See `Site`."""
        return dict(Counter(self._devices))

    def close(self) -> None:
        """See `Site`."""
        if self._launcher is not None:
            self._launcher.close()
        if self._slots is not None:
            shutil.rmtree(self._slots[0], ignore_errors=True)


@dataclass(frozen=True)
class Listening:
    """Where coordinator and observer listen for workers of other hosts. address: theirs, as workers reach it. bind: if that is
    not an address of this machine. ports: the coordinator's and the observer's; 0 for any."""

    address: str
    bind: str | None = None
    ports: tuple[int, int] = (0, 0)


class Elsewhere:
    """Hosts with an agent on each. placed: the host of each worker process, in a run that goes on."""

    def __init__(self, hosts: Sequence[Host], listening: Listening, placed: Sequence[str] | None = None) -> None:
        self._listening, self._size, self._placed = listening, 1, placed
        self._closed = False
        self._posts = [Post(host) for host in hosts]
        self._of: list[Post] = []  # the post of each posting

    def open(self) -> None:
        """Dial all hosts; RunFailed if one does not answer."""
        for post in self._posts:
            post.open()
        for post in self._posts:
            post.wait_for(post.greeted, HELLO_S)

    def capacity(self) -> list[Node]:
        """See `Site`."""
        return [node_of(post) for post in self._posts]

    def places(self, clients: int, size: int) -> list[str]:
        """The host of each worker process, in the order of their clients."""
        self._size, count = size, -(-clients // size)
        if self._placed is not None:
            by_name = {post.host.name: post for post in self._posts}
            if missing := sorted(set(self._placed) - set(by_name)):
                raise ConfigError(f"this run has clients on {', '.join(missing)}, of which there is no line now")
            self._of = [by_name[name] for name in self._placed]
        else:
            shares = [post.host.workers or node_of(post).cores for post in self._posts]
            self._of = [self._posts[k] for k in place(count, shares)]
        return [post.host.name for post in self._of]

    def enrol(self, keys: Path, clients: int, size: int) -> None:
        """See `Site`. In a run that goes on the keys must be there, and those of the signed job."""
        self.places(clients, size)
        for post in self._posts:
            if theirs := self._clients_of(post, clients):
                post.send(Enrol(clients=theirs, known=self._placed is not None))
        for post in dict.fromkeys(self._of):
            post.wait_for(post.enrolled, HELLO_S)
            for client, key in post.keys.items():
                path = public_path(keys, client_key(client))
                if self._placed is not None and read_public(keys, client_key(client)) != key:
                    raise Refused("keys", f"client {client} on {post.host.name} has not the key that the job names")
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.write_text(key + "\n")

    def bind(self, role: str) -> str:
        """See `Site`."""
        port = self._listening.ports[role == OBSERVER]
        return f"tcp://{_bracketed(self._listening.bind or self._listening.address)}:{port or '*'}"

    def reached(self, address: str) -> str:
        """See `Site`."""
        return f"tcp://{_bracketed(self._listening.address)}:{address.rpartition(':')[2]}"

    def preload(self, job: tuple[Path, str, str | None] | None = None) -> None:
        """See `Site`: agents load it where they are."""

    def launcher(self, folder: Path, config: Config, operator_key: str, connect: str, observer: str) -> Launcher:
        """See `Site`."""
        size, clients = config.runtime.clients_per_worker, sum(config.data.clients)
        files = {name: (folder / name).read_text() for name in FILES}
        for post in dict.fromkeys(self._of):
            post.books = RunFolder(folder).ledgers
            post.brief(Brief(
                files=files, operator_key=operator_key, connect=connect, observer=observer, runtime=config.runtime,
                data_root=post.host.data_root or config.data.root,
                firsts=[k * size for k, other in enumerate(self._of) if other is post],
            ))  # fmt: skip
        return RemoteLauncher({first: self._of[first // size] for first in range(0, clients, size)}, RunFolder(folder).logs)

    def devices(self) -> dict[str, int]:
        """See `Site`."""
        return dict(Counter(device for post in self._posts for device in post.devices))

    def close(self) -> None:
        """See `Site`."""
        if self._closed:
            return
        self._closed = True
        close_all(self._posts)

    def _clients_of(self, post: Post, clients: int) -> list[int]:
        return [client for client in range(clients) if self._of[client // self._size] is post]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
