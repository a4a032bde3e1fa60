"""A malicious client's scenarios: hostile bytes, shapes, floods and updates against a coordinator, and against a naive one."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hostile_mains
import msgpack
import numpy as np
import psutil
import pytest
from conftest import SMALL, assert_nothing_left
from run_results import job_of
from wire_ends import (
    JOB,
    RUN,
    UPDATE,
    Ends,
    _nothing_is_left,  # noqa: F401 - fixtures
    _warm,  # noqa: F401
    make_client,
    make_server,
    play_steps,
    target,
)

from dpcfl_net.adversaries.hostile_messages import ANSWERS, CANARY, MESSAGES, pickle_that_writes
from dpcfl_net.adversaries.hostile_worker import STEPS, Reaction, play
from dpcfl_net.core import runlog
from dpcfl_net.core.errors import ConfigError, DpcflError
from dpcfl_net.core.tensors import CLIENT_DTYPES, DTYPES, pack, unpack
from dpcfl_net.core.types import Answer, Task
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.federation.in_process import InProcessFederation
from dpcfl_net.launch import new_run, processes, running
from dpcfl_net.launch.placement import local
from dpcfl_net.runtime.checkpoint import Checkpoints
from dpcfl_net.runtime.coordinator import drive
from dpcfl_net.runtime.one_process import Hosts, federation
from dpcfl_net.training import memory
from dpcfl_net.transport.channel import Stamp
from dpcfl_net.transport.client_events import ClientEvent
from dpcfl_net.transport.guard import ConnectionGuard
from dpcfl_net.transport.keys import make_keys
from dpcfl_net.transport.messages import CHUNK, MAX_HEADER, Header, WireError, decode
from dpcfl_net.transport.observer_outbox import ObserverOutbox
from dpcfl_net.transport.payload import Assembly, Payload
from dpcfl_net.transport.sockets import Link

MIB = 1 << 20
BASE = {"version": 2, "run": "ab", "job": "0" * 64, "boot": "1" * 32, "sequence": 1, "id": "2" * 32, "kind": "RESULT", "code": "release"}  # fmt: skip


def rss() -> float:
    """Memory of this process, in MiB."""
    return psutil.Process().memory_info().rss / MIB


def said(step: str) -> bytes:
    """The header's bytes that the hostile worker sends in a step."""
    messages, _ = MESSAGES[step][1](SimpleNamespace(stamp=Stamp(RUN, JOB)))
    return messages[0][0]


def code_of(data: bytes) -> str:
    with pytest.raises(WireError) as caught:
        decode(data)
    return caught.value.code


def peak_of(decoder: Callable[[bytes], object], data: bytes) -> tuple[float, str]:
    """MiB at the highest point while `data` is decoded, and what was raised."""
    raised = ""
    tracemalloc.start()
    try:
        decoder(data)
    except WireError as error:
        raised = error.code
    except (ValueError, RecursionError) as error:
        raised = type(error).__name__
    finally:
        peak = tracemalloc.get_traced_memory()[1] / MIB
        tracemalloc.stop()
    return peak, raised


def against_a_server(*steps: str, **how: Any) -> list[str]:
    """The codes that a hostile client 0 gets for its steps; afterwards client 1 still works."""
    with make_server() as server, make_client(server.address, 1) as honest:
        ends = Ends(server, honest)
        server.send_task(0, 1, "small", {})
        found = play_steps(ends, target(server.address), *steps, **how)
        ends.until(lambda: honest.welcomed)
        assert ends.round(honest, 1, 1, UPDATE).kind == "result"
        assert not [event for event in ends.of("result") if event.client == 0]
    assert {outcome.answer for outcome in found} <= {"ERROR", "CLOSED"}, found
    return [outcome.code for outcome in found]


def opened_by(program: str, data: bytes, folder: Path) -> bool:
    """Whether the canary is there after a decoder in a process of its own was given the bytes; it is taken away again."""
    subprocess.run([sys.executable, "-c", program], input=data, cwd=folder, check=False, capture_output=True, timeout=60)
    there = (folder / CANARY).exists()
    (folder / CANARY).unlink(missing_ok=True)
    return there


