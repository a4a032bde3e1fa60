"""Runs in virtual time: same bits, virtual seconds in every file, and against a real run over slow links."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_runs import TINY

import dpcfl_net as dpcfl
from dpcfl_net.core import runlog
from dpcfl_net.runtime.checkpoint import Checkpoints

SLOW = {"down_mbps": 0.025, "up_mbps": 0.0125, "latency_ms": 50}  # some 20 s a round: what a busy machine adds is little
NETWORK = {"default": "4g", "clients": {1: SLOW}}


def run_virtual(folder: Path, network: dict[str, Any], *, rounds: int = 3, timeout_s: float = 600, **more: Any) -> dpcfl.Run:
    runtime = {"round_timeout_s": timeout_s}
    settings = {**TINY, "rounds": rounds, "network": {"clock": "virtual", **network}, "runtime": runtime}
    return dpcfl.run(settings, folder, "in-process", progress=False, **more)


def served(run: dpcfl.Run) -> list[dict[str, Any]]:
    return [line for line in runlog.read(run.path / "metrics.jsonl") if "seconds" in line]


def last_models(run: dpcfl.Run) -> bytes:
    found = Checkpoints(run.path / "checkpoints").newest()
    assert found is not None
    return found[1].models.tobytes()


def spans(run: dpcfl.Run) -> Iterator[tuple[str, str, float]]:
    for line in runlog.read(run.path / "spans.jsonl"):
        yield line["who"], line["what"], line["end"] - line["start"]


def transfers(run: dpcfl.Run, what: str) -> dict[str, float]:
    """Median seconds by client from the server's sending of a task to its arrival, or from an answer to its arrival."""
    messages = {(x["kind"], x["peer"], x["round"]): x["time"] for x in runlog.read(run.path / "messages.jsonl")}
    found: dict[str, list[float]] = {}
    for line in runlog.read(run.path / "spans.jsonl"):
        who, t = line["who"], line["round"]
        if line["what"] == what:
            down = what == "receive"
            taken = line["end"] - messages["TASK", who, t] if down else messages["RESULT", who, t] - line["start"]
            found.setdefault(who, []).append(taken)
    return {who: statistics.median(values) for who, values in found.items()}


@pytest.fixture(scope="module")
def virtual(tmp_path_factory: pytest.TempPathFactory) -> dpcfl.Run:
    return run_virtual(tmp_path_factory.mktemp("virtual"), NETWORK)


def test_the_links_do_not_change_the_results(virtual: dpcfl.Run, in_process: dpcfl.Run) -> None:
    assert last_models(virtual) == last_models(in_process)
    assert [row["accuracy_by_client"] for row in virtual.records] == [row["accuracy_by_client"] for row in in_process.records]
    assert all(check.holds is not False for check in virtual.verify())


def test_rounds_last_as_long_as_the_slowest_client(virtual: dpcfl.Run) -> None:
    size = max(line["bytes"] for line in runlog.read(virtual.path / "messages.jsonl") if line["kind"] == "RESULT")
    for line in served(virtual):
        assert line["clock"] == "virtual"
        assert line["seconds"] > 8 * size / 0.0125e6
        assert line["seconds"] < 8 * size / 0.0125e6 + 8 * line["bytes_down"] / 2 / 0.025e6 + 10
    document = json.loads((virtual.path / "run.json").read_text())
    assert document["clock"] == "virtual"
    assert document["virtual_s"] == pytest.approx(sum(line["seconds"] for line in served(virtual)), abs=0.01)
    found: dict[tuple[str, str], list[float]] = {}
    for who, what, seconds in spans(virtual):
        found.setdefault((who, what), []).append(seconds)
    assert {key[1] for key in found if key[0] == "client 1"} == {"receive", "train", "send"}
    assert min(found["client 1", "send"]) > 5 * max(found["client 0", "send"])
    assert "observer" not in {who for who, _ in found}


def test_bytes_are_those_of_a_network_run(tmp_path: Path, by_network: dpcfl.Run) -> None:
    """Messages to the byte, up to the length of sequence numbers; with handshakes within 5 % of a tiny run, and its heartbeats."""

    def messages(run: dpcfl.Run) -> dict[tuple[str, int, str], int]:
        lines = runlog.read(run.path / "messages.jsonl")
        return {(x["kind"], x["round"], x["peer"]): x["bytes"] for x in lines if x["kind"] in ("TASK", "RESULT")}

    virtual = run_virtual(tmp_path, {"default": "4g"})  # as quick as the network run, so with as many heartbeats
    real, computed = messages(by_network), messages(virtual)
    assert real.keys() == computed.keys()
    assert max(abs(real[key] - computed[key]) for key in real) <= 4
    heartbeats = 400 * sum(line["seconds"] for line in served(by_network))  # two clients, one of a few hundred bytes in 2 s
    for direction in ("bytes_up", "bytes_down"):
        total = sum(line[direction] for line in served(by_network))
        assert sum(line[direction] for line in served(virtual)) == pytest.approx(total, abs=0.05 * total + heartbeats)


def test_a_resumed_run_continues_its_clock(tmp_path: Path) -> None:
    """The link is off for an hour from second 400 on, which the resumed run reaches; rounds before take less than 40 s."""
    cycle = {"down_mbps": 1000, "on_s": 400, "off_s": 3600}
    network = {"clients": {0: cycle, 1: SLOW}}
    stopped = run_virtual(tmp_path, network, rounds=20, callbacks=[lambda row: row.round < 4])
    before = served(stopped)
    assert sum(line["seconds"] for line in before) > 80
    assert max(line["seconds"] for line in before) < 40
    done = dpcfl.resume(stopped.path, progress=False)
    seconds = [line["seconds"] for line in served(done)]
    assert len([s for s in seconds if s > 3500]) == 1
    reached = next(index for index, s in enumerate(seconds) if s > 3500)
    assert 360 < sum(seconds[:reached]) < 440  # more than 480 if the clock began again at 0


def test_an_answer_that_a_real_run_would_not_wait_for_is_a_warning(tmp_path: Path) -> None:
    run = run_virtual(tmp_path, NETWORK, rounds=2, timeout_s=0.5)
    assert run.state == "finished"
    (warning,) = run.warnings
    assert "client 1 answered after" in warning
    assert "runtime.round_timeout_s is 0.5" in warning


@pytest.mark.slow
def test_virtual_time_is_that_of_a_run_through_the_relay(tmp_path: Path) -> None:
    """Links slow enough that transfers dominate: mean seconds of a round within 10 %, and each client's transfers within 15 %."""
    links = {"default": {"down_mbps": 0.4, "up_mbps": 0.2, "latency_ms": 40}, "clients": {1: "3g"}}
    settings = {**TINY, "rounds": 6, "network": {"how": "relay", **links}}
    started = time.monotonic()
    relayed = dpcfl.run(settings, tmp_path / "relay", progress=False)
    print(f"relay: {time.monotonic() - started:.1f} s")
    virtual = run_virtual(tmp_path / "virtual", links, rounds=6)
    assert last_models(relayed) == last_models(virtual)
    means = [statistics.fmean(line["seconds"] for line in served(run)[1:]) for run in (relayed, virtual)]
    print(f"mean seconds of a round: relay {means[0]:.3f}, virtual {means[1]:.3f}")
    assert means[1] == pytest.approx(means[0], rel=0.1)
    for what in ("receive", "send"):
        times = [transfers(run, what) for run in (relayed, virtual)]
        print(what, times)
        assert times[1] == pytest.approx(times[0], rel=0.15)
