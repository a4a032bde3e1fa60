"""Batch jobs of SLURM: their scripts, and requeueing of a job that was interrupted before its run finished."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType

from dpcfl_net.core.errors import ConfigError, RunFailed

STOP_S = 60  # before the time limit SLURM sends USR1, so that the run stops cleanly; SLURM may send it a minute earlier
SHORTEST_S = 2 * STOP_S  # with a shorter limit the signal may come before the run has begun
TIME = re.compile(r"(\d{1,4}-)?\d{1,6}(:\d{1,2}){0,2}")
MEMORY = re.compile(r"[1-9]\d{0,8}[KMGT]?")
# Set by the programs that write the scripts.
OWN = ("array", "wrap", "parsable", "test-only")


@dataclass(frozen=True)
class Resources:
    """What a batch script requests.

    Attributes:
        nodes: Number of nodes.
        cpus: CPUs per node.
        gpus: GPUs per node.
        time: Time limit in SLURM's format, above 2 minutes.
        memory: Memory per node in SLURM's format; None: the cluster's default.
        partition: Partition; None: the cluster's default.
        account: Account; None: the user's default.
        more: Further options of sbatch as "key=value" or "key"; they replace those above.

    Raises:
        ConfigError: With every option of another form.
    """

    nodes: int = 1
    cpus: int = 1
    gpus: int = 0
    time: str = "1:00:00"
    memory: str | None = None
    partition: str | None = None
    account: str | None = None
    more: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        problems = []
        if not TIME.fullmatch(self.time):
            problems.append(f"--time is {self.time!r}: must be in SLURM's format, for example 2:00:00")
        elif 0 < _seconds(self.time) <= SHORTEST_S and not any(
            item.partition("=")[0] in ("signal", "time") for item in self.more
        ):
            problems.append(
                f"--time is {self.time!r}: must be above 2 minutes, since the run is stopped one to two minutes before the limit"
            )
        if self.memory is not None and not MEMORY.fullmatch(self.memory):
            problems.append(f"--memory is {self.memory!r}: must be a number with K, M, G or T, for example 4G")
        for name, value in (("--partition", self.partition), ("--account", self.account)):
            if value is not None and not re.fullmatch(r"[\w.,@+-]{1,200}", value):
                problems.append(f"{name} is {value!r}: must be a name of letters, digits, dot, comma, dash and underscore")
        for item in self.more:
            key, _, value = item.partition("=")
            if not re.fullmatch(r"[a-z][a-z-]{1,40}", key) or not value.isprintable():
                problems.append(f"--slurm is {item!r}: must be an option of sbatch as key=value or key, for example qos=long")
            elif key in OWN:
                problems.append(f"--slurm is {item!r}: dpcfl sets {key}")
        keys = Counter(item.partition("=")[0] for item in self.more)
        problems += [
            f"--slurm gives {key!r} {count} times: must give an option of sbatch once"
            for key, count in keys.items()
            if count > 1
        ]
        if problems:
            raise ConfigError(problems)

    def given(self) -> list[str]:
        """Return the options of the command line that differ from their defaults."""
        names = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        return [f"--{'slurm' if name == 'more' else name}" for name in names]


def script(command: str, name: str, resources: Resources, **more: str | None) -> str:
    """Return a batch script. SLURM starts the job again after a preemption or the failure of its node.

    Args:
        command: Shell command; it replaces the shell, so that it receives the signals of the job.
        name: Name of the job in SLURM.
        resources: What the script requests.
        more: Further options of sbatch; None: the option takes no value.
    """
    options: dict[str, str | None] = {
        "job-name": re.sub(r"[^A-Za-z0-9._-]", "_", name),
        "nodes": str(resources.nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(resources.cpus),
        **({"gres": f"gpu:{resources.gpus}"} if resources.gpus else {}),
        "time": resources.time,
        **({"mem": resources.memory} if resources.memory else {}),
        **({"partition": resources.partition} if resources.partition else {}),
        **({"account": resources.account} if resources.account else {}),
        "output": "dpcfl-%j.log",
        "open-mode": "append",  # a job that starts again continues its log
        "requeue": None,
        "signal": f"B:USR1@{STOP_S}",
        **more,
    }
    for item in resources.more:
        key, equals, value = item.partition("=")
        options[key] = value if equals else None
    lines = [f"#SBATCH --{key}" + ("" if value is None else f"={_quoted(value)}") for key, value in options.items()]
    # USR1 may come before the command handles it, as while it loads its libraries: it would end it without a word.
    return "\n".join(["#!/bin/bash", *lines, "", "set -eu", "trap '' USR1", f"exec {command}", ""])


def _seconds(time: str) -> int:
    """Convert a time limit to seconds: minutes, minutes:seconds, hours:minutes:seconds, or DAYS-hours:minutes:seconds; 0: no limit."""
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    unit = 3600 if dash or len(parts) == 3 else 60
    return 86_400 * int(days or 0) + sum(part * unit // 60**place for place, part in enumerate(parts))


def job_id() -> str:
    """Return the id of the batch job that this process belongs to.

    Raises:
        ConfigError: Outside of a batch job.
    """
    if not re.fullmatch(r"\d{1,18}", os.environ.get("SLURM_JOB_ID", "")):
        raise ConfigError("--requeue works inside a batch job of SLURM: write its script with --sbatch FILE")
    return os.environ["SLURM_JOB_ID"]


def restarts() -> int:
    """Return how often SLURM has started this job again."""
    text = os.environ.get("SLURM_RESTART_COUNT", "0")
    return int(text) if text.isascii() and text.isdigit() else 0


class TimeLimit:
    """Notes USR1, the signal before the time limit, and interrupts this process with TERM.

    Attributes:
        reached: True after the signal.
    """

    def __init__(self) -> None:
        self.reached = False
        signal.signal(signal.SIGUSR1, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.reached = True
        os.kill(os.getpid(), signal.SIGTERM)


def requeue(job: str, limit: TimeLimit, *, progress: bool) -> None:
    """Put this job back into the queue after its run was interrupted, unless SLURM has already decided about it, and say so.

    After a preemption SLURM requeues the job itself, and a cancelled job must not return.

    Args:
        job: Id of the job.
        limit: Tells whether the time limit interrupted the run.
        progress: True if a round was finished since this job started.

    Raises:
        RunFailed: If the time limit is too short for a round, or if SLURM refuses.
    """
    if limit.reached and not progress:
        raise RunFailed("no round finished within the time limit of this job: raise --time")
    name, state = _name_and_state(job)
    if state != "RUNNING":
        print(f"SLURM has ended job {name} (state {state}): it decides whether the job starts again", flush=True)
        return
    print(f"requeueing job {name}: the run resumes when SLURM starts it again", flush=True)  # SLURM may end this process next
    _slurm("scontrol", "requeue", name)


def _name_and_state(job: str) -> tuple[str, str]:
    """Return the name of a job, ARRAY_TASK for a task of an array, and its state.

    The last task of an array has the id of the array. With that id, squeue lists all tasks and scontrol requeues all of them.
    """
    rows = [line.split() for line in _slurm("squeue", "--noheader", "--jobs", job, "--format", "%A %i %T").splitlines()]
    return next(((row[1], row[2]) for row in rows if row[:1] == [job]), (job, "unknown"))


def _slurm(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except FileNotFoundError:
        raise RunFailed(f"{command[0]} is not on the PATH of this job: it was not requeued") from None
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{command[0]} did not answer: the job was not requeued") from None
    if done.returncode:
        raise RunFailed(f"{shlex.join(command)} failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


def submit(path: Path) -> str:
    """Submit a batch script.

    Args:
        path: The script.

    Returns:
        Id of the job.

    Raises:
        ConfigError: If sbatch is missing or refuses the script.
        RunFailed: If sbatch does not answer.
    """
    try:
        done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=False, timeout=120)
    except FileNotFoundError:
        raise ConfigError("--on slurm needs sbatch on the PATH of this machine") from None
    except subprocess.TimeoutExpired:
        raise RunFailed("sbatch did not answer within 120 s") from None
    if done.returncode:
        raise ConfigError(f"sbatch refused {path}: {' '.join(done.stderr.split()) or done.returncode}")
    return done.stdout.strip().partition(";")[0]


def _quoted(value: str) -> str:
    """Quote a value for sbatch, which takes a backslash for an escape inside quotes, too."""
    if not re.search(r"[\s'\"#\\]", value):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
