"""`dpcfl trace`: events in the documented format, of usual, virtual and broken runs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from cli_cases import call
from hypothesis import given, settings
from hypothesis import strategies as st
from run_folder import START, write_lines, write_run, write_start
from trace_events import check_trace

import dpcfl_net
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.report.trace import write_trace
from dpcfl_net.report.trace_spans import Slice, lanes


def events(folder: Path) -> list[dict[str, Any]]:
    return json.loads(write_trace(folder).read_text())["traceEvents"]


def span(who: str, what: str, t: int, start: float, end: float) -> dict[str, Any]:
    return {"who": who, "what": what, "round": t, "start": START + start, "end": START + end}


def message(kind: str, t: int, time: float, client: int = 0) -> dict[str, Any]:
    way = "down" if kind == "TASK" else "up"
    return {"time": START + time, "direction": way, "peer": f"client {client}", "kind": kind, "round": t, "bytes": 10}


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("trace") / "run", 5)


def test_a_trace_keeps_the_format_and_shows_every_process(usual: Path) -> None:
    found = events(usual)
    counts = check_trace(found)
    names = [event["args"]["name"] for event in found if event["name"] == "process_name"]
    assert names == ["coordinator", "observer", *(f"client {client}" for client in range(21))]
    messages = (usual / "messages.jsonl").read_text().count("\n")
    assert counts["i"] == messages == 5 * 21 * 2
    assert counts["X"] == (usual / "spans.jsonl").read_text().count("\n") + 5  # the rounds follow from metrics.jsonl
    assert counts["s"] >= 5 * 21  # tasks; results arrive after the synthetic rounds began
    rounds = [event for event in found if event["ph"] == "X" and event["name"].startswith("round ")]
    assert [event["args"]["round"] for event in rounds] == [1, 2, 3, 4, 5]
    assert rounds[0]["dur"] == pytest.approx(4.1e6, abs=1)
    assert rounds[0]["args"]["bytes_up"] == 21 * 116_000
    curve = [event["args"]["mean"] for event in found if event["ph"] == "C" and event["name"] == "accuracy"]
    assert len(curve) == 5
    measured = [event["ts"] for event in found if event["ph"] == "C" and event["name"] == "accuracy"]
    assert measured == [one["ts"] + one["dur"] for one in rounds]  # of the models after the round
    traffic = [(event["ts"], event["args"]["up"]) for event in found if event["ph"] == "C" and event["name"] == "bytes"]
    end = rounds[-1]["ts"] + rounds[-1]["dur"]
    assert traffic == [*((event["ts"], 21 * 116_000) for event in rounds), (end, 0)]


@pytest.mark.parametrize(
    ("bad", "words"),
    [("none/t.json", "no such file or folder"), ("run.json/t.json", "a part of this path"), ("a\0b", "null character")],
)
def test_a_file_that_cannot_be_written_is_a_sentence_with_its_path(usual: Path, bad: str, words: str) -> None:
    """It was an OSError of the system, or a ValueError."""
    with pytest.raises(ConfigError, match=words) as refused:
        dpcfl_net.open_run(usual).trace(usual / bad)
    assert repr(bad)[1:-1] in str(refused.value)


def test_the_file_is_compressed_if_its_name_says_so(usual: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "trace.json.gz"
    done = call(capsys, "trace", usual, "--out", out)
    assert (done.code, done.out, done.err) == (0, f"{out}\n", "")
    document = json.loads(gzip.decompress(out.read_bytes()))
    assert document["traceEvents"] == events(usual)
    assert document["displayTimeUnit"] == "ms"
    assert document["otherData"]["privacy"] == "epsilon 5, delta 0.0001, per sample"
    packed = out.read_bytes()
    write_trace(usual, out)
    assert out.read_bytes() == packed


def test_arrows_join_a_message_with_the_span_that_received_or_sent_it(tmp_path: Path) -> None:
    folder = write_start(tmp_path / "run", 2)
    write_lines(
        folder / "spans.jsonl",
        [
            span("coordinator", "wait", 1, 0, 10),
            span("client 0", "receive", 1, 1.1, 2),
            span("client 0", "train", 1, 2, 3),
            span("client 0", "send", 1, 3, 4.2),
            span("client 0", "receive", 1, 5, 5.5),  # a second call of the same round
            span("client 0", "send", 1, 6, 6.1),
        ],
    )
    lines = [message("TASK", 1, 1), message("RESULT", 1, 4), message("TASK", 1, 4.9), message("RESULT", 1, 6.2)]
    strays = [message("TASK", 1, 7), message("TASK", 2, 1), message("RESULT", 1, 99), message("TASK", 1, 1, client=3)]
    write_lines(folder / "messages.jsonl", [*lines, *strays])
    found = events(folder)
    assert check_trace(found)["i"] == 8
    begins = {event["id"]: event for event in found if event["ph"] == "s"}
    ends = {event["id"]: event for event in found if event["ph"] == "f"}
    got = [(begins[key]["name"], begins[key]["ts"] / 1e6, ends[key]["ts"] / 1e6) for key in sorted(begins)]
    assert got == [("TASK", 1, 1.1), ("RESULT", 4, 4), ("TASK", 4.9, 5), ("RESULT", 6.1, 6.2)]


def test_spans_that_overlap_go_to_further_lanes(tmp_path: Path) -> None:
    folder = write_start(tmp_path / "run", 2)
    fault = {**span("client 0", "fault stop", 1, 1.5, 2.5), "fault": "stop client 0"}
    write_lines(folder / "spans.jsonl", [span("client 0", "train", 1, 1, 2), fault, span("client 0", "send", 1, 2, 3)])
    found = events(folder)
    check_trace(found)
    slices = {event["name"]: event for event in found if event["ph"] == "X"}
    assert [slices[name]["tid"] for name in ("train", "send", "fault stop")] == [1, 1, 2]
    assert slices["fault stop"]["cat"] == "fault"


TIMES = st.integers(0, 30)


@settings(max_examples=50)
@given(st.lists(st.tuples(TIMES, TIMES).map(sorted), max_size=25))
def test_slices_of_a_lane_nest_or_do_not_overlap_and_none_is_lost(periods: list[list[int]]) -> None:
    slices = [Slice("x", str(number), start, end, 1) for number, (start, end) in enumerate(periods)]
    found = lanes(slices)
    assert sorted(one.name for lane in found for one in lane) == sorted(one.name for one in slices)
    for lane in found:
        for index, a in enumerate(lane):
            for b in lane[index + 1 :]:
                assert a.start <= b.start
                assert b.start >= a.end or b.end <= a.end


def test_in_virtual_time_rounds_come_from_spans_and_warnings_are_left_out(tmp_path: Path) -> None:
    folder = write_start(tmp_path / "run", 2)
    served = {"view": "server", "round": 1, "time": START + 9_999, "seconds": 3.0, "clock": "virtual", "wall_s": 0.1}
    write_lines(folder / "metrics.jsonl", [served, {**served, "round": 2}])
    write_lines(folder / "spans.jsonl", [span("coordinator", "wait", 1, 0, 3)])
    write_lines(folder / "warnings.jsonl", [{"view": "launcher", "time": START + 9_999, "text": "real time"}])
    found = events(folder)
    assert check_trace(found)["i"] == 0
    assert [(event["name"], event["dur"]) for event in found if event["ph"] == "X"] == [("round 1", 3_000_000)]


def test_damaged_lines_and_the_launcher_and_warnings(tmp_path: Path) -> None:
    folder = write_start(tmp_path / "run", 2)
    step = {"who": "launcher", "what": "data set digits", "round": 0, "start": START - 5, "end": START - 4}
    bad = [
        {"who": 3},
        span("client 0", "train", 1, 2, 1),
        {"who": "client 0", "what": "train", "round": 1, "start": None, "end": 1},
    ]
    write_lines(folder / "spans.jsonl", [step, *bad])
    write_lines(folder / "warnings.jsonl", [{"time": START, "text": "lost"}, {"text": "no time"}])
    write_lines(folder / "messages.jsonl", [{"kind": "TASK"}])
    found = events(folder)
    counts = check_trace(found)
    assert (counts["X"], counts["i"]) == (1, 1)
    (first,) = [event for event in found if event["ph"] == "X"]
    assert (first["name"], first["cat"], first["ts"]) == ("data set digits", "preparation", 0)


def test_a_run_without_times_and_a_folder_without_a_run_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has recorded no times yet"):
        write_trace(write_start(tmp_path / "run", 2))
    assert not (tmp_path / "run" / "trace.json").exists()
    with pytest.raises(ConfigError, match="is not a run folder"):
        write_trace(tmp_path)
