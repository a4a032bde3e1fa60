"""Atomic writes, and canonical JSON."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from dpcfl_net.core import atomic
from dpcfl_net.core.canonical import canonical_json
from dpcfl_net.core.errors import ConfigError


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "a"
    atomic.write_atomically(path, "é", b"b", memoryview(b"c"), mode=0o600)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == ("ébc".encode(), 0o600)
    with pytest.raises(TypeError), atomic.replacing(path) as file:
        file.writelines([b"half", None])
    monkeypatch.setattr(atomic.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full") as refused:
        atomic.write_atomically(path, "other")
    assert refused.value.filename == str(path)
    assert path.read_text() == "ébc"
    assert [left.name for left in tmp_path.iterdir()] == ["a"]


def test_a_failed_flush_names_the_file_or_the_folder(tmp_path, monkeypatch):
    """A run whose checkpoint was not flushed ended with "a file: input/output error"."""
    (tmp_path / "a").touch()
    monkeypatch.setattr(atomic.os, "fsync", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    for flush, path in ((atomic.sync_file, tmp_path / "a"), (atomic.sync_folder, tmp_path)):
        with pytest.raises(OSError, match="Input/output error") as failed:
            flush(path)
        assert failed.value.filename == str(path)


def test_ctrl_c_leaves_no_draft(tmp_path):
    """A draft of a trace of 40 MB stayed in the run folder, and one of a data set in the cache."""

    def content():
        yield b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), atomic.replacing(tmp_path / "a") as file:
        file.writelines(content())
    assert list(tmp_path.iterdir()) == []


def test_threads_that_replace_one_file_do_not_meet_in_a_draft(tmp_path):
    path, contents = tmp_path / "a", ["1" * 100_000, "2" * 100_000]
    path.write_text(contents[0])

    def write(content):
        for _ in range(100):
            atomic.write_atomically(path, content)
            assert path.read_text() in contents

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, contents))
    assert [left.name for left in tmp_path.iterdir()] == ["a"]


def test_what_is_no_regular_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path):
        with pytest.raises(ConfigError, match="not a regular file"):
            atomic.write_atomically(path, "b")


@pytest.mark.parametrize("durable", [True, False])
def test_a_durable_write_flushes_the_file_before_the_folder(tmp_path, monkeypatch, durable):
    path, flushed, real = tmp_path / "a", [], os.fsync
    monkeypatch.setattr(atomic.os, "fsync", lambda handle: flushed.append((path.exists(), real(handle))[0]))
    with atomic.replacing(path, durable=durable) as file:
        file.write(b"b")
    assert flushed == ([False, True] if durable else [])


def test_a_durable_write_flushes_all_that_was_written(tmp_path, monkeypatch):
    """What is still in the buffer of the file reaches the device after the rename, or never."""
    lengths, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (lengths.append(os.fstat(fd).st_size), real(fd)))
    with atomic.replacing(tmp_path / "file", durable=True) as file:
        file.write(b"12345")
    assert lengths[0] == 5


def test_drafts_of_a_crash_are_removed_and_nothing_else(tmp_path):
    for name in (f".a.17{atomic.DRAFT}", "a", ".lock", f"b{atomic.DRAFT}"):
        (tmp_path / name).write_text("x")
    atomic.remove_drafts(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"a", ".lock", f"b{atomic.DRAFT}"}


def test_canonical_json_is_one_text_for_one_value():
    assert canonical_json({"b": [1.0, 0.1], "a": {"é": None}}) == b'{"a":{"\\u00e9":null},"b":[1.0,0.1]}'
    for value in (float("nan"), [float("inf")]):
        with pytest.raises(ValueError, match="not JSON compliant"):
            canonical_json(value)