EXPECTED = {
    "hello": "WELCOME",
    "claim-identity": "WELCOME",
    "unknown-key": "CLOSED handshake",
    "no-curve": "CLOSED handshake",
    "second-connection": "ERROR duplicate",
    "before-hello": "ERROR no-hello",
    "replay": "ERROR stale-boot",
    "garbage": "ERROR not-msgpack",
    "three-frames": "ERROR multipart",
    "privacy-parameter": "ERROR schema",
    "wrong-version": "ERROR version",
    "wrong-run": "ERROR run",
    "wrong-job": "ERROR job",
    "other-boot": "ERROR boot",
    "same-sequence": "ERROR sequence",
    "stray-chunk": "ERROR chunk",
    "stray-result": "ERROR task-closed",
    "coordinators-word": "ERROR kind",
    "zero-update": "ACK",
    "nan-update": "ERROR non-finite",
    "infinite-update": "ERROR non-finite",
    "huge-update": "ERROR norm",
    "wrong-shape": "ERROR template",
    "wrong-dtype": "ERROR template",
    "extra-tensor": "ERROR template",
    "wrong-hash": "ERROR hash",
    "wrong-chunk": "ERROR chunk",
    "wrong-round": "ERROR round",
    "wrong-task": "ERROR round",
    "pickle": "ERROR not-msgpack",
    "ext-type": "ERROR not-msgpack",
    "deep-nesting": "ERROR not-msgpack",
    "false-length": "ERROR not-msgpack",
    "huge-header": "ERROR header-too-large",
    "oversize-frame": "CLOSED cut",
    "object-dtype": "ERROR schema",
    "shape-overflow": "ERROR schema",
    "negative-side": "ERROR schema",
    "repeated-tensor": "ERROR schema",
}


def test_every_step_of_the_hostile_worker_gets_its_answer():
    """One connection after another, and a new task whenever the last one is closed."""
    with make_server() as server:
        ends = Ends(server)

        def meanwhile() -> None:
            if server._peers[0].open is None:
                server.send_task(0, 1, "small", {})

        found = play_steps(ends, target(server.address), *EXPECTED, meanwhile=meanwhile)
        assert {outcome.step: f"{outcome.answer} {outcome.code}".strip() for outcome in found} == EXPECTED
        assert set(EXPECTED) == set(STEPS) - {"endless-multipart"}
        with pytest.raises(ConfigError, match="nonsense"):
            list(play(target(server.address), ["hello", "nonsense*"]))


PICKLE_LOADS = "import pickle, sys; pickle.loads(sys.stdin.buffer.read())"
EXT_LOADS = """
import msgpack, pickle, sys
msgpack.unpackb(sys.stdin.buffer.read(), ext_hook=lambda code, data: pickle.loads(data))
"""
NPY_LOADS = "import io, numpy, sys; numpy.load(io.BytesIO(sys.stdin.buffer.read()), allow_pickle=True)"


