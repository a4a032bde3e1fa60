"""Every file of an interrupted run cut, changed in one bit or missing, and a full disk: the run resumes with equal bits, or gives the reason why not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from chaos_runs import ROUNDS, TINY
from conftest import DPCFL, ROOT, assert_nothing_left, dpcfl, write_config
from journals import cut_debit
from run_results import last_models

from dpcfl_net.privacy.ledger.chain import read_ledger
from dpcfl_net.privacy.ledger.ledger import Ledger
from dpcfl_net.runtime.checkpoint import Checkpoints


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-40] if len(data) > 40 else data[: len(data) // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[len(data) // 2] ^= 4
    path.write_bytes(data)


def remove(path: Path) -> None:
    path.unlink()


DAMAGES = (cut, flip, remove)
# What of the run cannot be made again: file, what the message names, exit codes. Everything else must not matter.
NEEDED = [
    ("config.yaml", "config.yaml", {2}),
    ("protocol.json", "protocol.json", {2, 3}),
    ("protocol.json.sig", "protocol.json", {2, 3}),
    ("roster.jsonl", "roster.jsonl", {2, 3}),
    ("experiment.json", "experiment.json", {2, 3}),
    ("experiment.json.sig", "experiment.json", {2, 3}),
    ("operator.pub", "operator", {2, 3}),
    ("keys/client_0000/client_0000.public", "client 0", {2, 3}),
    ("keys/client_0000/client_0000.secret", "client 0", {2, 3}),
    ("keys/coordinator/coordinator.public", "coordinator", {2, 3}),
    ("keys/coordinator/coordinator.secret", "", {2, 3}),
    ("keys/observer/observer.secret", "observer", {2, 3}),
    ("ledgers/client_0000/ledger.jsonl", "ledger", {3}),
    ("ledgers/client_0000/journal", "ledger", {3}),
    ("transcript.msgpack", "transcript", {3}),
]
# A damaged one of these is made again, or passed over and said.
SPARE = [
    "run.json", "metrics.jsonl", "clusters.jsonl", "messages.jsonl", "spans.jsonl", "warnings.jsonl", "first_round.npz", ".lock",
    "addresses/coordinator", "logs/coordinator.log", "keys/operator/operator.secret",
    "checkpoints/round_00003/state.msgpack", "checkpoints/round_00003/cluster_1.safetensors", "checkpoints/round_00003/sha256",
]  # fmt: skip
QUICK = {("metrics.jsonl", cut), ("checkpoints/round_00003/cluster_1.safetensors", flip)}
QUICK_NEEDED = {("ledgers/client_0000/ledger.jsonl", flip), ("ledgers/client_0000/journal", cut), ("config.yaml", cut)}


# In each process of a run: kills all of them when the checkpoint of round 4 is about to be written.
KILL = """
import os, signal

def mkdir(path, *rest, real=os.mkdir, **more):
    if str(path).endswith("checkpoints/.round_00004.part"):
        os.killpg(0, signal.SIGKILL)
    real(path, *rest, **more)

os.mkdir = mkdir
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, bytes]:
    """A run that was killed at the end of round 4, its newest checkpoint that of round 3; and the models of an undisturbed one."""
    out = tmp_path_factory.mktemp("faults")
    settings = write_config(out / "c", **TINY)
    done = dpcfl("run", settings, "--out", out / "whole")
    assert done.returncode == 0, done.stderr
    (whole,) = (out / "whole").iterdir()
    (out / "sitecustomize.py").write_text(KILL)
    killed = subprocess.run(
        [*DPCFL, "run", str(settings), "--out", str(out / "part")], cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(out), os.environ.get("PYTHONPATH", "")])}, check=False, timeout=200,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL
    (part,) = (out / "part").iterdir()
    assert_nothing_left(part)
    assert Checkpoints(part / "checkpoints").rounds() == [2, 3]
    return part, last_models(whole)


def damaged(runs, tmp_path: Path, name: str, damage) -> Path:
    folder = tmp_path / "run"
    shutil.copytree(runs[0], folder)
    if not (folder / name).exists():
        pytest.skip(f"this run was killed before there was a {name}")
    damage(folder / name)
    return folder


def marked(cases, quick):
    return [
        pytest.param(
            *case, damage, marks=() if (case[0], damage) in quick else pytest.mark.slow, id=f"{case[0]}-{damage.__name__}"
        )
        for case in cases
        for damage in DAMAGES
    ]


