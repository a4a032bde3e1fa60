"""Random combinations of settings: one process, a process for each client and a run that was killed give the same bits, and verify holds.

Each algorithm and number draw one valid configuration, which a failure shows.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import time

import pytest
from conftest import DPCFL, ROOT, assert_nothing_left, dpcfl, only_run, write_config
from safetensors.numpy import load_file

import dpcfl_net
from dpcfl_net.core import runlog
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.run_folder import RunFolder

pytestmark = pytest.mark.slow

ROUNDS = 4
SEEDED = {"noise": "seeded", "noise_seed": "5eed" * 16}
CHAINED = ("job", "owner", "id", "prev")  # of a ledger's line: what follows from the connection keys, new in each run
SAMPLE_LEVEL = {
    "mr-mtl": {"lam": 0.5}, "local": {}, "global": {}, "oracle": {}, "robust-hdp": {}, "dpmm-cfl": {}, "dp-ifca": {"clusters": 2},
    "km-cdpfl": {"clusters": 2}, "f-cdpfl": {"clusters": 2, "select": "exponential"}, "r-dpcfl": {"clusters": 2},
    "rc-dpfl": {"clusters": "auto"},
}  # fmt: skip
CLIENT_LEVEL = {
    "dp-fedavg": {"sampling_rate": 0.5}, "dp-fedprox": {"sampling_rate": 0.5}, "dp-fedper": {"sampling_rate": 0.5},
    "rr-cluster": {"clusters": 2, "min_cluster_size": 0, "guarantee": "expected", "sampling_rate": 1.0},
}  # fmt: skip
ALGORITHMS = SAMPLE_LEVEL | CLIENT_LEVEL


def settings(name: str, draw: random.Random) -> dict:
    """One valid configuration of an algorithm."""
    by_client = name in CLIENT_LEVEL
    found = {
        "seed": draw.randrange(1000), "rounds": ROUNDS, "model": {"name": "digits-cnn" if name == "dp-fedper" else "linear"},
        "data": {
            "dataset": "digits", "clients": draw.choice([[2, 2], [1, 3], [4]]), "train_per_client": 30, "test_per_client": 10,
            "shift": draw.choice(["rotation", "label-flip", "noise"]),
        },
        "local": {"batch_size": draw.choice([1, 8, 15]), "lr": 0.2, "clip": draw.choice([0.1, 1.0])},
        "privacy": {"epsilon": draw.choice([1.0, 20.0]), "delta": 1e-4, **SEEDED},
        "algorithm": {"name": name, **ALGORITHMS[name]},
        "runtime": {"durable": draw.random() < 0.5},
        "output": {"keep_checkpoints": 100, "evaluate_every": draw.choice([1, 1, 3])},
    }  # fmt: skip
    if by_client:
        found["privacy"] |= {"unit": "client", "trust": "trusted-server", "delta": 0.01}
    else:
        changes = [
            {"privacy": {"adjacency": "replace-one"}}, {"local": {"epochs": 2}}, {"local": {"sampling": "allocation"}},
            {"privacy": {"epsilon_by_client": {"0": 2.0}}}, {"communication": {"down": "float16"}},
            {"communication": {"up": "int8"}}, {"data": {"sizes": {"law": "zipf", "spread": 0.3, "smallest": 15}}},
            {"availability": {"clients": {"0": [[1, 1], [3, None]]}}},
        ]  # fmt: skip
        for change in draw.sample(changes, 2):
            for section, values in change.items():
                found[section] = {**found.get(section, {}), **values}
    return found


def state(folder) -> dict[str, str]:
    """Return hashes of a run's models, its charges and its accuracies."""
    files, found = RunFolder(folder), {}
    for path in sorted(files.checkpoints.rglob("*.safetensors")):
        arrays = sorted(load_file(path).items())
        found[str(path.relative_to(folder))] = hashlib.sha256(b"".join(k.encode() + a.tobytes() for k, a in arrays)).hexdigest()
    for path in sorted(folder.glob("ledgers/*/ledger.jsonl")):
        charges = [
            {k: v for k, v in json.loads(line).items() if k not in CHAINED} for line in path.read_text().splitlines()[1:]
        ]
        if charges:  # a client that no round has drawn has a ledger only if it has a process
            found[path.parent.name] = json.dumps(charges, sort_keys=True)
    for line in runlog.read(files.metrics):
        if "accuracy_by_client" in line:
            found[f"accuracy {line['round']}"] = json.dumps(line["accuracy_by_client"])
    return found


def killed(folder, document: dict, draw: random.Random):
    """A run whose processes were all killed once a random round had its checkpoint, or a little later."""
    out = folder / "runs"
    process = subprocess.Popen(
        [*DPCFL, "run", str(write_config(folder, **document)), "--out", str(out)],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    last, deadline = draw.randrange(1, ROUNDS), time.monotonic() + 90
    while process.poll() is None and not [*out.glob(f"*/checkpoints/round_{last:05d}")]:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(draw.random() * 0.1)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    found = only_run(out)
    assert_nothing_left(found)
    return found


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("name", ALGORITHMS)
def test_random_settings_give_the_same_bits_everywhere(name, number, tmp_path):
    draw = random.Random(f"{name} {number}")
    document = settings(name, draw)
    try:
        dpcfl_net.load({"name": "random", **document})
    except ConfigError as error:
        pytest.fail(f"the test draws an invalid configuration: {error}\n{document}")
    document["output"]["transcript"] = "off"
    one = state(dpcfl_net.run({"name": "random", **document}, tmp_path / "one", "in-process", progress=False).path)
    document["output"]["transcript"] = "headers"
    many = dpcfl_net.run({"name": "random", **document}, tmp_path / "many", "network", progress=False).path
    again = killed(tmp_path / "killed", document, draw)
    assert dpcfl("run", "--resume", again).returncode == 0
    assert state(many) == one, document
    lost = one.items() - state(again).items()
    assert state(again).items() <= one.items(), document
    # kill -9 may lose the last lines of the user's files.
    assert all(key.startswith("accuracy") for key, _ in lost), document
    for folder in (many, again):
        checked = dpcfl("verify", folder)
        assert checked.returncode == 0, (document, checked.stdout)
