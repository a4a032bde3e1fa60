"""Stand-ins for SLURM's programs, which run batch scripts on this machine: sbatch, squeue, scontrol and srun.

`install(folder)` puts them into a folder for the PATH; their state is in the same folder. A job that `scontrol requeue` names runs
again after it has ended, with SLURM_RESTART_COUNT. As in SLURM, the last task of an array has the id of the array, which as a name
stands for all tasks.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PROGRAMS = ("sbatch", "squeue", "scontrol", "srun")
CPUS = 2
JOB = 100  # id of the only job


def install(folder: Path) -> dict[str, str]:
    """Write the programs; return the environment in which they are found."""
    folder.mkdir(parents=True)
    for name in PROGRAMS:
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, __file__, str(folder), name])} "$@"\n')
        (folder / name).chmod(0o755)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}


def options_of(script: Path) -> dict[str, str]:
    """Read the #SBATCH lines of a script."""
    lines = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    words = [word.removeprefix("--").partition("=") for line in lines for word in shlex.split(line)[1:]]
    return {key: value for key, _, value in words}


def tasks_of(text: str) -> tuple[list[int], int]:
    """Expand "0-3,7%2" to the tasks and how many run at once."""
    spans, _, limit = text.partition("%")
    pairs = [(span.partition("-")[0], span.rpartition("-")[2]) for span in spans.split(",")]
    return [task for first, last in pairs for task in range(int(first), int(last) + 1)], int(limit or 2)


def sbatch(folder: Path, arguments: list[str]) -> None:
    """Print the id of the job and run it in the background."""
    script = Path(arguments[-1])
    subprocess.Popen(
        [sys.executable, __file__, str(folder), "job", str(script)], start_new_session=True, stdin=subprocess.DEVNULL,
        stdout=(folder / "job.log").open("a"), stderr=subprocess.STDOUT,
    )  # fmt: skip
    print(JOB if "--parsable" in arguments else f"Submitted batch job {JOB}")


def job(folder: Path, arguments: list[str]) -> None:
    """Run all tasks of a script, then note that it is done."""
    script = Path(arguments[0])
    options = options_of(script)
    if "array" not in options:
        run_task(folder, script, options, JOB, None)
    else:
        tasks, at_once = tasks_of(options["array"])
        with ThreadPoolExecutor(at_once) as pool:
            numbers = [*range(JOB + 1, JOB + len(tasks)), JOB]
            list(pool.map(lambda task, number: run_task(folder, script, options, number, task), tasks, numbers))
    (folder / "done").touch()


def run_task(folder: Path, script: Path, options: dict[str, str], number: int, task: int | None) -> None:
    """Run a task until it ends without having been requeued."""
    environment = os.environ | {
        "SLURM_JOB_ID": str(number), "SLURM_CPUS_PER_TASK": options["cpus-per-task"],
        "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_CPUS_PER_NODE": f"{CPUS}(x2)", "SLURMD_NODENAME": "localhost",
    }  # fmt: skip
    name = str(number)
    if task is not None:
        environment["SLURM_ARRAY_TASK_ID"], name = str(task), f"{JOB}_{task}"
    output = re.sub("%[aj]", lambda found: str(task if found[0] == "%a" else number), options["output"])
    restarts = 0
    while True:
        state = folder / f"{name}.state"
        state.write_text(f"{number} {name} RUNNING")
        with open(output, "a") as log:
            process = subprocess.Popen(["bash", str(script)], env=environment, stdout=log, stderr=log, cwd=options.get("chdir"))
            (folder / f"{name}.pid").write_text(str(process.pid))
            process.wait()
        if not (folder / f"{name}.requeue").exists():
            state.write_text(f"{number} {name} {'COMPLETED' if process.returncode == 0 else 'FAILED'}")
            return
        (folder / f"{name}.requeue").unlink()
        restarts += 1
        environment["SLURM_RESTART_COUNT"] = str(restarts)


def squeue(folder: Path, arguments: list[str]) -> None:
    """Print number, name and state of the jobs that --jobs names."""
    assert arguments[arguments.index("--format") + 1] == "%A %i %T"
    for path in named(folder, arguments[arguments.index("--jobs") + 1]):
        print(path.read_text())


def named(folder: Path, job: str) -> list[Path]:
    """State of each job with this number or name, and of each task of the array with this name."""
    paths = sorted(folder.glob("*.state"))
    return [path for path in paths if job in (path.read_text().split()[0], path.stem, path.stem.partition("_")[0])]


def scontrol(folder: Path, arguments: list[str]) -> None:
    """Requeue a job, or expand the list of nodes."""
    if arguments[0] == "requeue":
        for path in named(folder, arguments[1]):
            path.with_suffix(".requeue").touch()
    else:
        print("n1\nn2")


def srun(folder: Path, arguments: list[str]) -> None:
    """Replace this process by the command after the options."""
    command = [*arguments]
    while command[0].startswith("--"):
        command.pop(0)
    os.execvp(command[0], command)


if __name__ == "__main__":
    {"sbatch": sbatch, "job": job, "squeue": squeue, "scontrol": scontrol, "srun": srun}[sys.argv[2]](
        Path(sys.argv[1]), sys.argv[3:]
    )
