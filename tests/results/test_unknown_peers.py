"""Without CURVE any local process can send a result before HELLO: it is in the transcript, and its readers leave it out."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import dpcfl_net as dpcfl
from dpcfl_net.results.server_seen import read_seen
from dpcfl_net.transport.messages import Header, encode
from dpcfl_net.transport.payload import Payload
from dpcfl_net.transport.transcript import Transcript, header_of, read


@pytest.mark.parametrize("peer", ["unknown", "client x", "client -1"])
def test_a_result_of_an_unknown_peer_is_no_release_of_a_client(by_network: dpcfl.Run, tmp_path: Path, peer: str) -> None:
    folder = Path(shutil.copytree(by_network.path, tmp_path / "run"))
    before = [(check.what, check.holds) for check in dpcfl.open_run(folder).verify()]
    known = next(header_of(record) for record in read(folder / "transcript.msgpack") if b"RESULT" in record.header)
    payload = Payload.of({"update": np.zeros(3, "f4")})
    transcript = Transcript(folder / "transcript.msgpack", "full")
    fields = {"kind": "RESULT", "round": 1, "task": "train", "code": "release", "chunks": 1}
    about = {"version": known.version, "run": known.run, "job": known.job, "boot": "0" * 32, "sequence": 1}
    header = Header(**about, id="1" * 32, tensors=payload.rows, blake3=payload.blake3, **fields)
    transcript.record("up", peer, encode(header))
    transcript.record("up", peer, encode(Header(**about, id="2" * 32, kind="CHUNK", parent=header.id)), payload.chunks[0])
    transcript.close()

    assert [(check.what, check.holds) for check in dpcfl.open_run(folder).verify()] == before
    job = by_network.job
    assert read_seen(folder, job, {1}) == read_seen(by_network.path, job, {1})
