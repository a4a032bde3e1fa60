"""Ray: a placement group with one bundle per node, and an agent in each bundle."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.extras import advice
from dpcfl_net.launch.placement.base import agent_command
from dpcfl_net.launch.placement.connection import STDERR_TAIL, HostConnection, complete_lines, one_line
from dpcfl_net.launch.placement.remote import Host

TELL_S = 5.0
COMMANDS, REPORTS = "commands", "reports"


def import_ray() -> Any:
    """Import Ray; ConfigError if it is not installed."""
    try:
        import ray
    except ImportError:
        raise ConfigError(f"--on ray needs Ray: {advice('ray')}") from None
    return ray


class Bundle:
    """Actor that starts the agent in a bundle and forwards its bytes. They hold neither secret keys nor releases."""

    def __init__(self, root: str, run: str, name: str, cpu: bool) -> None:
        command = agent_command(sys.executable, root, run, name, cpu=cpu)
        self._agent = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )
        self._errors = bytearray()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def send(self, data: bytes) -> None:
        """Write to the agent's input."""
        assert self._agent.stdin is not None
        try:
            view = memoryview(data)
            while view:
                view = view[self._agent.stdin.write(view) or 0 :]
        except (BrokenPipeError, ValueError):
            return

    def receive(self) -> bytes:
        """Wait for output of the agent and return it; empty at its end."""
        assert self._agent.stdout is not None
        return self._agent.stdout.read(1 << 20)

    def hang_up(self) -> None:
        """Close the agent's input."""
        assert self._agent.stdin is not None
        self._agent.stdin.close()

    def failure(self) -> str:
        """Return how the agent ended."""
        code = self._agent.wait(10)
        self._listener.join(1)
        return f"exit code {code}: {one_line(self._errors)[-STDERR_TAIL:] or 'no message'}"

    def _listen(self) -> None:
        assert self._agent.stderr is not None
        while received := self._agent.stderr.read(1 << 16):
            self._errors += received
            del self._errors[:-8192]


class RayConnection(HostConnection):
    """Connection to the agent of a bundle; it ends with the agent, its actor or the node."""

    def __init__(self, cluster: Cluster, bundle: int, root: str, run: str, cpu: bool) -> None:
        self._ray, self._error, self._ready, self._wait_s = cluster.ray, "", False, cluster.wait_s
        self._actor = cluster.actor(bundle).remote(root, run, f"bundle-{bundle}", cpu)

    def send(self, data: bytes) -> None:
        self._actor.send.options(concurrency_group=COMMANDS).remote(data)  # in order; `reports` notices a lost actor

    def reports(self) -> Iterator[bytes]:
        try:
            # Ray moves the bundle of a lost node to another node.
            self._ray.get(self._actor.__ray_ready__.remote(), timeout=self._wait_s)
            self._ready = True
        except self._ray.exceptions.GetTimeoutError:
            self._error = f"Ray did not place the bundle within {self._wait_s:g} s"
            return
        except self._ray.exceptions.RayError as error:
            self._error = describe_error(error)
            return
        try:
            yield from complete_lines(iter(self._receive, b""))
            self._error = self._ray.get(self._actor.failure.options(concurrency_group=REPORTS).remote(), timeout=20)
        except self._ray.exceptions.RayError as error:
            self._error = describe_error(error)

    def _receive(self) -> bytes:
        output: bytes = self._ray.get(self._actor.receive.options(concurrency_group=REPORTS).remote())
        return output

    def failure(self) -> str:
        return self._error or "the connection was lost"

    def hang_up(self) -> None:
        if self._ready:
            self._actor.hang_up.options(concurrency_group=COMMANDS).remote()
        else:
            self.cut()  # ends the wait in `reports`

    def cut(self) -> None:
        self._ray.kill(self._actor)

    def close(self, patience_s: float) -> None:
        try:
            if self._ready:
                self._ray.get(self._actor.hang_up.options(concurrency_group=COMMANDS).remote(), timeout=patience_s)
                self._ray.get(self._actor.failure.options(concurrency_group=REPORTS).remote(), timeout=patience_s)
        except self._ray.exceptions.RayError:
            pass  # the agent ended with its actor or node
        finally:
            self.cut()


def describe_error(error: Exception) -> str:
    """Return an error of Ray on one line."""
    return f"Ray: {type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"


