"""Golden runs: small seeded runs whose jobs, releases, ledgers, checkpoints and models are recorded as hashes, bit for bit.

`pytest tests/test_golden.py -m slow --record-golden` records them again; a change of bits needs a reason in its commit.
Bits depend on the width of the processor's vectors (AVX2, AVX-512): products of the model, and logarithm and sine of the noise.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from conftest import DPCFL, ROOT, assert_nothing_left, only_run
from safetensors.numpy import load_file

from dpcfl_net.core.tensors import buffers
from dpcfl_net.transport import transcript

pytestmark = pytest.mark.slow

RECORDED = Path(__file__).parent / "golden" / "runs.json"
# Instructions that every x86-64 processor has: linear algebra computes the same bits on all of them.
PORTABLE = {
    "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE", "OPENBLAS_CORETYPE": "Prescott",
    "NPY_DISABLE_CPU_FEATURES": " ".join(np.show_config(mode="dicts").get("SIMD Extensions", {}).get("found", [])),
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-AVX512F",
}  # fmt: skip
RANDOM = ("public_key", "coordinator_key", "observer_key")  # connection keys, new for each run
CHAINED = ("job", "owner", "id", "prev")  # of a ledger's line: what follows from those keys
SEEDED = {"noise": "seeded", "noise_seed": "5eed" * 16}
DATA = {"dataset": "digits", "clients": [2, 2, 2], "train_per_client": 200, "test_per_client": 30}
SMALL = {
    "seed": 3, "data": DATA, "model": {"name": "digits-cnn"}, "rounds": 5, "local": {"batch_size": 32, "lr": 0.5},
    "privacy": {"epsilon": 5, "delta": 1e-4, **SEEDED},
}  # fmt: skip
CLIENT_LEVEL = {
    "data": {**DATA, "clients": [4, 4], "train_per_client": 60}, "local": {"batch_size": 20, "lr": 0.2, "clip": 0.5},
    "privacy": {"epsilon": 8, "delta": 1e-2, "unit": "client", "trust": "trusted-server", **SEEDED},
}  # fmt: skip
RR = {"name": "rr-cluster", "clusters": 2, "min_cluster_size": 2, "sampling_rate": 1.0}
CASES: dict[str, dict[str, Any]] = {
    "quickstart": yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text()) | {"rounds": 5, "privacy": SMALL["privacy"]},
    "r-dpcfl-auto": {"algorithm": {"name": "r-dpcfl", "clusters": "auto"}},
    "dp-ifca": {"algorithm": {"name": "dp-ifca", "clusters": 3}},
    "mr-mtl": {"algorithm": {"name": "mr-mtl", "lam": 0.2}},
    "rr-cluster-expected": {**CLIENT_LEVEL, "algorithm": {**RR, "guarantee": "expected"}},
    "rr-cluster-labels-first": {
        **CLIENT_LEVEL, "algorithm": {**RR, "guarantee": "labels-first"},
        "privacy": {**CLIENT_LEVEL["privacy"], "adjacency": "replace-one"},
    },
    "em-fdro-full": {"data": {**DATA, "validation": 0.1}, "algorithm": {"name": "em-fdro", "mode": "full", "clients_per_round": 3}},
}  # fmt: skip
CRASH_AFTER = 2  # rounds


def settings(case: str, **changes: Any) -> dict[str, Any]:
    return {**SMALL, "name": case, **CASES[case], "output": {"keep_checkpoints": 100, "transcript": "full"}, **changes}


def start(folder: Path, document: dict[str, Any]) -> subprocess.Popen:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(document))
    return command("run", folder / "config.yaml", "--out", folder / "runs")


def command(*arguments: object) -> subprocess.Popen:
    return subprocess.Popen(
        [*DPCFL, *map(str, arguments)], cwd=ROOT, env={**os.environ, **PORTABLE}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip


def finished(process: subprocess.Popen) -> None:
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 0, said


def crashed(folder: Path, process: subprocess.Popen) -> None:
    """Kill all processes of the run once round CRASH_AFTER has its checkpoint."""
    deadline = time.monotonic() + 100
    while not [*folder.glob(f"runs/*/checkpoints/round_{CRASH_AFTER:05d}")]:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert_nothing_left(only_run(folder / "runs"))


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def blank(value: Any) -> Any:
    """Without connection keys."""
    if isinstance(value, dict):
        return {key: "" if key in RANDOM else blank(part) for key, part in value.items()}
    return [blank(part) for part in value] if isinstance(value, list) else value


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def hashes(folder: Path) -> dict[str, Any]:
    """What a run's result is made of."""
    models = {}
    for checkpoint in sorted((folder / "checkpoints").iterdir()):
        arrays = [
            np.concatenate([part.ravel() for part in load_file(path).values()])
            for path in sorted(checkpoint.glob("*.safetensors"))
        ]
        models[checkpoint.name] = digest([hashlib.sha256(array.tobytes()).hexdigest() for array in arrays])
    ledgers = {
        path.parent.name: digest([{k: v for k, v in line.items() if k not in CHAINED} for line in lines(path)])
        for path in sorted(folder.glob("ledgers/*/ledger.jsonl"))
    }
    clusters = {line["round"]: line["assignment"] for line in lines(folder / "clusters.jsonl") if line["view"] == "server"}
    # As recorded in format 1, which held the roster: its hash in later formats depends on the connection keys.
    protocol = json.loads((folder / "protocol.json").read_text()) | {"format": 1, "roster": lines(folder / "roster.jsonl")}
    return {
        "protocol": digest(blank(protocol)),
        "experiment": digest(json.loads((folder / "experiment.json").read_text())),
        "models": models, "ledgers": ledgers, "assignments": digest(sorted(clusters.items())),
    }  # fmt: skip


