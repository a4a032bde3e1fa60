"""What the coordinator's process holds: probed from inside, in a real run, against the fork that it is not."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import assert_nothing_left, dpcfl, only_run, write_config

from dpcfl_net.core.signing import read_operator_key
from dpcfl_net.data.partition import open_client
from dpcfl_net.experiment.job_files import Job, client_slice, read_job

SEED = 7310958224491857
IMAGES = 30  # of each client that are looked for
FOREIGN = (
    "dpcfl_net.data",
    "dpcfl_net.experiment.config",
    "dpcfl_net.experiment.job_files",
    "dpcfl_net.experiment.build",
    "dpcfl_net.experiment.calibration",
    "dpcfl_net.experiment.model_template",
    "dpcfl_net.results.summary",
    "dpcfl_net.launch.placement.preload",
)


@dataclass
class Seen:
    """What one process found in itself, held against the job of the run."""

    facts: dict[str, Any]
    memory: bytes
    job: Job

    @classmethod
    def of(cls, out: Path, job: Job) -> Seen:
        return cls(json.loads((out / "found.json").read_text()), (out / "memory.bin").read_bytes(), job)

    def foreign_modules(self) -> list[str]:
        return [name for name in self.facts["modules"] if name.startswith(FOREIGN)]

    def foreign_objects(self) -> dict[str, int]:
        return {name: count for name, count in self.facts["objects"].items() if name.startswith(FOREIGN)}

    def secrets_and_records(self) -> tuple[list[str], int]:
        """Search memory once: the names of the secrets that lie in it, and the number of training images."""
        secrets, images = self._secrets(), self._images()
        found = found_in(self.memory, [*itertools.chain(*secrets.values()), *images])
        return [name for name, forms in secrets.items() if found & {*forms}], len(found & {*images})

    def _secrets(self) -> dict[str, list[bytes]]:
        """The secrets of the experiment, in any of the forms that they have anywhere."""
        part = self.job.experiment
        return {
            "salt": [part.salt.encode(), bytes.fromhex(part.salt)],
            "seed": number_forms(part.seed),
            "partition seed": number_forms(part.partition_seed),
            "slices": [json.dumps(part.slices, separators=(",", ":")).encode(), np.array(part.slices).tobytes()],
        }

    def _images(self) -> list[bytes]:
        """The clients' first training images, as bytes and as a network's input."""
        images: list[bytes] = []
        for entry in self.job.protocol.roster:
            settings, piece = client_slice(self.job, entry.id, None)
            data = open_client(settings, piece)
            inputs, _ = data.batch(np.arange(IMAGES), IMAGES)
            raw = data._x[data._rows[:IMAGES]]
            for array in (raw, np.rot90(raw, piece.quarter_turns, axes=(2, 3)), inputs.numpy()):
                images += [np.ascontiguousarray(one).tobytes() for one in array]
        return images


def number_forms(value: int) -> list[bytes]:
    """A number as text, as eight bytes, and as the digits of 30 bits that a Python integer holds."""
    digits = b"".join((value >> shift & (1 << 30) - 1).to_bytes(4, "little") for shift in range(0, value.bit_length(), 30))
    return [str(value).encode(), value.to_bytes(8, "little"), digits]


def place(words: np.ndarray) -> np.ndarray:
    """A number of 16 bits for each word of 8 bytes (Fibonacci hashing)."""
    return (words * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(48)


def found_in(memory: bytes, needles: list[bytes]) -> set[bytes]:
    """Which of the needles, 8 bytes or more each, stand in memory: one pass for all, since one for each takes minutes."""
    anchors: dict[int, list[tuple[int, bytes]]] = {}
    for needle in needles:
        at = max(range(len(needle) - 7), key=lambda k: len(set(needle[k : k + 8])))  # its most varied eight bytes
        anchors.setdefault(int.from_bytes(needle[at : at + 8], "little"), []).append((at, needle))
    table = np.zeros(1 << 16, bool)
    table[place(np.array([*anchors], np.uint64))] = True
    found = set()
    for shift in range(8):
        words = np.frombuffer(memory, "<u8", count=(len(memory) - shift) // 8, offset=shift)
        for k in np.flatnonzero(table[place(words)]).tolist():
            for at, needle in anchors.get(int(words[k]), ()):
                start = shift + 8 * k - at
                if memory[start : start + len(needle)] == needle:
                    found.add(needle)
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, Job, Seen]:
    """A real run of eight workers whose server dumps its process, started in an environment that names the data set."""
    out = tmp_path_factory.mktemp("probed")
    settings = write_config(
        out / "c", rounds=2, seed=SEED, privacy={"epsilon": 5, "delta": 1e-4}, model={"name": "linear"},
        algorithm={"name": "dpcfl_net.attacks.server_probe:ServerProbe", "out": str(out / "found")},
    )  # fmt: skip
    done = dpcfl(
        "run", settings, "--out", out / "runs", env={**os.environ, "DPCFL_DATA": str(out), "A_SECRET": "of the launcher"}
    )
    assert done.returncode == 0, done.stderr + done.stdout
    folder = only_run(out / "runs")
    assert_nothing_left(folder)
    job = read_job(folder, read_operator_key(folder / "operator.pub"))
    return folder, job, Seen.of(out / "found", job)


@pytest.fixture(scope="module")
def forked(run, tmp_path_factory) -> Seen:
    """The same look from a process that is forked from the workers' parent, as the coordinator would be with the others."""
    folder, job, _ = run
    out = tmp_path_factory.mktemp("forked")
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from dpcfl_net.launch.placement import parents\n"
        "from dpcfl_net.launch.placement.child import start_of, worker_environment\n"
        "parents.preload((Path(sys.argv[1]), sys.argv[2], None))\n"
        "start = start_of('dpcfl_net.attacks.server_probe:look', Path(sys.argv[3]), worker_environment())\n"
        "child = parents.fork_worker('look', start, Path(sys.argv[3]) / 'log')\n"
        "sys.exit(child.wait())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder), read_operator_key(folder / "operator.pub"), str(out)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return Seen.of(out, job)


