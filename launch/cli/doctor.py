"""Checks of this machine, with what would fail and how to fix it."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dpcfl_net.core import host_memory, open_files
from dpcfl_net.core.cores import usable_cores
from dpcfl_net.core.errors import DpcflError
from dpcfl_net.core.files import reason
from dpcfl_net.experiment.config import LEAST_GROUP
from dpcfl_net.training.nvidia_smi import VISIBLE, gpu_names, visible_gpus

Verdict = Literal["good", "note", "fails"]
PACKAGES = ("torch", "torchvision", "opacus", "scikit-learn", "pyzmq", "msgpack", "numpy", "dp-accounting", "cryptography")
PROGRAMS = {"ssh": "--on ssh", "srun": "--on slurm", "ray": "--on ray"}
LOADED = 2.0  # load per core above which elapsed times tell more about other programs
STA_UNSYNC, TIME_ERROR = 0x0040, 5  # of Linux's sys/timex.h


class Timex(ctypes.Structure):
    """struct timex of Linux's sys/timex.h; the fields after `status` are not used."""

    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    ]


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        subject: What was checked.
        verdict: "good", "note" (a run works, with a limit) or "fails" (a run would fail).
        found: What was found.
        fix: What to do about it; empty if nothing is to be done.
    """

    subject: str
    verdict: Verdict
    found: str
    fix: str = ""

    def line(self) -> str:
        """Format the result for the terminal."""
        fix = f"\n       fix: {self.fix}" if self.fix else ""
        return f"{self.verdict:5}  {self.subject}: {self.found}{fix}"


def examine(clients: int) -> Iterator[Finding]:
    """Run all checks for a run of `clients` worker processes.

    Args:
        clients: Worker processes that run at the same time.

    Yields:
        One finding per check, also for a check that is not possible on this system.
    """
    checks: Sequence[Callable[[], Finding]] = (
        system, versions, curve, _torchvision, cores, memory_for(clients), gpus, files_for(clients), clients_in_a_process,
        backlog_for(clients), processes_for(clients), loopback, durable, private_files, clock, data_sets, elsewhere,
    )  # fmt: skip
    for check in checks:
        yield check()


def check(clients: int) -> dict[str, Any]:
    """Run all checks, and tell whether a run would work.

    Args:
        clients: Worker processes of the planned run.

    Returns:
        workers, able (False if such a run would fail on this machine) and checks (subject, verdict, found, fix).
    """
    findings = list(examine(clients))
    able = all(finding.verdict != "fails" for finding in findings)
    return {"workers": clients, "able": able, "checks": [asdict(finding) for finding in findings]}


def lines(found: dict[str, Any]) -> list[str]:
    """Format the checks for the terminal.

    Args:
        found: From `check`.
    """
    findings = [Finding(**one) for one in found["checks"]]
    failing = sum(finding.verdict == "fails" for finding in findings)
    end = (
        f"\nA run with {found['workers']} workers would fail on this machine: {failing} of the checks failed."
        if failing
        else f"\nThis machine can run {found['workers']} workers."
    )
    return [*(finding.line() for finding in findings), end]


def measure() -> dict[str, Any]:
    """Measure the costs of this host and keep them for `dpcfl job`.

    Returns:
        The fields of `HostCosts`, with load, cores and file (where they are kept).
    """
    from dpcfl_net.experiment import host_costs
    from dpcfl_net.launch.bench import host

    print("measuring starts, rounds, tasks and memory of small runs, about a minute", flush=True)
    costs = host.measure()
    kept = host_costs.store(costs)
    return {**asdict(costs), "load": os.getloadavg()[0], "cores": usable_cores(), "file": str(kept)}


def cost_lines(costs: dict[str, Any]) -> list[str]:
    """Format the measured costs for the terminal.

    Args:
        costs: From `measure`.
    """
    mib = 2**20
    out = [
        f"processor: {costs['processor']}",
        f"start and end of a run: {costs['start_s']:.1f} s of processor time; each worker: {1e3 * costs['worker_s']:.0f} ms",
        f"a round: {1e3 * costs['round_s']:.1f} ms; each task: {1e3 * costs['task_s']:.1f} ms; "
        f"each megabyte: {1e9 * costs['byte_s']:.1f} ms",
        f"wall time: {1e3 * costs['round_wall_s']:.1f} ms a round and {1e3 * costs['task_wall_s']:.1f} ms a task, with waits for the disk",
        f"memory: {costs['run_bytes'] / mib:.0f} MiB a run and {costs['worker_bytes'] / mib:.0f} MiB a worker",
        f"memory per parameter: {costs['worker_parameter_bytes']:.1f} bytes in a worker, "
        f"{costs['server_parameter_bytes']:.1f} in the server, {costs['aggregator_parameter_bytes']:.1f} in an aggregator",
        f"each aggregator: {1e3 * costs['aggregator_s']:.0f} ms to start, {1e3 * costs['aggregator_round_s']:.1f} ms a round and "
        f"{costs['aggregator_bytes'] / mib:.0f} MiB; all together {1e3 * costs['aggregator_wall_s']:.1f} ms of wall time a round",
    ]
    if costs["load"] > LOADED * costs["cores"]:
        out.append(
            f"note: the load is {costs['load']:.0f} on {costs['cores']} cores: elapsed times are too long; measure again on an idle host"
        )
    return [*out, f"kept for dpcfl job in {costs['file']}"]


def system() -> Finding:
    """Check the operating system and Python."""
    found = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    if platform.system() != "Linux":
        return Finding("system", "note", found, "the limit on message size and the end of orphaned workers need Linux")
    return Finding("system", "good", found)


def versions() -> Finding:
    """Check that the required packages are installed."""
    found, missing = [], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return Finding("packages", "fails", f"missing: {', '.join(missing)}", "pip install -c constraints-cpu.txt -e .")
    return Finding("packages", "good", ", ".join(found))


def curve() -> Finding:
    """Check that ZeroMQ can encrypt."""
    import zmq

    found = f"libzmq {zmq.zmq_version()}"
    if not zmq.has("curve"):
        return Finding(
            "encryption", "fails", f"{found} without CURVE", "install pyzmq from its wheel: pip install --force-reinstall pyzmq"
        )
    return Finding("encryption", "good", f"{found} with CURVE")


def _torchvision() -> Finding:
    from dpcfl_net.core.vision import torchvision

    try:
        torchvision()
    except (ImportError, RuntimeError, DpcflError) as error:
        fix = "install matching versions of torch and torchvision: pip install -c constraints-cpu.txt torch torchvision"
        return Finding("torchvision", "note", f"{error}; only models of your own that use it need it", fix)
    return Finding("torchvision", "good", "can be imported")


def cores() -> Finding:
    """Check the cores that this process may use."""
    usable, total = usable_cores(), os.cpu_count() or 1
    found = f"{usable} of {total} usable; {usable} worker{'s compute' if usable > 1 else ' computes'} at a time (runtime.slots)"
    threads = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if os.environ.get(name, "1") != "1"}
    if threads:
        settings = ", ".join(f"{name}={value}" for name, value in threads.items())
        return Finding("cores", "note", f"{found}; {settings} is ignored: each worker uses one thread")
    return Finding("cores", "good", found)


def memory_for(clients: int) -> Callable[[], Finding]:
    """Check the memory for this number of workers with a small model."""

    def check() -> Finding:
        from dpcfl_net.experiment import host_costs
        from dpcfl_net.experiment.cost_prediction import idle_memory

        free, wanted = host_memory.available(), idle_memory(host_costs.load()[0], clients)
        found = (
            f"{free / 2**30:.1f} of {host_memory.total() / 2**30:.1f} GiB available, about {wanted / 2**30:.1f} GiB needed for "
            f"{clients} workers without their models"
        )
        if wanted > free:
            return Finding("memory", "fails", found, "lower runtime.max_live_workers, or raise runtime.clients_per_worker")
        return Finding("memory", "good", found)

    return check


def gpus() -> Finding:
    """Check for GPUs and whether the installed torch can use them."""
    import torch

    built = torch.version.cuda
    try:
        listed, visible = "; ".join(gpu_names()), visible_gpus()
    except DpcflError as error:
        return Finding("GPUs", "fails", str(error), "repair the driver, or compute on the CPU: runtime.device=cpu")
    if not listed:
        return Finding("GPUs", "good", "none found; workers compute on the CPU")
    if not built:
        return Finding("GPUs", "note", f"{listed}; torch is built with no CUDA", "install a CUDA build of torch to use them")
    if not visible:
        hidden = f"{listed}; {VISIBLE}={os.environ.get(VISIBLE, '')} hides them; workers compute on the CPU"
        return Finding("GPUs", "note", hidden, f"unset {VISIBLE} to use them")
    if not torch.cuda.is_available():
        return Finding(
            "GPUs", "fails", f"{listed}; torch is built with CUDA {built}, which does not start on them",
            "install a driver for this CUDA, or torch for an earlier one, or compute on the CPU: runtime.device=cpu",
        )  # fmt: skip
    free = ", ".join(f"{gpu.free / 2**30:.1f} GiB free on {gpu.uuid}" for gpu in visible)
    found = f"{listed}; {free}; torch is built with CUDA {built}"
    return Finding("GPUs", "good", f"{found}; runtime.slots_per_gpu workers (default 1) compute on a GPU at a time")


def files_for(clients: int) -> Callable[[], Finding]:
    """Check the limit on open files for launcher and coordinator."""

    def check() -> Finding:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = open_files.files_for(clients)
        needed = f"about {wanted} needed for {clients} workers"
        if soft == resource.RLIM_INFINITY or soft >= wanted:
            return Finding(
                "open files", "good", f"{'any number' if soft == resource.RLIM_INFINITY else soft} allowed, {needed}"
            )
        if hard == resource.RLIM_INFINITY or hard >= wanted:
            return Finding("open files", "good", f"{soft} allowed, {needed}; each process raises its limit itself")
        how = "ask the administrator for a higher limit (ulimit -Hn), or lower runtime.max_live_workers"
        return Finding("open files", "fails", f"{hard} allowed at most, {needed}", how)

    return check


def clients_in_a_process() -> Finding:
    """Check how many clients one worker process may serve within the limit on open files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    each = f"each has up to {open_files.PER_SERVED} open files there (runtime.clients_per_worker)"
    if hard == resource.RLIM_INFINITY:
        return Finding("clients per process", "good", f"any number in one worker process; {each}")
    room = max(0, hard - open_files.OTHERS) // open_files.PER_SERVED
    found = f"up to {room} in one worker process, which may have {hard} open files; {each}"
    if room < LEAST_GROUP:
        fix = "ask the administrator for a higher limit (ulimit -Hn)"
        if room:
            fix += f", or set runtime.clients_per_worker to at most {room}: its default for a large roster is {LEAST_GROUP} or more"
        return Finding("clients per process", "note", found, fix)
    return Finding("clients per process", "good", found)


