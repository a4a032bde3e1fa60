"""Growing files of a run folder: a cut line costs itself alone, and a full disk says so."""

from __future__ import annotations

import os

import psutil
import pytest
from full_disk import files_do_not_grow

from dpcfl_net.core import runlog


def test_a_fragment_is_ended_and_left_out(tmp_path):
    path = tmp_path / "messages.jsonl"
    lines = runlog.Lines(path)
    for k in range(3):
        lines.write({"round": k, "value": float("nan")})
    lines.close()
    os.truncate(path, path.stat().st_size - 8)
    assert [line["round"] for line in runlog.read(path)] == [0, 1]
    lines = runlog.Lines(path)
    lines.write({"round": 2, "value": 1.0})
    lines.close()
    assert [line["round"] for line in runlog.read(path)] == [0, 1, 2]
    assert runlog.unreadable(path) == 1
    assert runlog.read(path)[0]["value"] is None


@pytest.mark.parametrize(
    "junk",
    [
        b"{]\n",
        b"7\n",
        b"\xff\xfe{}\n",
        b'{"a": ' + b"[" * 100_000 + b"\n",
        b'{"round": 3, "accuracy": Infinity}\n',
        b'{"round": 3, "time": 1' + b"0" * 400 + b"}\n",
        b"\n\n",
    ],
)
def test_lines_that_are_no_objects_are_left_out(tmp_path, junk):
    path = tmp_path / "messages.jsonl"
    path.write_bytes(b'{"round": 1}\n' + junk + b'{"round": 2}\n')
    assert [line["round"] for line in runlog.read(path)] == [1, 2]
    assert runlog.unreadable(path) == (0 if junk == b"\n\n" else 1)


def test_a_line_is_written_whole_or_an_error_is_raised(tmp_path, monkeypatch):
    """A disk that takes a few bytes at a time, and then none."""
    path, real, left = tmp_path / "messages.jsonl", os.write, [200]

    def few(fd, data):
        if not left[0]:
            raise OSError(28, "No space left on device")
        taken = min(7, left[0], len(data))
        left[0] -= taken
        return real(fd, data[:taken])

    lines = runlog.Lines(path)
    monkeypatch.setattr(os, "write", few)
    lines.write({"round": 1, "text": "x" * 100})
    with pytest.raises(OSError, match="No space left"):
        lines.write({"round": 2, "text": "x" * 100})
    monkeypatch.setattr(os, "write", real)
    lines.close()
    lines = runlog.Lines(path)
    lines.write({"round": 3})
    lines.close()
    assert [line["round"] for line in runlog.read(path)] == [1, 3]


def test_a_line_that_another_process_has_left_partial_costs_itself_alone(tmp_path, monkeypatch):
    """The disk is full for the coordinator's line; the observer, which has the file open, writes the next one when there is room."""
    path, real = tmp_path / "metrics.jsonl", os.write

    def few(fd, data):
        if len(data) < 20:
            raise OSError(28, "No space left on device")
        return real(fd, data[: len(data) - 10])

    coordinator, observer = runlog.Lines(path), runlog.Lines(path)
    with monkeypatch.context() as full:
        full.setattr(os, "write", few)
        with pytest.raises(OSError, match="No space left"):
            coordinator.write({"view": "server", "round": 2, "seconds": 1.0})
    coordinator.close()
    observer.write({"view": "observer", "round": 1})
    observer.write({"view": "observer", "round": 2})
    observer.close()
    assert [line["round"] for line in runlog.read(path)] == [1, 2]
    assert path.read_bytes().count(b"\n") == 3


@pytest.mark.parametrize("line", ['{"round":1}', '{"view":"server"}', '{"view":"server","round":"1"}', '{"view":7,"round":1}'])
def test_metrics_without_view_and_round_are_left_out(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{line}\n{{"view":"server","round":2}}\n')
    assert [line["round"] for line in runlog.read(path)] == [2]
    assert runlog.unreadable(path) == 1


def test_nothing_there_is_no_lines(tmp_path):
    assert runlog.read(tmp_path / "nothing") == []
    assert runlog.unreadable(tmp_path / "nothing") == 0


@pytest.mark.parametrize(
    "line", ["{}", '{"time": 1.0}', '{"text": "a"}', '{"time": 1.0, "text": 3}', '{"time": "1", "text": "a"}']
)
def test_a_warning_without_its_text_or_time_is_damaged(tmp_path, line):
    path = tmp_path / "warnings.jsonl"
    path.write_text('{"time":1,"text":"kept"}\n' + line + "\n")
    assert [found["text"] for found in runlog.read(path)] == ["kept"]
    assert runlog.unreadable(path) == 1


def test_a_full_disk_at_the_end_of_a_fragment_names_the_file(tmp_path):
    path = tmp_path / "messages.jsonl"
    path.write_bytes(b'{"round": 1}\n{"rou')
    open_before = psutil.Process().num_fds()
    with files_do_not_grow(), pytest.raises(OSError, match="File too large") as found:
        runlog.Lines(path)
    assert found.value.filename == str(path)
    assert psutil.Process().num_fds() == open_before
