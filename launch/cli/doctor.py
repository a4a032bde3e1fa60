"""`dpcfl doctor`: what this machine can do, what would fail here, and how to mend it."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dpcfl_net.core.errors import DpcflError
from dpcfl_net.training.devices import visible_gpus

Verdict = Literal["good", "note", "fails"]
PACKAGES = ("torch", "torchvision", "opacus", "scikit-learn", "pyzmq", "msgpack", "numpy", "dp-accounting", "cryptography")
PROGRAMS = {"ssh": "--on ssh", "srun": "--on slurm", "ray": "--on ray"}
DESCRIPTORS_PER_CLIENT, DESCRIPTORS = 4, 128  # of the process that starts the others; of the coordinator besides its peers
STA_UNSYNC, TIME_ERROR = 0x0040, 5  # of Linux's sys/timex.h


class Timex(ctypes.Structure):
    """struct timex of Linux's sys/timex.h; what follows `status` is not needed."""

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
    """One thing looked at. `mend` is what to do about it, empty where there is nothing to do."""

    what: str
    verdict: Verdict
    found: str
    mend: str = ""

    def line(self) -> str:
        """As it is printed."""
        mend = f"\n       mend: {self.mend}" if self.mend else ""
        return f"{self.verdict:5}  {self.what}: {self.found}{mend}"


def examine(clients: int) -> Iterator[Finding]:
    """Everything, for runs of `clients` processes at once; what cannot be looked at here is said."""
    looks: Sequence[Callable[[], Finding]] = (
        system, versions, curve, _torchvision, cores, memory_for(clients), gpus, files_for(clients), backlog_for(clients),
        processes_for(clients), loopback, durable, private_files, clock, data_sets, elsewhere,
    )  # fmt: skip
    for look in looks:
        yield look()


def run(clients: int) -> int:
    """Print every finding; 4 if a run of so many workers would fail here."""
    failing = 0
    for finding in examine(clients):
        print(finding.line())
        failing += finding.verdict == "fails"
    print(f"{failing} of these would make a run of {clients} workers fail" if failing else f"a run of {clients} workers can go")
    return 4 if failing else 0


def system() -> Finding:
    """Operating system and Python."""
    found = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    if platform.system() != "Linux":
        return Finding("system", "note", found, "the guard against endless messages and the kill of orphans need Linux")
    return Finding("system", "good", found)


def versions() -> Finding:
    """What of the packages is installed."""
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
    """Encryption of the transport."""
    import zmq

    found = f"libzmq {zmq.zmq_version()}"
    if not zmq.has("curve"):
        return Finding(
            "CURVE", "fails", f"{found} without it", "install pyzmq's own wheel: pip install --force-reinstall pyzmq"
        )
    return Finding("CURVE", "good", found)


def _torchvision() -> Finding:
    from dpcfl_net.core.vision import torchvision

    try:
        torchvision()
    except (ImportError, RuntimeError, DpcflError) as error:
        pair = "install torch and torchvision of one release: pip install -c constraints-cpu.txt torch torchvision"
        return Finding("torchvision", "note", f"{error}; only resnet18 and `dpcfl data fetch` need it", pair)
    return Finding("torchvision", "good", "imports")


def cores() -> Finding:
    """Cores that this process may use: as many workers compute at once."""
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    found = f"{usable} of {there} usable: so many workers compute at once (runtime.slots)"
    threads = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if os.environ.get(name, "1") != "1"}
    if threads:
        return Finding("cores", "note", f"{found}; {threads} set", "nothing: workers use one thread each, whatever is set")
    return Finding("cores", "good", found)


def memory_for(clients: int) -> Callable[[], Finding]:
    """Memory for so many workers with a small model."""

    def look() -> Finding:
        import psutil

        from dpcfl_net.experiment.cost_estimate import base_memory

        free, wanted = psutil.virtual_memory().available, base_memory(clients)
        found = f"{free / 2**30:.1f} GiB available, about {wanted / 2**30:.1f} for {clients} workers before their models"
        if wanted > free:
            return Finding("memory", "fails", found, "lower runtime.max_live_workers, or raise runtime.clients_per_worker")
        return Finding("memory", "good", found)

    return look


def gpus() -> Finding:
    """GPUs that the driver names, and whether the torch that is installed can use them."""
    import torch

    listed = _nvidia_smi()
    usable = torch.cuda.is_available()
    if listed and not usable:
        built = torch.version.cuda or "no CUDA"
        return Finding(
            "GPUs", "note", f"{'; '.join(listed)}; torch is built with {built}", "install a CUDA build of torch to use them"
        )
    if not usable:
        return Finding("GPUs", "good", "none: workers compute on the CPU")
    free = ", ".join(f"{gpu.free / 2**30:.1f} GiB free on {gpu.uuid}" for gpu in visible_gpus())
    found = f"{'; '.join(listed) or 'usable'}; {free or 'none given to this process'}; torch is built with CUDA {torch.version.cuda}"
    return Finding(
        "GPUs", "good", f"{found}. runtime.slots_per_gpu workers (1 unless set) compute on each at once, the others wait"
    )


