"""Files that users name, and names that users mistype."""

from __future__ import annotations

import errno
import os
import socket
import threading
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpcfl_net.core import files
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.names import distance, hint, nearest


def test_a_regular_file_is_read(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"\xef\xbb\xbf{}")
    assert (files.read_bytes(path), files.read_text(path), files.read_json(path)) == (b"\xef\xbb\xbf{}", "{}", {})
    assert files.read_bytes("/proc/self/status").startswith(b"Name")  # its size is 0 before it is read


def test_a_thread_that_cannot_be_started_is_a_limit_of_the_machine():
    before = threading.stack_size(1 << 50)
    try:
        with pytest.raises(RuntimeError) as failed:
            threading.Thread(target=print).start()
    finally:
        threading.stack_size(before)
    why = files.used_up(failed.value)
    assert why is not None
    assert "ulimit -u" in why
    assert files.used_up(RuntimeError("another")) is None


def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        open_before = psutil.Process().num_fds()
        for path, words in (
            (tmp_path, "is a folder"),
            (tmp_path / "fifo", "is a named pipe"),
            (tmp_path / "socket", "is a socket"),
            ("/dev/zero", "is a device"),
            (tmp_path / "none", "no such file"),
            (tmp_path / ("x" * 300), "the name is too long"),
            ("a\0b", "null"),
        ):
            with pytest.raises(ConfigError, match=words):
                files.read_bytes(path)
        assert psutil.Process().num_fds() == open_before


def test_a_file_without_permission_or_over_the_limit_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert files.read_bytes(path, 5) == b"12345"
    with pytest.raises(ConfigError, match="larger than 4 bytes"):
        files.read_bytes(path, 4)

    def denied(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(files.os, "open", denied)
    with pytest.raises(ConfigError, match=f"cannot read {path}: permission denied"):
        files.read_bytes(path)


@pytest.mark.parametrize(
    ("value", "kinds", "words"),
    [
        ("x", (int,), "a is 'x', must be a whole number"),
        (True, (int,), "a is True, must be a whole number"),
        (1.0, (int,), "a is 1.0, must be a whole number"),
        (None, (float,), "a is None, must be a number"),
        (3, (str, type(None)), "a is 3, must be text or null"),
        ({}, (list,), "a is {}, must be a list"),
    ],
)
def test_a_field_of_another_type_is_named(value, kinds, words):
    with pytest.raises(ConfigError, match=f"here is damaged: {words}"):
        files.check_fields({"a": value}, "here", {"a": kinds, "absent": (int,)})


@pytest.mark.parametrize(
    ("value", "kinds"), [(1, (float,)), (1.5, (float,)), (1, (int,)), (None, (str, type(None))), (True, (bool,))]
)
def test_a_field_of_the_right_type_passes(value, kinds):
    files.check_fields({"a": value}, "here", {"a": kinds})


def test_a_path_below_a_home_folder_that_is_unknown_is_refused(monkeypatch):
    """It ended the command with a RuntimeError of Python that named neither the path nor the setting."""
    monkeypatch.setenv("HOME", "/h")
    assert files.in_home("~/a", "data.root") == Path("/h/a")
    with pytest.raises(ConfigError, match=r"^data.root is '~nobody-here/a': ~nobody-here is not a known home folder"):
        files.in_home("~nobody-here/a", "data.root")


def test_long_values_are_cut():
    assert files.shown("x" * 5000) == f"'{'x' * 79}... (5,002 characters)"
    assert files.shown(10**5000) == "a number with thousands of digits"


def test_a_write_names_its_path_and_does_not_wait_for_a_reader(tmp_path):
    files.write_text(tmp_path / "a", "b")
    assert (tmp_path / "a").read_text() == "b"
    files.write_text("/dev/null", "b")
    os.mkfifo(tmp_path / "fifo")
    for path, words in (
        (tmp_path / "fifo", "a pipe that no process reads"),
        (tmp_path, "is a folder, not a file"),
        (tmp_path / "none" / "a", "no such file or folder"),
        (tmp_path / "a" / "b", "a part of this path is a file"),
        ("a\0b", "must not contain a null character"),
    ):
        with pytest.raises(ConfigError, match=words) as refused:
            files.write_text(path, "b")
        assert (str(path) if isinstance(path, Path) else "'a\\x00b'") in str(refused.value)
    with pytest.raises(OSError) as full:  # the path is right: the machine fails, with another exit code
        files.write_text("/dev/full", "b")
    assert (full.value.errno, full.value.filename) == (errno.ENOSPC, "/dev/full")


ALGORITHMS = ["dp-ifca", "global", "km-cdpfl", "local", "r-dpcfl", "rc-dpfl"]


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("r-dpfcl", "r-dpcfl"), ("rdpcfl", "r-dpcfl"), ("R_DPCFL", "r-dpcfl"), ("rc-dplf", "rc-dpfl"), ("gobal", "global"),
        ("golbal", "global"), ("lcoal", "local"), ("dp_ifca", "dp-ifca"), ("sgd", None), ("", None), ("x" * 1000, None),
    ],
)  # fmt: skip
def test_the_nearest_name(word, name):
    assert nearest(word, ALGORITHMS) == name
    assert hint(word, ALGORITHMS) == (f"; did you mean {name!r}?" if name else "")


def test_a_name_without_a_letter_of_the_word_is_not_near():
    assert [nearest(word, ["y", "lr", "K"]) for word in ("q", "b", "k", "lx", "qx")] == [None, None, "K", "lr", None]


def test_of_equally_near_names_the_one_that_begins_alike_is_meant():
    assert nearest("fig33", ["fig13", "fig3"]) == "fig3"


short = st.text(alphabet="abc", max_size=6)


@given(short, short, st.integers(0, 4))
def test_the_distance_counts_edits(first, second, at):
    assert distance(first, second) == distance(second, first)
    assert (distance(first, second) == 0) == (first == second)
    assert abs(len(first) - len(second)) <= distance(first, second) <= max(len(first), len(second))
    swapped = first[:at] + first[at : at + 2][::-1] + first[at + 2 :]
    assert distance(first, swapped) <= 1