def object_array() -> bytes:
    """A .npy of dtype object, whose content is a pickle."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "|O", "fortran_order": False, "shape": (1,)})
    return file.getvalue() + pickle_that_writes(CANARY)


@pytest.mark.scenario(26)
def test_nothing_is_unpickled(evidence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    codes = against_a_server("pickle", "ext-type", "object-dtype")
    assert codes == ["not-msgpack", "not-msgpack", "schema"]
    payload = Payload((("update", "f4", (3,), 12),), [memoryview(object_array()[:12])])
    whole = Assembly(Header(**BASE, tensors=payload.rows, blake3=payload.blake3, chunks=1))
    whole.add(0, payload.chunks[0])  # an object array where numbers belong is read as numbers
    assert whole.tensors()["update"].dtype == np.float32
    for other in (
        pickle.dumps(pytest.fail),
        msgpack.packb(msgpack.ExtType(5, b"")),
        msgpack.packb({"run": msgpack.ExtType(5, b"abc")}),
        msgpack.packb({"run": msgpack.Timestamp(1)}),
    ):
        assert code_of(other) == "not-msgpack"
    assert not Path(CANARY).exists()
    evidence.got("pickle and ext type: not-msgpack, object dtype: schema; no canary file")
    assert opened_by(PICKLE_LOADS, said("pickle"), tmp_path)
    assert opened_by(EXT_LOADS, said("ext-type"), tmp_path)
    assert opened_by(NPY_LOADS, object_array(), tmp_path)
    evidence.control("pickle.loads, an ext hook that unpickles and numpy.load(allow_pickle) all create it from the same bytes")


def lenient(data: bytes) -> object:
    """msgpack as one would call it who trusts his peers."""
    limit = (1 << 32) - 1
    return msgpack.unpackb(data, max_array_len=limit, max_map_len=limit, max_str_len=limit, max_bin_len=limit)


@pytest.mark.scenario(27)
def test_deep_and_huge_headers_cost_nothing(evidence):
    before = rss()
    steps = "deep-nesting", "false-length", "huge-header", "oversize-frame"
    assert against_a_server(*steps) == ["not-msgpack", "not-msgpack", "header-too-large", "cut"]
    grown = rss() - before
    assert grown < 32
    claims = [bytes([kind]) + b"\xff\xff\xff\xff" for kind in (0xDF, 0xDD, 0xDB, 0xC6)]  # map, array, string, bytes
    highest = []
    for data in (b"\x91" * 60_000, b"\x81\xa1a" * 20_000, *claims):
        peak, raised = peak_of(decode, data)
        assert (raised, peak < 1) == ("not-msgpack", True), (peak, data[:5])
        highest.append(peak)
    long = b"\xdd\x00\x80\x00\x00" + b"\x00" * (8 << 20)  # a list of eight million zeros
    assert len(long) > MAX_HEADER
    peak, raised = peak_of(decode, long)
    assert (raised, peak < 1) == ("header-too-large", True)
    strict = max(*highest, peak)
    evidence.got(
        f"typed errors (oversize frame: cut); the decoder took {strict:.2f} MiB at most, the process grew by {grown:.0f} MiB"
    )
    read, raised = peak_of(lenient, long)
    assert (raised, read > 50) == ("", True)
    with pytest.raises(RecursionError):
        json.loads("[" * 1_000_000)  # before CPython 3.14 a thousandth of it
    evidence.control(
        f"lenient msgpack takes {read:.0f} MiB for a header of 8 MiB, and would for any; json.loads of a deep nesting: RecursionError"
    )


@pytest.mark.parametrize("code", sorted(CLIENT_DTYPES))
def test_a_release_of_another_dtype_can_be_made_of_any(code):
    """The step ended the script with a KeyError in secure sums, whose releases are bytes and words."""
    wrong = ANSWERS["wrong-dtype"][1]({"tensor": np.zeros(3, DTYPES[code])}, None)["tensors"]["tensor"]
    assert (wrong.dtype != DTYPES[code], wrong.shape) == (True, (3,))


@pytest.mark.parametrize("shape", [(), (400,)])
def test_a_huge_update_has_the_norm_that_it_is_said_to_have(shape):
    update = ANSWERS["huge-update"][1]({"update": np.zeros(shape, np.float32)}, None)["tensors"]["update"]
    assert np.linalg.norm(update) == pytest.approx(1e6)


RIGHT = {  # row, column and value with which the hostile worker's table would be right
    "object-dtype": (0, 1, "i8"),
    "shape-overflow": (0, 2, [1 << 32, 0]),
    "negative-side": (0, 2, [1, 1]),
    "repeated-tensor": (1, 0, "update2"),
}


@pytest.mark.parametrize("step", RIGHT)
def test_a_hostile_table_is_wrong_in_one_place_only(step):
    """They lacked a hash and chunks: each would have been refused without the check that it is made for."""
    row, column, value = RIGHT[step]
    assert code_of(said(step)) == "schema"
    header = msgpack.unpackb(said(step))
    header["tensors"][row][column] = value
    assert decode(msgpack.packb(header)).kind == "RESULT"


SHAPES = [
    [["a", "f4", [-1], 4]],
    [["a", "f4", [-1], -4]],
    [["a", "f4", [-1, -1], 4]],
    [["a", "f4", [True], 4]],
    [["a", "f4", [2], 4]],
    [["a", "f4", [1 << 33, 1 << 33], 0]],
    [["a", "f4", [1 << 32, 1 << 32], 4]],
    [["a", "f4", [1 << 33], 1 << 35]],
    [["a", "f4", [1] * 9, 4]],
    [["b", "f4", [1], 4], ["a", "f4", [1], 4]],
    [["a", "f4", [1], 4], ["a", "f4", [1], 4]],
]


@pytest.mark.scenario(28)
def test_overflowing_and_overlapping_shapes_are_refused(evidence):
    steps = "shape-overflow", "negative-side", "repeated-tensor", "wrong-chunk"
    assert against_a_server(*steps) == ["schema", "schema", "schema", "chunk"]
    for rows in SHAPES:
        chunks = -(-sum(row[3] for row in rows) // CHUNK)
        assert code_of(msgpack.packb({**BASE, "tensors": rows, "chunks": chunks, "blake3": "c" * 64})) == "schema"
    payload = Payload.of({"a": np.zeros(CHUNK, "f4")})
    header = Header(**BASE, tensors=payload.rows, blake3=payload.blake3, chunks=4)
    first = payload.chunks[0]
    for index, chunk in ((1, first), (1 << 40, first), (0, first[:-1]), (0, memoryview(b""))):
        with pytest.raises(WireError) as caught:
            Assembly(header).add(index, chunk)
        assert caught.value.code == "chunk"
    for offset in (-1, -CHUNK):
        assert code_of(msgpack.packb({**BASE, "kind": "CHUNK", "code": "", "index": offset})) == "schema"
    whole = Assembly(header)
    assert [whole.add(index, chunk) for index, chunk in enumerate(payload.chunks)] == [False] * 3 + [True]
    for index in (0, 4):
        with pytest.raises(WireError):
            whole.add(index, payload.chunks[0])
    evidence.got(
        "sizes that do not follow from shapes, negative sides and places, repeated names: schema; chunks out of place: chunk"
    )
    _, _, shape, size = msgpack.unpackb(said("shape-overflow"))["tensors"][0]
    with np.errstate(over="ignore"):
        product = int(np.prod(np.array(shape, np.int64)) * 4)
    assert product == size == 0
    naive = bytearray(b"first chunk, last chunk")
    naive[0:5] = b"again"
    naive[-5:] = b"below"
    assert naive == b"again chunk, last below"
    evidence.control(
        "numpy's int64 product of the same sides is 0, the announced size; a buffer written by offset takes a place twice, and one below 0"
    )


@pytest.mark.scenario(29)
@pytest.mark.parametrize("security", ["curve", "none"])
def test_an_endless_message_is_cut(evidence, monkeypatch, security):
    outcome, grown, rounds = flooded(security, 1024)
    assert (outcome.answer, outcome.code) == ("CLOSED", "cut")
    assert grown < 512  # the guard's 64, and what arrives before it looks again
    assert rounds > 0
    evidence.got(
        f"{security}: cut (flood), the process grew by {grown:.0f} MiB of the 1024 sent, {rounds} rounds of another client meanwhile"
    )
    monkeypatch.setattr(ConnectionGuard, "_check", lambda self: None)
    outcome, grown, _ = flooded(security, 320)
    assert (outcome.answer, outcome.code) == ("ERROR", "multipart")
    assert grown > 250
    evidence.control(f"{security}: without the guard it grew by {grown:.0f} MiB, all of a message of 320")


def flooded(security: str, mebibytes: int) -> tuple[Reaction, float, int]:
    """One message of so many MiB: what came back, MiB that memory grew by at its highest, rounds of another client meanwhile."""
    with make_server(security=security) as server, make_client(server.address, 1, security=security) as honest:
        ends = Ends(server, honest).joined()
        asked: list[str] = []
        answered: list[ClientEvent] = []

        def meanwhile() -> None:
            if len(ends.of("result")) == len(asked):
                asked.append(server.send_task(1, len(asked) + 1, "small", {}))
            for task in ends.tasks(honest)[len(answered) :]:
                answered.append(task)
                honest.send_result(task.id, "release", {"update": UPDATE})

        with highest_memory() as grown:
            (found,) = play_steps(
                ends, target(server.address, security=security), "endless-multipart",
                meanwhile=meanwhile, flood=mebibytes, wait_s=25.0,
            )  # fmt: skip
        return found, grown(), len(ends.of("result"))


@contextlib.contextmanager
def highest_memory() -> Iterator[Callable[[], float]]:
    """By how many MiB this process has grown at its highest, looked at every millisecond."""
    memory.give_back_all()  # by earlier tests: what grows into that would not be seen
    before, sizes, done = rss(), [0.0], threading.Event()

    def look() -> None:
        while not done.wait(0.001):
            sizes.append(rss() - before)

    watching = threading.Thread(target=look)
    watching.start()
    try:
        yield lambda: max(sizes)
    finally:
        done.set()
        watching.join()


FOUR = {
    **SMALL,
    "data": {"dataset": "digits", "clients": [2, 2], "train_per_client": 200, "test_per_client": 60},
    "model": {"name": "linear"},
    "rounds": 4,
    "privacy": {**SMALL["privacy"], "epsilon": 15},
    "algorithm": {"name": "global"},
    "runtime": {"quorum": 0.7},
    "output": {"transcript": "headers", "keep_checkpoints": 5},
}


def real_run(folder: Path, steps: str, *, careless: bool = False) -> DpcflError | None:
    """A run of coordinator, observer and four worker processes, client 3 in bad hands; what it failed of, if it did."""
    settings = config.resolve(FOUR)
    new_run.prepare(folder, settings)
    (folder / hostile_mains.STEPS).write_text(f"3 {steps}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "WORKER_MAIN", "hostile_mains:worker_or_worse")
        if careless:
            patch.setitem(processes.MAINS, "coordinator", "hostile_mains:careless_coordinator")
        _, failure = running.run_in(folder, settings, running.Quiet())
    assert_nothing_left(folder)
    return failure


@dataclass
class Poisoned:
    """What became of a run with client 3 in bad hands: its folder, what it failed of, each round's models."""

    folder: Path
    failure: DpcflError | None

    @property
    def models(self) -> dict[int, np.ndarray]:
        kept = Checkpoints(self.folder / "checkpoints")
        return {t: kept.read(t).models for t in kept.rounds()}

    def heard(self) -> list[str]:
        """Round by round, what the hostile worker's log says came back."""
        lines = (self.folder / "logs" / "client_3.log").read_text().splitlines()
        return [" ".join(line.split()[3:5]) for line in lines if "round" in line.split()]

    def accuracy(self, t: int) -> float:
        lines = runlog.read(self.folder / "metrics.jsonl")
        return next(line["accuracy_mean"] for line in lines if line["view"] == "observer" and line["round"] == t)


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory) -> dict[str, Poisoned]:
    """The same attack on the coordinator as it is, and on one that checks neither norms nor for numbers."""
    guarded, careless = tmp_path_factory.mktemp("guarded"), tmp_path_factory.mktemp("careless")
    steps = "nan-update,huge-update,infinite-update,wrong-shape*"
    return {
        "guarded": Poisoned(guarded, real_run(guarded, steps)),
        "careless": Poisoned(careless, real_run(careless, "huge-update,zero-update,nan-update*", careless=True)),
    }