def accuracies(folder: Path) -> dict[int, str]:
    """Hashes of what the observer measured, by round."""
    seen = [line for line in lines(folder / "metrics.jsonl") if line["view"] == "observer"]
    return {line["round"]: digest(line["accuracy_by_client"]) for line in seen}


def releases(folder: Path) -> dict[str, str]:
    """SHA-256 of the payload of every answer that crossed the wire, as recorded when messages stated it; empty without a payload."""
    found = {}
    for record, header, tensors in transcript.messages(folder / "transcript.msgpack"):
        if header.kind == "RESULT":
            found[f"round {header.round}, {record.peer}, {header.task or header.code}"] = (
                hashlib.sha256(b"".join(buffers(tensors))).hexdigest() if tensors else ""
            )
    return dict(sorted(found.items()))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="recorded on x86-64")
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_that_were_recorded(case, tmp_path, request):
    """One process, a process for each client, and those after a crash: all as they were recorded."""
    in_process = {"runtime": {"federation": "in-process"}, "output": {"keep_checkpoints": 100}}
    alone = start(tmp_path / "one", settings(case, **in_process))
    finished(alone)
    finished(start(tmp_path / "many", settings(case)))
    victim = start(tmp_path / "crashed", settings(case))
    crashed(tmp_path / "crashed", victim)
    one, many, again = (only_run(tmp_path / name / "runs") for name in ("one", "many", "crashed"))
    finished(command("run", "--resume", again))
    found = hashes(one) | {"accuracies": digest(sorted(accuracies(one).items())), "releases": digest(releases(many))}
    assert hashes(many) == hashes(again) == hashes(one)
    assert accuracies(many) == accuracies(one)
    # kill -9 may lose the last lines of the user's files; all other lines are equal.
    assert accuracies(again).items() <= accuracies(one).items()
    assert releases(again).items() <= releases(many).items()
    assert len(releases(again)) >= len(releases(many)) / 2
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    if request.config.getoption("--record-golden"):
        recorded[case] = found
        recorded["torch"] = torch.__version__
        RECORDED.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
    if recorded["torch"] != torch.__version__:
        pytest.skip(f"recorded with torch {recorded['torch']}, this is {torch.__version__}")
    assert found == recorded[case]