class Cluster:
    """A Ray cluster with one bundle per node, each for an agent and its worker processes.

    The nodes are found by a placement group with one bundle per worker process: Ray spreads it over the nodes, an autoscaling
    cluster adds nodes for it, and a second group then takes the sum of each node.

    Args:
        workers: Number of worker processes.
        cpus: CPUs per worker process.
        gpus: GPUs per worker process; fractions are allowed.
        wait_s: Seconds to wait for nodes.
        counts: Worker processes of each bundle in a resumed run; None: a new run.

    Attributes:
        counts: Worker processes of each bundle.

    Raises:
        ConfigError: If Ray is not installed, or if the worker processes do not fit into the cluster.
    """

    def __init__(self, workers: int, cpus: float, gpus: float, wait_s: float, counts: Sequence[int] | None = None) -> None:
        self.ray, self.wait_s = import_ray(), wait_s
        self._own = not self.ray.is_initialized()
        if self._own:
            self.ray.init(log_to_driver=False, logging_level="ERROR", include_dashboard=False)
        self._cpus, self._gpus, self._deadline = cpus, gpus, time.monotonic() + wait_s
        self._groups: list[Any] = []
        try:
            self.counts = list(counts) if counts is not None else self._spread(workers)
            # The bundles of a resumed run may be more than the nodes.
            self.group = self._reserve(self.counts, "SPREAD" if counts is not None else "STRICT_SPREAD")
        except BaseException:
            self.close()
            raise

    def resources(self, workers: int) -> dict[str, float]:
        """Return what a bundle of some worker processes takes; Ray accepts fractions of one GPU only."""
        gpus = round(self._gpus * workers, 4)
        return {"CPU": self._cpus * workers} | ({"GPU": gpus if gpus <= 1 else math.ceil(gpus)} if gpus else {})

    def _spread(self, workers: int) -> list[int]:
        """Return the number of worker processes on each node that Ray chooses."""
        from ray.util.placement_group import placement_group_table, remove_placement_group

        group = self._reserve([1] * workers, "SPREAD")
        counts = Counter(placement_group_table(group)["bundles_to_node_id"].values())
        remove_placement_group(group)
        self._groups.remove(group)
        return sorted(counts.values(), reverse=True)

    def _reserve(self, counts: Sequence[int], strategy: str) -> Any:
        """Create a placement group and wait until Ray has reserved it."""
        from ray.util.placement_group import placement_group

        bundles = [self.resources(count) for count in counts]
        group = placement_group(bundles, strategy=strategy)
        self._groups.append(group)
        left = max(1.0, self._deadline - time.monotonic())
        if group.wait(min(left, TELL_S)):
            return group
        asked = ", ".join(f"{count} of {dict(kind)}" for kind, count in Counter(tuple(b.items()) for b in bundles).items())
        if left > TELL_S:
            print(f"waiting up to {left:.0f} s for room in the Ray cluster: {asked}", flush=True)
            if group.wait(left - TELL_S):
                return group
        total = {key: value for key, value in self.ray.cluster_resources().items() if key in ("CPU", "GPU")}
        raise ConfigError(
            f"bundles ({asked}) do not fit into the Ray cluster, which has {total}, within {self.wait_s:g} s (--ray-wait)"
        )

    def actor(self, bundle: int) -> Any:
        """Return the remote class for a bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        needed = self.resources(self.counts[bundle])
        # One thread waits for reports, another forwards commands in order.
        return self.ray.remote(concurrency_groups={COMMANDS: 1, REPORTS: 1})(Bundle).options(
            num_cpus=needed["CPU"], num_gpus=needed.get("GPU", 0), max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle),
        )  # fmt: skip

    def nodes(self) -> list[str]:
        """Return address and start of the id of each bundle's node."""
        from ray.util.placement_group import placement_group_table

        node_ids = placement_group_table(self.group)["bundles_to_node_id"]
        names = {node["NodeID"]: f"{node['NodeManagerAddress']} {node['NodeID'][:8]}" for node in self.ray.nodes()}
        return [names[node_ids[k]] for k in range(len(node_ids))]

    def own_address(self) -> str:
        """Return the address of this machine in the cluster."""
        return str(self.ray.util.get_node_ip_address())

    def close(self) -> None:
        """Release the bundles."""
        from ray.util.placement_group import remove_placement_group

        with ExitStack() as stack:  # each also after an error of another
            if self._own:
                stack.callback(self.ray.shutdown)
            for group in self._groups:
                stack.callback(remove_placement_group, group)


def make_hosts(cluster: Cluster, *, root: str, run: str, cpu: bool) -> list[Host]:
    """Describe each bundle as a host.

    Args:
        cluster: The cluster.
        root: Folder for keys and ledgers on the nodes.
        run: Name of the run.
        cpu: True if no worker may use a GPU.
    """
    return [
        Host(f"bundle-{k}", partial(RayConnection, cluster, k, root, run, cpu), cluster.counts[k], location=node)
        for k, node in enumerate(cluster.nodes())
    ]


def counts_of(placed: Sequence[str]) -> list[int]:
    """Return the worker processes of each bundle of an earlier start.

    Args:
        placed: Name of each worker process's bundle.

    Raises:
        ConfigError: If a name is not that of a bundle.
    """
    numbers = [name.removeprefix("bundle-") for name in placed]
    if not numbers or not all(number.isascii() and number.isdigit() for number in numbers):
        raise ConfigError("placement.json names hosts that are no bundles of Ray")
    counts = Counter(map(int, numbers))
    return [counts[k] for k in range(max(counts) + 1)]