def backlog_for(clients: int) -> Callable[[], Finding]:
    """Check the limit on pending connections, for when all clients connect together."""

    def check() -> Finding:
        path = Path("/proc/sys/net/core/somaxconn")
        if not path.exists():
            return Finding("connections", "note", "the limit on pending connections cannot be read on this system")
        allowed, wanted = int(path.read_text()), clients + open_files.OTHERS
        found = f"{allowed} pending connections allowed, {wanted} needed if all clients connect together"
        if allowed < wanted:
            return Finding(
                "connections",
                "note",
                found,
                f"sysctl net.core.somaxconn={wanted}; without it some clients connect a second later",
            )
        return Finding("connections", "good", found)

    return check


def processes_for(clients: int) -> Callable[[], Finding]:
    """Check the limit on processes and threads; a worker has five threads."""

    def check() -> Finding:
        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        wanted = 6 * clients + 32
        if soft == resource.RLIM_INFINITY:
            return Finding("processes", "good", "no limit")
        found = f"{soft} processes and threads allowed, about {wanted} needed"
        if wanted > soft:
            return Finding("processes", "fails", found, f"ulimit -u {wanted}, or lower runtime.max_live_workers")
        return Finding("processes", "good", found)

    return check


def loopback() -> Finding:
    """Check that a socket on 127.0.0.1 accepts a connection."""
    from dpcfl_net.transport import loopback as interface

    try:
        port = interface.connect()
    except OSError as error:
        return Finding("loopback", "fails", f"no connection over 127.0.0.1: {reason(error)}", interface.REPAIR)
    return Finding("loopback", "good", f"a connection over 127.0.0.1 works (port {port})")