@pytest.mark.parametrize(("name", "damage"), marked([(name,) for name in SPARE], QUICK))
def test_a_run_goes_on_with_equal_bits(runs, tmp_path, name, damage):
    folder = damaged(runs, tmp_path, name, damage)
    done = dpcfl("run", "--resume", folder)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "Traceback" not in done.stderr + done.stdout
    assert last_models(folder) == runs[1]
    if name.startswith("checkpoints"):
        assert "round_00003 cannot be read" in (folder / "warnings.jsonl").read_text()
    assert json.loads((folder / "run.json").read_text())["state"] == "finished"
    again = dpcfl("report", folder)
    assert (again.returncode, again.stderr) == (0, "")


@pytest.mark.parametrize(("name", "said", "codes", "damage"), marked(NEEDED, QUICK_NEEDED))
def test_what_cannot_go_on_says_why_and_changes_nothing(runs, tmp_path, name, said, codes, damage):
    folder = damaged(runs, tmp_path, name, damage)
    before = {path: path.read_bytes() for part in ("ledgers", "checkpoints", "keys") for path in (folder / part).rglob("*.*")}
    done = dpcfl("run", "--resume", folder)
    words = done.stderr + done.stdout
    assert "Traceback" not in words, words
    if done.returncode == 0:  # a bit that is never read, or a cut that removes only the last record of a transcript
        assert last_models(folder) == runs[1]
        return
    assert done.returncode in codes, words
    assert said in done.stderr, words
    assert_nothing_left(folder)
    for path, content in before.items():
        assert path.read_bytes().startswith(content), f"{path} was changed"
    assert (folder / "checkpoints/round_00003").is_dir()


def truncated(folder: Path) -> None:
    """Leave what a crash in the middle of a debit leaves."""
    where = folder / "ledgers/client_0001"
    header, *_, last = read_ledger(where)

    def charge() -> None:
        with Ledger(where, owner=header.owner) as ledger:
            ledger.debit(
                job=last.job, request="5" * 64, round=last.round + 1, kind="train", slots=last.slots, events=last.events
            )

    cut_debit(where, charge)


def test_a_torn_line_in_one_ledger_costs_one_answer_and_never_the_run(runs, tmp_path):
    """With a quorum of 1: the lost answer is charged and final, and counts; asked again and again it would stay lost."""
    folder = tmp_path / "run"
    shutil.copytree(runs[0], folder)
    truncated(folder)
    done = dpcfl("run", "--resume", folder)
    assert done.returncode == 0, done.stderr + done.stdout
    warned = (folder / "warnings.jsonl").read_text()
    assert "client 1 answered round" in warned
    assert "lost" in warned
    assert len([line for line in read_ledger(folder / "ledgers/client_0001") if line.type in ("debit", "closed")]) == ROUNDS
    assert dpcfl("verify", folder).returncode == 0


@pytest.mark.slow
def test_a_quorum_that_cannot_be_reached_names_its_setting(runs, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(runs[0], folder)
    flip(folder / "ledgers/client_0000/ledger.jsonl")
    done = dpcfl("run", "--resume", folder)
    assert (done.returncode, "runtime.quorum" in done.stderr) == (3, True), done.stderr
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("quorum: 1.0", "quorum: 0.6"))
    done = dpcfl("run", "--resume", folder)
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "run.json").read_text())["state"] == "finished"


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system of one's own needs root")
@pytest.mark.parametrize(
    "room",
    [
        pytest.param(300, marks=pytest.mark.slow),
        pytest.param(1200, marks=pytest.mark.slow),
        pytest.param(1800, marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_says_so_and_the_run_goes_on_when_there_is_room(tmp_path, room):
    """A file system of so many KiB: full while the run starts, in the middle, at its end. With more space it resumes."""
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room}k", "tmpfs", str(place)], check=False).returncode:
        pytest.skip("this machine mounts no file system of one's own")
    try:
        settings = {**TINY, "output": {"transcript": "full"}, "model": {"name": "digits-cnn"}}
        done = dpcfl("run", write_config(tmp_path / "c", **settings), "--out", place / "runs")
        words = done.stdout + done.stderr
        assert done.returncode in (2, 4), words
        assert "Traceback" not in words, words
        assert "o space left on" in words, words
        subprocess.run(["mount", "-o", "remount,size=64m", str(place)], check=True)
        (folder,) = (place / "runs").iterdir() if (place / "runs").exists() and any((place / "runs").iterdir()) else (None,)
        if folder is not None:
            assert_nothing_left(folder)
            again = dpcfl("run", "--resume", folder)
            assert again.returncode == 0, again.stderr + again.stdout
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
