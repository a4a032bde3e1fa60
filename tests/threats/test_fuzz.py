"""The fuzzer finds nothing in a bounded number of inputs; and it finds each check that is left out in a bounded number."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpcfl_net.adversaries import fuzz
from dpcfl_net.adversaries.fuzz_readers import Finding, require_consistent
from dpcfl_net.core import job_reader, signing, tensors
from dpcfl_net.core.errors import Refused
from dpcfl_net.core.roster import RosterFile
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.federation.secure import client_checks, server_stages
from dpcfl_net.transport import channel, client, connections, encodings, message_log, messages, open_tasks, payload, transcript
from dpcfl_net.transport.header_rules import RULES
from dpcfl_net.transport.messages import Header, WireError, decode, unpack_strict
from dpcfl_net.transport.open_tasks import OpenTasks
from dpcfl_net.transport.payload import Assembly

INPUTS = {
    "codec": 8000,
    "encodings": 1500,
    "chunks": 1500,
    "server": 6000,
    "client": 9000,
    "flood": 3500,
    "transcript": 500,
    "job": 500,
    "sums": 1500,
}


@pytest.fixture(scope="module")
def targets(tmp_path_factory) -> dict[str, fuzz.Target]:
    return {target.name: target for target in fuzz.targets(tmp_path_factory.mktemp("fuzz"))}


@pytest.mark.parametrize("name", INPUTS)
def test_nothing_but_refusals_comes_out_and_nothing_false_is_believed(targets, name):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = fuzz.fuzz(targets[name], INPUTS[name], seed=3)
    refused = sum(found.counts.values()) - found.counts["accepted"] - found.counts["delivered"]
    assert found.inputs >= INPUTS[name]
    assert found.counts["accepted"] > 0 < refused  # it gets through, and it is turned down
    assert 0 < found.peak < fuzz.MOST_TRACED
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < fuzz.MOST_RESIDENT
    if name in ("server", "client"):
        assert found.counts["delivered"] > 30
        assert {"sequence", "boot", "run", "job", "version", "template", "chunk", "hash", "norm", "schema"} <= set(found.counts)


def test_the_shares_of_the_targets_make_a_whole(targets):
    assert sum(target.share for target in targets.values()) == pytest.approx(1)
    assert INPUTS.keys() == targets.keys()


@pytest.mark.parametrize("name", ["codec", "chunks", "server", "client", "transcript", "job", "sums"])
def test_hypothesis_finds_no_counterexample_either(targets, name):
    @settings(max_examples=8, suppress_health_check=list(HealthCheck), database=None)
    @given(st.randoms(use_true_random=False))
    def check(rng: Random) -> None:
        targets[name].run(rng, Counter())

    check()


def _naive(data: bytes | memoryview) -> Any:
    return msgpack.unpackb(data)


def _open(data: bytes | memoryview) -> Header:
    return decode(msgpack.packb({name: value for name, value in unpack_strict(data).items() if name in RULES}))


def _unhashed(self: Assembly) -> dict[str, np.ndarray]:
    return tensors.split([list(row) for row in self.header.tensors], self._buffer)


def _anywhere(self: Assembly, index: int, chunk: memoryview) -> bool:
    start = index * payload.CHUNK
    self._buffer[start : start + len(chunk)] = chunk
    self._digest.update(chunk)
    self.received += 1
    return self.received == self.header.chunks


def _unordered(indices: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    decoded = np.zeros(size, np.float32)
    decoded[indices.clip(0, size - 1)] = values
    return decoded


def _unscaled(levels: np.ndarray, scales: np.ndarray) -> np.ndarray:
    decoded: np.ndarray = levels * np.repeat(scales, encodings.BLOCK)[: levels.size].clip(-1, 1)
    return decoded


def _any_boot(self: connections.Connections, route: bytes, number: int, header: Header) -> Any:
    peer = self.peers[number]
    if peer.route != route:
        raise WireError("no-hello", "")
    peer.channel.admit(header)
    return peer


def _any_route(self: connections.Connections, route: bytes, number: int, header: Header) -> Any:
    peer = self.peers[number]
    if header.boot != peer.boot:
        raise WireError("boot", "")
    peer.channel.admit(header)
    return peer


_ANSWER, _WELCOME, _TASK = OpenTasks.answer, client.ClientEndpoint._answered_hello, client.ClientEndpoint._task


def _any_round(self: OpenTasks, peer: Any, header: Header) -> None:
    if peer.open is not None and header.parent == peer.open.id:
        peer.open.round = header.round
    _ANSWER(self, peer, header)


def _any_welcome(self: client.ClientEndpoint, header: Header) -> None:
    _WELCOME(self, replace(header, parent=next(iter(self._hellos))))


def _answered_again(self: client.ClientEndpoint, header: Header) -> None:
    self._tasks.pop(header.id, None)
    _TASK(self, header)


def _put_aside_first(header: Header, chunks: list[bytes | None]) -> Any:
    assembly = Assembly(header)
    try:
        for index, chunk in enumerate(chunks):
            assembly.add(index, memoryview(chunk or b""))
        return assembly.tensors()
    except WireError:
        return None


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _another_error(*_: Any) -> None:
    raise ValueError


def _yes(*_: Any) -> bool:
    return True


def _unchecked(assembly: Assembly, *_: Any) -> dict[str, np.ndarray]:
    return assembly.tensors()


def _forgetful(known: Any, key: str, value: Any) -> None:
    known.clear()
    known[key] = value


BROKEN: dict[str, tuple[str, Any, str, Any]] = {  # what is left out -> (who should notice, where, the check, what stands there instead)
    "sizes that agree": ("codec", messages, "_check_payload", _nothing),
    "limits of the decoder, and its errors": ("codec", messages, "unpack_strict", _naive),
    "no field twice": ("codec", messages, "_unique_keys", dict),
    "no unknown field": ("codec", messages, "decode", _open),
    "the hash of a payload": ("chunks", payload.Assembly, "tensors", _unhashed),
    "the order of indices": ("encodings", encodings, "from_top_k", _unordered),
    "the range of scales and levels": ("encodings", encodings, "from_int8", _unscaled),
    "the order of chunks": ("chunks", payload.Assembly, "add", _anywhere),
    "rising sequence numbers, server": ("server", channel.Channel, "admit", _nothing),
    "run, job and version, server": ("server", channel.Stamp, "require_same", _nothing),
    "the boot of the HELLO": ("server", connections.Connections, "known", _any_boot),
    "the connection of the HELLO": ("server", connections.Connections, "known", _any_route),
    "one connection a client": ("server", connections.Connections, "_alive", lambda self, peer: False),
    "boots that were used": ("server", connections, "remember", _forgetful),
    "the round of an answer": ("server", OpenTasks, "answer", _any_round),
    "the HELLO of a WELCOME": ("client", client.ClientEndpoint, "_answered_hello", _any_welcome),
    "tasks that were answered": ("client", client.ClientEndpoint, "_task", _answered_again),
    "a typed refusal, server": ("server", open_tasks, "match_template", _another_error),
    "a typed refusal, client": ("client", client, "match_template", _another_error),
    "the template, server": ("server", open_tasks, "match_template", _nothing),
    "the norm bound, server": ("server", open_tasks, "checked", _unchecked),
    "hash and finite values, server": ("server", payload.Assembly, "tensors", _unhashed),
    "finite values, server": ("server", tensors, "finite", _yes),
    "rising sequence numbers, client": ("client", channel.Channel, "admit", _nothing),
    "run, job and version, client": ("client", channel.Stamp, "require_same", _nothing),
    "the template, client": ("client", client, "match_template", _nothing),
    "the norm bound, client": ("client", client, "checked", _unchecked),
    "a bound on stored message ids": ("flood", channel, "RECENT_MESSAGES", 1 << 30),
    "a bound on codes": ("flood", message_log, "CODES", 1 << 30),
    "a bound on queued messages": ("flood", channel, "CONTROLS", 1 << 30),
    "records of the right form": ("transcript", transcript, "_well_formed", _yes),
    "nothing put aside for chunks that are empty": ("transcript", transcript, "tensors_of", _put_aside_first),
    "the chain of a transcript": ("transcript", transcript.Reader, "_verify", lambda self, found: transcript.Record(*msgpack.unpackb(found[0]))),
    "the operator's signature": ("job", signing, "verify", _yes),
    "the canonical form": ("job", job_reader, "_is_canonical", _yes),
    "the hash of the roster": ("job", RosterFile, "_is_the_named_one", _yes),
    "signatures of keys and lists, client": ("sums", client_checks, "verify", _yes),
    "signatures of keys, server": ("sums", server_stages, "verify", _yes),
    "the list of survivors": ("sums", client_checks, "_check_survivors", _nothing),
    "the form of rows": ("sums", client_checks, "checked_rows", lambda array, *_: array),
    "the form of lists": ("sums", client_checks, "check_flags", _nothing),
    "signatures of a list": ("sums", client_checks, "check_unmask", _nothing),
}  # fmt: skip
MOST = {
    "codec": 6000,
    "encodings": 2000,
    "chunks": 3000,
    "server": 60_000,
    "client": 60_000,
    "flood": 60_000,
    "transcript": 4000,
    "job": 2000,
    "sums": 4000,
}


SLOW = ("a bound on stored message ids", "a bound on queued messages", "the round of an answer")


@pytest.mark.parametrize("left_out", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in BROKEN])
def test_a_check_that_is_left_out_is_noticed(targets, monkeypatch, left_out):
    name, where, check, instead = BROKEN[left_out]
    assert hasattr(where, check)
    monkeypatch.setattr(where, check, instead)
    with pytest.raises(Finding) as caught:
        fuzz.fuzz(targets[name], MOST[name], seed=2)
    assert f"--target {name} --seed 2" in caught.value.__notes__[0]
    monkeypatch.undo()
    first = int(caught.value.__notes__[0].split("--first ")[1].split()[0])
    fuzz.fuzz(targets[name], 1, seed=2, first=first)  # the same input is harmless with the check in its place


def found_by_the_fuzzer(said: dict[str, Any], again: tuple[str, Any]) -> bytes:
    packer = msgpack.Packer(autoreset=False)
    packer.pack_map_header(len(said) + 1)
    for name, value in (*said.items(), again):
        packer.pack(name)
        packer.pack(value)
    return packer.bytes()


@pytest.mark.parametrize("code", sorted(tensors.DTYPES))
def test_the_fuzzer_knows_every_type_that_a_header_may_name(code: str) -> None:
    """A header with a double, as aggregators send it, ended the fuzzer with a KeyError."""
    fields = {"version": messages.VERSION, "run": "ab" * 16, "job": "0" * 64, "boot": "1" * 32, "sequence": 1, "id": "2" * 32}
    size = 3 * tensors.DTYPES[code].itemsize
    task = {
        "kind": "TASK",
        "round": 1,
        "task": "train",
        "tensors": [["sums", code, [3], size]],
        "chunks": 1,
        "blake3": "c" * 64,
    }
    data = msgpack.packb({**fields, **task})
    require_consistent(decode(data), data)
    with pytest.raises(Finding, match="shape and size do not agree"):
        require_consistent(replace(decode(data), tensors=[("sums", code, (2,), size)]), data)


def test_a_field_said_twice_is_refused():
    said = {"version": 2, "run": "ab", "job": "0" * 64, "boot": "1" * 32, "sequence": 1, "id": "2" * 32, "kind": "BYE"}
    assert decode(msgpack.packb(said)).sequence == 1
    with pytest.raises(WireError, match="repeated"):
        unpack_strict(found_by_the_fuzzer(said, ("sequence", 9)))


def test_codes_of_a_client_s_own_choice_do_not_fill_the_memory():
    kept = message_log.MessageLog(None)
    for number in range(10_000):
        kept.failed("client 1", WireError(f"client-{number}", ""))
    kept.failed("client 1", WireError("sequence", ""))
    assert len(kept.failures) <= message_log.CODES + 2
    assert kept.failures["sequence"] == 1
    assert sum(kept.failures.values()) == 10_001


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace('"lr":0.5', '"lr":Infinity'),
        lambda text: text.replace('"rounds":20', '"rounds":' + "9" * 5000),
    ],
)
def test_a_job_with_a_number_that_has_no_canonical_form_is_refused(tmp_path, targets, change: Callable[[str], str]):
    text = targets["job"]._data.decode()  # type: ignore[attr-defined]
    assert change(text) != text
    (RunFolder(tmp_path).protocol).write_text(change(text))
    with pytest.raises(Refused, match="job-invalid"):
        job_reader.read_protocol(RunFolder(tmp_path).protocol)


def test_the_door_prints_what_became_of_the_inputs(capsys, monkeypatch):
    assert fuzz.main(["--inputs", "300", "--target", "chunks"]) == 0
    said = capsys.readouterr()
    assert "chunks: 300 inputs" in said.out
    assert said.err == ""
    monkeypatch.setattr(fuzz, "MOST_RESIDENT", -(1 << 20))
    assert fuzz.main(["--inputs", "1", "--target", "chunks"]) == 1
    assert capsys.readouterr().err == "the process grew by more than -1 MiB\n"
    with pytest.raises(SystemExit):
        fuzz.main(["--target", "nobody"])
    with pytest.raises(SystemExit):
        fuzz.main(["--inputs", "0"])  # it would claim that nothing was found
    assert "--inputs is 0: must be at least 1" in capsys.readouterr().err


def test_the_door_says_how_to_have_a_finding_again(monkeypatch, capsys):
    monkeypatch.setattr(payload.Assembly, "tensors", _unhashed)
    assert fuzz.main(["--inputs", "3000", "--target", "chunks"]) == 1
    assert "--target chunks --seed 0 --first" in capsys.readouterr().err