def _nvidia_smi() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20, check=False)
    return [line.split(" (UUID")[0] for line in done.stdout.splitlines() if line.startswith("GPU")]


def files_for(clients: int) -> Callable[[], Finding]:
    """Open files that the launcher and the coordinator need."""

    def look() -> Finding:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = DESCRIPTORS + DESCRIPTORS_PER_CLIENT * clients
        found = f"{soft} allowed, about {wanted} needed for {clients} clients"
        if wanted > soft:
            how = f"ulimit -n {wanted}" if hard == resource.RLIM_INFINITY or hard >= wanted else "ask for a higher hard limit"
            return Finding("open files", "fails", found, f"{how}, or lower runtime.max_live_workers")
        return Finding("open files", "good", found)

    return look


def backlog_for(clients: int) -> Callable[[], Finding]:
    """Connections that may wait to be accepted when all clients come at once."""

    def look() -> Finding:
        path = Path("/proc/sys/net/core/somaxconn")
        if not path.exists():
            return Finding("backlog", "note", "cannot be read on this system")
        allowed, wanted = int(path.read_text()), clients + DESCRIPTORS
        found = f"{allowed} waiting connections allowed, {wanted} asked for"
        if allowed < wanted:
            return Finding(
                "backlog", "note", found, f"sysctl net.core.somaxconn={wanted}; until then some connect a second later"
            )
        return Finding("backlog", "good", found)

    return look


def processes_for(clients: int) -> Callable[[], Finding]:
    """Processes and threads of this user: a worker has five threads."""

    def look() -> Finding:
        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        wanted = 6 * clients + 32
        if soft == resource.RLIM_INFINITY:
            return Finding("processes", "good", "no limit")
        found = f"{soft} processes and threads allowed, about {wanted} needed"
        if wanted > soft:
            return Finding("processes", "fails", found, f"ulimit -u {wanted}, or lower runtime.max_live_workers")
        return Finding("processes", "good", found)

    return look


def loopback() -> Finding:
    """Whether a socket can be bound on 127.0.0.1."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                pass
    except OSError as error:
        return Finding("loopback", "fails", f"no connection over 127.0.0.1: {error}", "bring the interface lo up")
    return Finding("loopback", "good", f"connects (tried port {port})")


def durable() -> Finding:
    """Whether a file can be written durably where runs go, and how long that takes: each charge of a ledger does it."""
    import time

    with tempfile.TemporaryDirectory(dir=".") as folder:
        handle = os.open(Path(folder) / "probe", os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            start = time.perf_counter()
            for _ in range(5):
                os.write(handle, b"x" * 512)
                os.fsync(handle)
            took = (time.perf_counter() - start) / 5
        finally:
            os.close(handle)
    found = f"an fsync in {Path.cwd()} takes {1000 * took:.1f} ms; a task needs about six"
    if took > 0.1:
        return Finding("ledgers", "note", found, "keep run folders on a local disk: --out DIR")
    return Finding("ledgers", "good", found)


def private_files() -> Finding:
    """Whether the file system keeps a key file to its owner."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        path = Path(folder) / "key"
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
        mode = path.stat().st_mode & 0o777
    if mode != 0o600:
        return Finding(
            "key files", "fails", f"a file made with mode 0600 here has {mode:04o}", "use a file system with permissions"
        )
    return Finding("key files", "good", "mode 0600 holds here")


def clock() -> Finding:
    """Whether the kernel's clock is kept in step: only the times in logs and reports need it."""
    try:
        state = Timex()  # all modes zero: a question, no change
        code = ctypes.CDLL(None).adjtimex(ctypes.byref(state))
    except (OSError, AttributeError):
        return Finding("clock", "note", "cannot be asked on this system")
    if code == TIME_ERROR or state.status & STA_UNSYNC:
        mend = "run an NTP client where several hosts take part; the protocol itself does not use the clock"
        return Finding("clock", "note", "not synchronised: times of several hosts in one report may disagree", mend)
    return Finding("clock", "good", "synchronised")


def data_sets() -> Finding:
    """Which data sets are here."""
    from dpcfl_net.data import datasets

    here = [name for name in datasets.NAMES if datasets.is_here(name)]
    away = [name for name in datasets.NAMES if name not in here]
    mend = "dpcfl data fetch NAME, or point DPCFL_DATA at them" if away else ""
    return Finding(
        "data sets", "note" if away else "good", f"here: {', '.join(here)}; not here: {', '.join(away) or 'none'}", mend
    )


def elsewhere() -> Finding:
    """Programs that start workers on other hosts."""
    here = [name for name in PROGRAMS if shutil.which(name)]
    return Finding("other hosts", "good", f"found: {', '.join(here) or 'none'} (of {', '.join(PROGRAMS)})")