def test_its_imports_have_no_data_no_configuration_and_no_experiment(run, forked):
    _, _, server = run
    assert server.foreign_modules() == []
    assert "dpcfl_net.runtime.coordinator" in server.facts["modules"]
    assert {"dpcfl_net.experiment.job_files", "dpcfl_net.data.partition"} <= set(forked.foreign_modules())


def test_it_holds_no_object_of_the_experiment(run, forked):
    assert run[2].foreign_objects() == {}
    assert forked.foreign_objects()["dpcfl_net.experiment.job_files.Experiment"] >= 1


def test_its_memory_holds_no_seed_no_salt_and_no_record(run, forked):
    _, job, server = run
    assert len(server.memory) > 10_000_000  # it did look
    assert job.protocol.experiment_hash.encode() in server.memory
    assert server.secrets_and_records() == ([], 0)
    secrets, records = forked.secrets_and_records()
    assert {"salt", "seed", "partition seed"} <= set(secrets)
    assert records > IMAGES


def test_it_inherits_no_descriptor_no_mapping_and_no_environment(run):
    folder, _, server = run
    own = {path for path in server.facts["descriptors"].values() if path.startswith("/") and not path.startswith("/dev/")}
    written = {folder / name for name in ("messages.jsonl", "metrics.jsonl", "clusters.jsonl", "spans.jsonl", "warnings.jsonl")}
    written |= {folder / "transcript.msgpack", folder / "logs/coordinator.log"}
    assert {Path(path) for path in own if not path.startswith("/proc/")} <= written, own
    assert not [path for path in server.facts["mapped"] if path.endswith(".npy") or str(folder) in path]
    environment = server.facts["environment"]
    assert "PATH" in environment
    assert not {"DPCFL_DATA", "DPCFL_PRELOAD_JOB", "A_SECRET", "XDG_CACHE_HOME"} & set(environment)
    assert "of the launcher" not in str(environment)
    assert not [word for word in server.facts["arguments"] if str(folder) in word]


def test_its_keys_lie_in_a_folder_of_its_own(run):
    folder, _, _ = run
    assert {path.name for path in (folder / "keys/coordinator").iterdir()} == {"coordinator.public", "coordinator.secret"}


def test_importing_it_loads_neither_data_nor_configuration():
    code = (
        "import sys\n"
        "import dpcfl_net.runtime.coordinator, dpcfl_net.launch.placement.fork_server\n"
        "from dpcfl_net.algorithms.base import registry\n"
        "registry()\n"
        "print(*sorted(name for name in sys.modules if name.startswith('dpcfl_net')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "dpcfl_net.algorithms.r_dpcfl" in done.stdout.split()
    assert [name for name in done.stdout.split() if name.startswith(FOREIGN)] == []
