"""GPUs of this machine as nvidia-smi lists them; CUDA is not started.

nvidia-smi instead of NVML (pynvml): a hanging driver blocks a child process, which has a time-out, and not the launcher.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass

from dpcfl_net.core.errors import ConfigError, RunFailed
from dpcfl_net.core.files import reason

VISIBLE = "CUDA_VISIBLE_DEVICES"
_PATIENCE_S = 20
_MOST_SAID = 400  # characters of its message
_NONE_HERE = (6, 9, 12)  # its exit codes where it finds no GPU, no driver is loaded, or the driver's library is missing
_SLICE = re.compile(r"MIG (\S+)\s.*\(UUID: (MIG-[^)]+)\)")


@dataclass(frozen=True)
class Gpu:
    """A GPU or a MIG slice.

    Attributes:
        uuid: Its UUID.
        name: Product name.
        total: Memory in bytes; 0 if unknown, as for slices.
        free: Free memory in bytes; 0 if unknown.
    """

    uuid: str
    name: str
    total: int
    free: int


def visible_gpus() -> list[Gpu]:
    """List the GPUs that this process may assign to workers, in CUDA's order.

    CUDA_VISIBLE_DEVICES is interpreted as by CUDA: numbers, UUIDs or their prefixes, up to the first entry without a GPU; an
    entry named twice gives an empty list.

    Returns:
        The GPUs; empty without nvidia-smi or a driver.

    Raises:
        ConfigError: If the numbers in CUDA_VISIBLE_DEVICES are ambiguous.
        RunFailed: If nvidia-smi does not answer, or fails although there is a driver.
    """
    gpus = _listed()
    allowed = os.environ.get(VISIBLE)
    if allowed is None or not gpus:
        return gpus
    entries = [entry.strip() for entry in allowed.split(",")]
    kinds = {gpu.name for gpu in gpus}
    if any(map(str.isdecimal, entries)) and len(kinds) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise ConfigError(
            f"{VISIBLE} is {allowed!r}: CUDA may number GPUs of different kinds ({', '.join(sorted(kinds))}) otherwise than "
            "nvidia-smi does; set CUDA_DEVICE_ORDER=PCI_BUS_ID, or give UUIDs"
        )
    return _allowed(gpus, entries)


def gpu_names() -> list[str]:
    """Return number and name of each GPU of this machine, also of those that this process may not use.

    Raises:
        RunFailed: As `visible_gpus`.
    """
    lines = (_nvidia_smi("-L") or "").splitlines()
    return [line.split(" (UUID")[0] for line in lines if line.startswith("GPU")]


def mig_slices() -> list[Gpu] | None:
    """List the MIG slices of `nvidia-smi -L`; None without nvidia-smi."""
    text = _nvidia_smi("-L")
    return None if text is None else [Gpu(found[2], f"MIG {found[1]}", 0, 0) for found in _SLICE.finditer(text)]


def memory_by_process() -> dict[int, int]:
    """Return GPU memory in bytes by process id, CUDA contexts included; ids are the host's, not those in a container."""
    found: dict[int, int] = {}
    for pid, used in _table("--query-compute-apps=pid,used_memory"):
        found[int(pid)] = found.get(int(pid), 0) + _bytes(used)
    return found


def _listed() -> list[Gpu]:
    rows = _table("--query-gpu=uuid,memory.total,memory.free,name")
    return [Gpu(uuid, name, _bytes(total), _bytes(free)) for uuid, total, free, name in rows]


def _allowed(gpus: list[Gpu], entries: list[str]) -> list[Gpu]:
    found: list[Gpu] = []
    for entry in entries:
        gpu = _entry(gpus, entry)
        if gpu is None:
            break
        if gpu in found:
            return []
        found.append(gpu)
    return found


def _entry(gpus: list[Gpu], entry: str) -> Gpu | None:
    if entry.isdecimal():
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    if entry.startswith("MIG-"):
        return named(mig_slices() or [], entry)
    return named(gpus, entry) if entry.startswith("GPU-") else None


def named(gpus: list[Gpu], uuid: str) -> Gpu | None:
    """Return the one GPU whose UUID starts with `uuid`; None if there is none or more than one."""
    found = [gpu for gpu in gpus if gpu.uuid.startswith(uuid)]
    return found[0] if len(found) == 1 else None


def _bytes(mebibytes: str) -> int:
    return int(mebibytes) << 20 if mebibytes.isdecimal() else 0


def _table(query: str) -> list[list[str]]:
    """Rows of a CSV query; the last column may hold commas."""
    columns = query.partition("=")[2].count(",")
    text = _nvidia_smi(query, "--format=csv,noheader,nounits") or ""
    lines = [[cell.strip() for cell in line.split(",", columns)] for line in text.splitlines()]
    return [cells for cells in lines if len(cells) == columns + 1]


def _nvidia_smi(*arguments: str) -> str | None:
    """Output of nvidia-smi; empty where there is no GPU or no driver; None if it is not installed.

    Any other failure, as of a driver that waits for a restart or of one lost GPU, is an error: `auto` would take the CPU in silence.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = f"{program} {' '.join(arguments)}"
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{command} gave no answer within {_PATIENCE_S} s") from None
    except OSError as error:
        raise RunFailed(f"{program} cannot be run: {reason(error)}") from None
    if done.returncode and done.returncode not in _NONE_HERE:
        said = "; ".join(line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip())
        raise RunFailed(
            f"{command} failed with exit code {done.returncode}: {said[:_MOST_SAID] or 'no message'}; runtime.device=cpu needs no GPU"
        )
    return "" if done.returncode else done.stdout
