"""What an undisturbed run pays for surviving faults, counted by task and round: writes, syncs, messages, wakes.

The figures of docs/explanation/performance.md: pytest tests/launch/test_cost_of_reliability.py -m slow -rP
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from chaos_runs import TINY
from conftest import DPCFL, ROOT, only_run, write_config

from dpcfl_net.core import runlog
from dpcfl_net.launch.chaos import running_processes
from dpcfl_net.transport import transcript
from dpcfl_net.transport.messages import decode

FIRST, LAST = 10, 50  # counted: what happens after round FIRST until the end of round LAST
CLIENTS = 4
SYNCS_PER_TASK, SYNCS_PER_ROUND = 2, 5
LINES_PER_SYNC = 16  # of ledger.jsonl
COSTED = {
    **TINY, "data": {**TINY["data"], "clients": [2, 2]}, "rounds": LAST + 5, "output": {"transcript": "headers"},
    "algorithm": {"name": "global"},
}  # fmt: skip
TRACED = "trace=fsync,fdatasync,write,writev,pwrite64,pwritev,pwritev2"
CALL = re.compile(r"^([0-9.]+) (\w+)\([0-9]+<([^>]*)>.* = ([0-9]+)$")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="strace and /proc are Linux")]


def window(folder: Path) -> tuple[float, float]:
    """Times of the ends of rounds FIRST and LAST."""
    ends = {line["round"]: line["time"] for line in runlog.read(folder / "metrics.jsonl") if "answered" in line}
    return ends[FIRST], ends[LAST]


def while_it_runs(command: subprocess.Popen, out: Path, look: Callable[[Path], None]) -> Path:
    """Call `look` with the run folder again and again until the command ends."""
    while command.poll() is None:
        for folder in out.glob("*"):
            if (folder / "metrics.jsonl").exists():
                look(folder)
        time.sleep(0.1)
    assert command.returncode == 0, command.communicate()[0]
    return only_run(out)


def start(*before: object, out: Path) -> subprocess.Popen:
    """Start the run, below another program if given."""
    config = write_config(out / "c", **COSTED)
    return subprocess.Popen(
        [*map(str, before), *DPCFL, "run", str(config), "--out", str(out / "runs")],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_syncs_and_writes_by_process_and_file(tmp_path):
    traces = tmp_path / "traces"
    traces.mkdir()
    titles: dict[int, str] = {}

    def look(folder: Path) -> None:
        for title, processes in running_processes(folder / "logs").items():
            titles.update({process.pid: title for process in processes})

    strace = ("strace", "-ff", "--seccomp-bpf", "-ttt", "-y", "-s", "0", "-e", TRACED, "-o", traces / "t")
    folder = while_it_runs(start(*strace, out=tmp_path), tmp_path / "runs", look)
    began, ended = window(folder)
    calls: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for file in traces.iterdir():
        pid = int(file.suffix[1:])
        group = titles.get(pid) or titles.get(_leader(pid, titles), "launcher and parents")
        for line in file.read_text().splitlines():
            match = CALL.match(line)
            if match and began < float(match[1]) <= ended and str(folder) in match[3]:
                name = re.sub(r"[0-9a-f_]*\d+[0-9a-f_]*", "N", str(Path(match[3]).relative_to(folder)))
                # The thread that flushes a checkpoint is younger than the clients, which hides whose it is.
                who = "coordinator" if name.startswith("checkpoints") else re.sub(r"\d+", "N", group)
                found = calls[who, name]
                found["sync" if "sync" in match[2] else "write"] += 1
                found["bytes"] += 0 if "sync" in match[2] else int(match[4])
    rounds = LAST - FIRST
    for (who, name), found in sorted(calls.items()):
        print(
            f"| {who} | {name} | {found['sync'] / rounds:.2f} | {found['write'] / rounds:.2f} | {found['bytes'] / rounds:.0f} |"
        )
    lines = calls.pop(("client N", "ledgers/clientN/ledger.jsonl"))["sync"]
    assert rounds // LINES_PER_SYNC <= lines / CLIENTS <= rounds // LINES_PER_SYNC + 1
    syncs = {who: sum(found["sync"] for (name, _), found in calls.items() if name == who) / rounds for who, _ in calls}
    assert syncs.pop("launcher and parents", 0) == 0
    assert syncs == {
        "client N": SYNCS_PER_TASK * CLIENTS,
        "coordinator": pytest.approx(SYNCS_PER_ROUND, abs=1 / 8),
        "observer": 0,
    }  # the flush of a checkpoint may end in the next round


def _leader(pid: int, titles: dict[int, str]) -> int:
    """The process that a thread most likely belongs to: the last one that started before it."""
    return max((other for other in titles if other < pid), default=0)


def test_messages_and_wakes(tmp_path):
    counted: dict[int, dict[str, int]] = {}

    def look(folder: Path) -> None:
        done = max((line["round"] for line in runlog.read(folder / "metrics.jsonl") if "answered" in line), default=0)
        if done >= FIRST and done not in counted:
            running = running_processes(folder / "logs")
            counted[done] = {title: sum(map(switches, found)) for title, (*found,) in running.items()}

    def switches(process) -> int:
        found = 0
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            # A thread may end meanwhile, as that which flushes a checkpoint.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += int(re.search(r"^voluntary_ctxt_switches:\s*(\d+)", (task / "status").read_text(), re.MULTILINE)[1])
        return found

    folder = while_it_runs(start(out=tmp_path), tmp_path / "runs", look)
    first, last = min(counted), max(done for done in counted if done < COSTED["rounds"])
    for title in ("coordinator", "client 0", "observer"):
        print(f"| wakes of the {title} per round | {(counted[last][title] - counted[first][title]) / (last - first):.1f} |")
    began, ended = window(folder)
    kinds: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for record in transcript.read(folder / "transcript.msgpack"):
        if began < record.time <= ended:
            header = decode(record.header)
            name = f"{header.kind} {record.direction}"
            kinds[name] += 1
            sizes[name] += len(record.header)
            sizes["payload " + record.direction] += header.size if header.kind in ("TASK", "RESULT") else 0
    tasks = (LAST - FIRST) * CLIENTS
    for name in sorted({*kinds, *sizes}):
        print(f"| {name} per task | {kinds[name] / tasks:.2f} | {sizes[name] / tasks:.0f} |")
    counts = {name: kinds[name] for name in ("TASK down", "RESULT up", "ACK down", "CHUNK up", "CHUNK down")}
    assert set(counts.values()) == {tasks}
    assert kinds["ACK up"] <= tasks  # clients acknowledge only tasks above 50 ms; the answer to a shorter one says it