class Absent:
    """A client that never answers."""

    def answer(self, task: Task) -> Answer:
        return Answer("lost")


def without_client_3(folder: Path, ledgers: Path) -> np.ndarray:
    """The last models of the same job where client 3 never answers."""
    job = job_of(folder)
    hosts = Hosts(job, ledgers)
    try:
        fed = InProcessFederation(job.protocol, {0: hosts[0], 1: hosts[1], 2: hosts[2], 3: Absent()}, quorum=0.7)
        return drive(job.algorithm, fed, Checkpoints(ledgers / "checkpoints"), lambda t, state: None).models
    finally:
        hosts.close()


@pytest.mark.scenario(30)
def test_a_poisoned_update_is_quarantined_and_the_round_goes_on(evidence, poisoned, tmp_path):
    run = poisoned["guarded"]
    assert run.failure is None
    assert run.heard() == ["ERROR non-finite", "ERROR norm", "ERROR non-finite", "ERROR template"]
    server = [line for line in runlog.read(run.folder / "metrics.jsonl") if line["view"] == "server"]
    assert [(line["answered"], line["missing"]) for line in server] == [(3, [3])] * 4
    told = [line["text"] for line in runlog.read(run.folder / "warnings.jsonl")]
    assert [text.startswith(f"client 3 is out of round {t}: ") for t, text in enumerate(told, 1)] == [True] * 4
    assert run.models[4].tobytes() == without_client_3(run.folder, tmp_path).tobytes()
    evidence.got(
        "NaN, infinity, norm 1e6 and a wrong shape: non-finite, norm, template; all 4 rounds done with the other 3, "
        f"to the bits of a run without it (accuracy {run.accuracy(4):.2f})"
    )
    run = poisoned["careless"]
    assert run.heard()[:2] == ["ACK", "ACK"]  # the third, NaN, was taken as well: it ends the run
    honest, longest = (np.linalg.norm(poisoned[which].models[1].astype("f8")) for which in ("guarded", "careless"))
    assert longest > 1e5 > 1e3 * honest
    assert max(run.models) == 2
    assert "a NaN or an infinity in row 0 of State.models: clients refuse such a model" in str(run.failure)
    evidence.control(
        f"with the checks off all are taken: models of norm {longest:.0f} instead of {honest:.1f}, then NaN, and the run ends"
    )


