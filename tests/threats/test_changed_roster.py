"""Rosters that are not the one that the operator signed, or that differ between workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rosters import CLIENTS, opened, protocol_of, write

from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.core.frozen import digest
from dpcfl_net.core.job_differences import differences
from dpcfl_net.core.roster import BLOCK, Roster, RosterFile
from dpcfl_net.core.run_folder import RunFolder


@pytest.fixture
def files(tmp_path: Path) -> RunFolder:
    return write(tmp_path, protocol_of())


def less_noise(data: bytes) -> bytes:
    return data.replace(b'"noise_multiplier":1.25', b'"noise_multiplier":0.25', 1)


def without_the_last(data: bytes) -> bytes:
    return data[: data[:-1].rfind(b"\n") + 1]


def with_a_stranger(data: bytes) -> bytes:
    return data + data.splitlines(keepends=True)[-1].replace(b'"id":%d' % (CLIENTS - 1), b'"id":%d' % CLIENTS)


def exchanged(data: bytes) -> bytes:
    first, second, *others = data.splitlines(keepends=True)
    return b"".join([second, first, *others])


@pytest.mark.scenario(43)
@pytest.mark.parametrize(
    "change", [less_noise, without_the_last, with_a_stranger, exchanged, lambda data: b"", lambda data: data[:-1]]
)
def test_a_changed_roster_is_refused(files: RunFolder, change: Callable[[bytes], bytes]):
    assert opened(files).client(0).noise_multiplier == 1.25
    files.roster.write_bytes(change(files.roster.read_bytes()))
    with pytest.raises(Refused, match=r"^roster: .*roster\.jsonl is not the roster that the signed protocol names"):
        opened(files)


def test_the_changed_roster_would_be_used_without_its_hash(files: RunFolder, monkeypatch: pytest.MonkeyPatch):
    """Positive control."""
    files.roster.write_bytes(less_noise(files.roster.read_bytes()))
    monkeypatch.setattr(RosterFile, "_is_the_named_one", lambda *_: True)
    assert opened(files).client(0).noise_multiplier == 0.25


def test_a_roster_that_changes_while_a_process_runs_is_refused(files: RunFolder):
    protocol, data = opened(files), files.roster.read_bytes()
    assert protocol.client(1).noise_multiplier == 1.25
    files.roster.write_bytes(less_noise(data))
    with pytest.raises(Refused, match="has changed since it was verified"):
        protocol.client(0)
    assert protocol.client(CLIENTS - 1).noise_multiplier == 1.25  # its lines are those that were verified
    files.roster.write_bytes(without_the_last(data))
    with pytest.raises(Refused, match="has changed"):
        protocol.client(CLIENTS - 2)
    files.roster.unlink()
    with pytest.raises(ConfigError, match=r"roster\.jsonl: no such file"):
        protocol.client(2 * BLOCK - 1)


@pytest.mark.scenario(44)
def test_workers_that_are_shown_different_rosters_have_different_jobs(files: RunFolder, tmp_path: Path):
    """The job hash names the roster, and both ends of a connection compare it: see `test_client_with_another_job_leaves_with_an_error`."""
    mine = opened(files)
    quieter = [entry.model_copy(update={"noise_multiplier": 0.25}) if entry.id == 9 else entry for entry in mine.roster]
    other = opened(write(tmp_path / "other", mine.model_copy(update={"roster": Roster.of(quieter)})))
    assert digest(mine) != digest(other)
    assert differences(mine, other) == ["roster: client 9: noise_multiplier 1.25 here, 0.25 there"]
    fewer = mine.model_copy(update={"roster": Roster.of(mine.roster[:-1])})
    assert differences(mine, fewer) == [f"roster: {CLIENTS} clients here, {CLIENTS - 1} there"]
    others = mine.model_copy(update={"roster": Roster.of(e.model_copy(update={"records": 9}) for e in mine.roster)})
    assert differences(mine, others)[-1] == f"roster: {CLIENTS - 20} more clients differ"
