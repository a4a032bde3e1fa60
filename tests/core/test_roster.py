"""The roster beside the signed protocol: one hash, entries that are read on demand, and the earlier format."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from rosters import CLIENTS, opened, protocol_of, write

from dpcfl_net.adversaries.fuzz_readers import PROTOCOL
from dpcfl_net.core.errors import DpcflError, Refused
from dpcfl_net.core.frozen import canonical, digest
from dpcfl_net.core.job_reader import read_protocol
from dpcfl_net.core.roster import BLOCK
from dpcfl_net.core.run_folder import RunFolder


@pytest.fixture
def files(tmp_path: Path) -> RunFolder:
    return write(tmp_path, protocol_of())


def test_what_is_written_is_read_again(files: RunFolder):
    made, read = protocol_of(), opened(files)
    assert read == made
    assert digest(read) == digest(made)
    assert [*read.roster] == [*made.roster] == [*read.roster]
    assert [*read.clients] == [*range(CLIENTS)]
    assert read.roster[BLOCK - 1 : BLOCK + 2] == made.roster[BLOCK - 1 : BLOCK + 2]
    assert read.roster[-1] == read.client(CLIENTS - 1) == made.client(CLIENTS - 1)
    assert read.records == made.records
    assert len(files.protocol.read_bytes()) < 1500  # none of it grows with the clients
    for stranger in (-1, CLIENTS, 10**9):
        with pytest.raises(KeyError):
            read.client(stranger)


def test_memory_of_a_reader_does_not_grow_with_the_clients(tmp_path: Path):
    held = []
    for clients in (100, 5100):
        files = write(tmp_path / str(clients), protocol_of(clients))
        tracemalloc.start()
        protocol = read_protocol(files.protocol)
        assert protocol.client(clients - 1).records == 1 + (clients - 1) % 7
        held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    assert (held[1] - held[0]) / 5000 < 2, held  # bytes; a parsed entry takes a kilobyte


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: data.replace(b'"id":5,', b'"id": 5,'), "canonical"),
        (lambda data: data.replace(b'"id":5,', b'"id":6,'), "ids must be"),
        (lambda data: data.replace(b'"records":6', b'"records":0', 1), "records: Input should be greater"),
        (lambda data: data.replace(b'"id":5,', b'"id":5,"identity":"' + b"ab" * 32 + b'",'), "trust secure-aggregation"),
        (lambda data: data.replace(b"\n", b"\n\n", 1), "line 1"),
    ],
    ids=["spaces", "two clients with one id", "no records", "an identity without secure sums", "an empty line"],
)
def test_a_signed_roster_that_is_invalid_is_refused_when_it_is_read(tmp_path: Path, change: Callable[[bytes], bytes], why: str):
    files = write(tmp_path, protocol_of(8))
    data = change(files.roster.read_bytes())
    files.roster.write_bytes(data)
    document = json.loads(files.protocol.read_bytes())
    document["roster"] = signed_reference(data)
    files.protocol.write_bytes(json.dumps(document, sort_keys=True, separators=(",", ":")).encode())
    protocol = read_protocol(files.protocol)
    with pytest.raises(Refused, match=f"job-invalid: .*{why}"):
        list(protocol.roster)


def signed_reference(data: bytes) -> dict[str, object]:
    return {"clients": data.count(b"\n"), "sha256": hashlib.sha256(data).hexdigest()}


def test_a_job_of_format_1_opens_with_its_hash(files: RunFolder):
    """Earlier versions wrote the clients into protocol.json."""
    new = protocol_of()
    old = protocol_of(format=1)
    files.protocol.write_bytes(canonical(old))
    files.roster.unlink()
    read = read_protocol(files.protocol)
    assert [*read.roster] == [*new.roster]
    assert digest(read) == digest(old) != digest(new)
    assert json.loads(files.protocol.read_bytes())["roster"][3]["id"] == 3


@pytest.mark.parametrize("format", [1, 2, 3])
def test_a_job_of_a_mixed_form_is_refused(files: RunFolder, format: int):
    document = json.loads(files.protocol.read_bytes())
    if format > 1:
        document["roster"] = json.loads(canonical(protocol_of(format=1)))["roster"]
    document["format"] = format
    files.protocol.write_bytes(json.dumps(document, sort_keys=True, separators=(",", ":")).encode())
    with pytest.raises(DpcflError, match="canonical"):
        read_protocol(files.protocol)


def test_an_unknown_format_is_refused_with_its_name(files: RunFolder):
    files.protocol.write_bytes(files.protocol.read_bytes().replace(b'"format":3', b'"format":4'))
    with pytest.raises(Refused, match="format"):
        read_protocol(files.protocol)


def test_entries_in_memory_fit_the_privacy_target():
    with pytest.raises(ValueError, match="identity"):
        protocol_of(roster=[{**PROTOCOL["roster"][0], "identity": "ab" * 32}])
