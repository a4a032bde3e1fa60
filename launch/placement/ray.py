"""Ray: a placement group with a bundle for each worker, spread over the nodes, and an agent in each bundle."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.launch.placement.connection import STDERR_TAIL, one_line
from dpcfl_net.launch.placement.remote import Host

PLACED_S = 60.0
ORDERS, REPORTS = "orders", "reports"


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError("--on ray needs Ray: pip install 'dpcfl-net[ray]'") from None
    return ray


class Bundle:
    """An actor in a bundle: it starts the agent there and passes bytes on. Ray's own messages carry orders and reports
    as they are, neither keys nor ledger secrets among them."""

    def __init__(self, root: str, run: str, name: str) -> None:
        command = [sys.executable, "-m", "dpcfl_net.launch.placement.agent", "--root", root, "--run", run, "--node", name]
        self._agent = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )
        self._said = bytearray()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def send(self, data: bytes) -> None:
        """Bytes for the agent's input."""
        assert self._agent.stdin is not None
        try:
            view = memoryview(data)
            while view:
                view = view[self._agent.stdin.write(view) or 0 :]
        except (BrokenPipeError, ValueError):
            return

    def receive(self) -> bytes:
        """What the agent said, as soon as it says something; nothing at its end."""
        assert self._agent.stdout is not None
        return self._agent.stdout.read(1 << 20)

    def hang_up(self) -> None:
        """End the agent's input."""
        assert self._agent.stdin is not None
        self._agent.stdin.close()

    def failure(self) -> str:
        """How the agent ended."""
        code = self._agent.wait(10)
        self._listener.join(1)
        return f"exit code {code}: {one_line(self._said)[-STDERR_TAIL:] or 'no message'}"

    def _listen(self) -> None:
        assert self._agent.stderr is not None
        while piece := self._agent.stderr.read(1 << 16):
            self._said += piece
            del self._said[:-8192]


class RayConnection:
    """The line to the agent of a bundle; it ends when the agent does, or its actor, or the node."""

    def __init__(self, cluster: Cluster, bundle: int, root: str, run: str) -> None:
        self._ray, self._why, self._placed = cluster.ray, "", False
        self._actor = cluster.actor(bundle).remote(root, run, f"bundle-{bundle}")

    def send(self, data: bytes) -> None:
        """See `HostConnection`."""
        self._actor.send.options(concurrency_group=ORDERS).remote(data)  # in order; of an actor that is gone, `reports` hears

    def reports(self) -> Iterator[bytes]:
        """See `HostConnection`."""
        rest = b""
        try:
            # A bundle whose node was lost is nowhere until Ray finds room for it on another.
            self._ray.get(self._actor.__ray_ready__.remote(), timeout=PLACED_S)
            self._placed = True
        except self._ray.exceptions.GetTimeoutError:
            self._why = f"Ray has had no place for its bundle within {PLACED_S:g} s"
            return
        except self._ray.exceptions.RayError as error:
            self._why = _told(error)
            return
        try:
            while piece := self._ray.get(self._actor.receive.options(concurrency_group=REPORTS).remote()):
                *whole, rest = (rest + piece).split(b"\n")
                yield from whole
            self._why = self._ray.get(self._actor.failure.options(concurrency_group=REPORTS).remote(), timeout=20)
        except self._ray.exceptions.RayError as error:
            self._why = _told(error)

    def failure(self) -> str:
        """See `HostConnection`."""
        return self._why or "the connection was lost"

    def hang_up(self) -> None:
        """See `HostConnection`."""
        if self._placed:
            self._actor.hang_up.options(concurrency_group=ORDERS).remote()
        else:
            self._ray.kill(self._actor)  # who waits for it in `reports` waits no longer

    def close(self, patience_s: float) -> None:
        """See `HostConnection`."""
        if self._placed:
            try:
                self._ray.get(self._actor.hang_up.options(concurrency_group=ORDERS).remote(), timeout=patience_s)
                self._ray.get(self._actor.failure.options(concurrency_group=REPORTS).remote(), timeout=patience_s)
            except self._ray.exceptions.RayError:
                pass  # with its actor or node the agent is gone as well
        self._ray.kill(self._actor)


def _told(error: Exception) -> str:
    return f"Ray: {type(error).__name__}: {str(error).strip().splitlines()[0]}"


class Cluster:
    """A Ray cluster with a bundle of `cpus` and `gpus` (fractions allowed) for each of `workers`.

    address: of the cluster; None for the one that RAY_ADDRESS names, or else one on this machine alone. ConfigError
    if the cluster has not the room.
    """

    def __init__(self, workers: int, cpus: float, gpus: float, address: str | None = None) -> None:
        self.ray = _ray()
        from ray.util.placement_group import placement_group

        self._own = not self.ray.is_initialized()
        if self._own:
            self.ray.init(address=address, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
        resources = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
        self._resources = resources
        self.group = placement_group([resources] * workers, strategy="SPREAD")
        if not self.group.wait(PLACED_S):
            has = {key: value for key, value in self.ray.cluster_resources().items() if key in ("CPU", "GPU")}
            self.close()
            raise ConfigError(f"{workers} bundles of {resources} do not fit into the cluster, which has {has}")

    def actor(self, bundle: int) -> Any:
        """The remote class for a bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # A thread that waits for the agent's words, and one that passes orders on in their order.
        return self.ray.remote(concurrency_groups={ORDERS: 1, REPORTS: 1})(Bundle).options(
            num_cpus=self._resources["CPU"], num_gpus=self._resources.get("GPU", 0), max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle),
        )  # fmt: skip

    def nodes(self) -> list[str]:
        """The node of each bundle: its address, and the beginning of its id."""
        from ray.util.placement_group import placement_group_table

        where = placement_group_table(self.group)["bundles_to_node_id"]
        names = {node["NodeID"]: f"{node['NodeManagerAddress']} {node['NodeID'][:8]}" for node in self.ray.nodes()}
        return [names[where[k]] for k in range(len(where))]

    def own_address(self) -> str:
        """This machine's, as the cluster knows it."""
        return str(self.ray.util.get_node_ip_address())

    def close(self) -> None:
        """Give the bundles back."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self.group)
        if self._own:
            self.ray.shutdown()


def dialled(cluster: Cluster, *, root: str, run: str) -> list[Host]:
    """A host for each bundle: one worker process each."""
    return [
        Host(f"bundle-{k}", partial(RayConnection, cluster, k, root, run), 1, where=node)
        for k, node in enumerate(cluster.nodes())
    ]