@pytest.mark.parametrize("labels", ["gaussian", "randomised-response"])
@pytest.mark.parametrize("named", [-1, 2, 2**63 - 1])
def test_a_label_of_no_cluster_counts_as_none_and_does_not_end_the_server(named, labels, tmp_path, monkeypatch):
    """It was passed to the observer, whose messages hold numbers of clusters: the coordinator could not make one, and ended."""
    algorithm = {"name": "rr-cluster", "clusters": 2, "min_cluster_size": 2, "sampling_rate": 1.0, "labels": labels}
    privacy = {"unit": "client", "trust": "trusted-server", "delta": 1e-2, "adjacency": "replace-one"}
    changes = {"rounds": 2, "algorithm": algorithm, "privacy": {**FOUR["privacy"], **privacy}, "output": {}}
    make_keys(tmp_path / "keys", 4)
    job, answer = make_job(config.resolve({**FOUR, **changes}), tmp_path / "keys"), InProcessFederation._answer

    def hostile(fed, client, task):
        honest = answer(fed, client, task)
        if client != 3:
            return honest
        return replace(honest, release=pack({**unpack(honest.release), "label": np.array(named, np.int64)}))

    monkeypatch.setattr(InProcessFederation, "_answer", hostile)
    seen = []
    with (
        federation(job, tmp_path / "ledgers") as fed,
        ObserverOutbox("tcp://127.0.0.1:9", Link(RUN, JOB, security="none"), sender="coordinator", patience_s=0.0) as outbox,
    ):

        def publish(t, state):
            shown = fed.central_server.shown
            outbox.models(t, state.assignment, state.models, **shown)
            seen.append(dict(zip(shown["clients"], shown["labels"]["as sent"], strict=True)))

        drive(job.algorithm, fed, Checkpoints(tmp_path / "checkpoints"), publish)
    assert [sent[3] for sent in seen] == [None] * 2
    assert {sent[client] for sent in seen for client in range(3)} <= {0, 1}