def durable() -> Finding:
    """Measure a durable write in the current folder: every charge of a ledger needs it."""
    try:
        took = _fsync_s()
    except OSError as error:
        found = f"cannot write in {Path.cwd()}: {reason(error)}"
        return Finding("disk", "fails", found, "start commands in another folder, or give --out DIR")
    found = f"an fsync in {Path.cwd()} takes {1000 * took:.1f} ms; a client needs two for each task"
    if took > 0.1:
        return Finding("disk", "note", found, "put run folders on a local disk: --out DIR")
    return Finding("disk", "good", found)


def _fsync_s() -> float:
    """Seconds that a short durable write in the current folder takes."""
    import time

    with tempfile.TemporaryDirectory(dir=".") as folder:
        handle = os.open(Path(folder) / "probe", os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            start = time.perf_counter()
            for _ in range(5):
                os.write(handle, b"x" * 512)
                os.fsync(handle)
            return (time.perf_counter() - start) / 5
        finally:
            os.close(handle)


def private_files() -> Finding:
    """Check that the file system restricts a key file to its owner."""
    try:
        with tempfile.TemporaryDirectory(dir=".") as folder:
            path = Path(folder) / "key"
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
            mode = path.stat().st_mode & 0o777
    except OSError as error:
        return Finding("key files", "note", f"not checked: cannot write in {Path.cwd()}: {reason(error)}")
    if mode != 0o600:
        return Finding(
            "key files",
            "fails",
            f"a file created with mode 0600 here has mode {mode:04o}",
            "use a file system with permissions",
        )
    return Finding("key files", "good", "the file system keeps mode 0600")


def clock() -> Finding:
    """Check that the clock is synchronised; only the times in logs and reports need it."""
    try:
        state = Timex()  # modes = 0 reads the state and changes nothing
        code = ctypes.CDLL(None).adjtimex(ctypes.byref(state))
    except (OSError, AttributeError):
        return Finding("clock", "note", "cannot be read on this system")
    if code == TIME_ERROR or state.status & STA_UNSYNC:
        fix = "run an NTP client on each host of a run on several hosts; one host needs none"
        return Finding("clock", "note", "not synchronised; times from several hosts in one report may disagree", fix)
    return Finding("clock", "good", "synchronised")


def data_sets() -> Finding:
    """List the data sets that are on this machine."""
    from dpcfl_net.data import datasets

    available = [name for name in datasets.PUBLIC if datasets.is_here(name)]
    missing = [name for name in datasets.PUBLIC if name not in available]
    fix = "dpcfl data fetch NAME, or set DPCFL_DATA to a folder that has them" if missing else ""
    return Finding(
        "data sets", "note" if missing else "good", f"{', '.join(available)}; missing: {', '.join(missing) or 'none'}", fix
    )


def elsewhere() -> Finding:
    """List the programs that start workers on other hosts."""
    available = [name for name in PROGRAMS if shutil.which(name)]
    return Finding("other hosts", "good", f"found: {', '.join(available) or 'none'} (of {', '.join(PROGRAMS)})")
