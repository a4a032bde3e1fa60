"""The transcript gives back what crossed, notices every change, and loses at most its last record to a crash."""

from __future__ import annotations

import hashlib
import math
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest
from full_disk import files_do_not_grow

from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.transport import transcript as transcript_module
from dpcfl_net.transport.channel import Stamp
from dpcfl_net.transport.messages import CHUNK, VERSION, decode, encode
from dpcfl_net.transport.payload import Payload
from dpcfl_net.transport.transcript import FORMAT, Mode, Record, Transcript, messages, read

UPDATE = {"update": np.arange(CHUNK // 2, dtype="f4"), "choice": np.array([1])}


def write(path: Path, mode: Mode = "full") -> list[tuple[bytes, bytes | None]]:
    """A HELLO, a result of three chunks and an ACK; returns what was recorded."""
    stamp, payload = Stamp("ab", "0" * 64), Payload.of(UPDATE)
    result = stamp.header(
        kind="RESULT", code="release", tensors=payload.rows, blake3=payload.blake3, chunks=len(payload.chunks), round=2
    )
    parts = [stamp.header(kind="CHUNK", parent=result.id, index=index) for index in range(len(payload.chunks))]
    sent = [(encode(stamp.header(kind="HELLO")), None), (encode(result), None)]
    sent += [(encode(header), bytes(chunk)) for header, chunk in zip(parts, payload.chunks, strict=True)]
    sent.append((encode(stamp.header(kind="ACK", parent=result.id)), None))
    transcript = Transcript(path, mode)
    for header, chunk in sent:
        transcript.record("up", "client 3", header, None if chunk is None else memoryview(chunk))
    transcript.close()
    return sent


def test_full_transcript_gives_back_every_message(tmp_path: Path) -> None:
    sent = write(tmp_path / "t")
    reader = read(tmp_path / "t")
    found = list(reader)
    assert [(record.header, record.payload) for record in found] == sent
    assert [record.number for record in found] == list(range(len(sent)))
    assert {(record.direction, record.peer) for record in found} == {("up", "client 3")}
    assert all(abs(record.time - time.time()) < 60 for record in found)
    assert not reader.cut
    assert reader.records == len(sent) == 6


def test_headers_leave_payloads_out_and_off_writes_nothing(tmp_path: Path) -> None:
    sent = write(tmp_path / "headers", "headers")
    assert [(record.header, record.payload) for record in read(tmp_path / "headers")] == [(header, None) for header, _ in sent]
    assert (tmp_path / "headers").stat().st_size < 10_000
    write(tmp_path / "off", "off")
    assert not (tmp_path / "off").exists()
    with pytest.raises(ConfigError):
        Transcript(tmp_path / "some", "some")  # type: ignore[arg-type]


def test_a_full_disk_names_the_transcript(tmp_path: Path) -> None:
    transcript = Transcript(tmp_path / "t")
    transcript.record("up", "client 3", encode(Stamp("ab", "0" * 64).header(kind="HELLO")))
    with files_do_not_grow(), pytest.raises(OSError, match="File too large") as found:
        transcript.flush()
    assert found.value.filename == str(tmp_path / "t")
    with files_do_not_grow(), pytest.raises(OSError, match="File too large") as found:
        transcript.close()
    assert found.value.filename == str(tmp_path / "t")


def test_messages_are_put_together_again(tmp_path: Path) -> None:
    write(tmp_path / "full")
    kinds = {header.kind: tensors for _, header, tensors in messages(tmp_path / "full")}
    assert list(kinds) == ["HELLO", "RESULT", "ACK"]
    assert kinds["RESULT"] is not None
    for name, array in UPDATE.items():
        np.testing.assert_array_equal(kinds["RESULT"][name], array)
    write(tmp_path / "headers", "headers")
    assert {header.kind: tensors for _, header, tensors in messages(tmp_path / "headers")}["RESULT"] is None


def test_chunks_that_the_coordinator_refused_are_in_no_message(tmp_path: Path) -> None:
    """A client that sends a chunk twice or too early gets an error, and the right one counts."""
    stamp, payload = Stamp("ab", "0" * 64), Payload.of(UPDATE)
    result = stamp.header(
        kind="RESULT", code="release", tensors=payload.rows, blake3=payload.blake3, chunks=len(payload.chunks)
    )
    with closing(Transcript(tmp_path / "t", "full")) as transcript:
        transcript.record("up", "client 3", encode(result))
        for index in (0, 0, 2, 1, 1, 2):
            header = stamp.header(kind="CHUNK", parent=result.id, index=index)
            transcript.record("up", "client 3", encode(header), payload.chunks[index])
    ((_, _, tensors),) = messages(tmp_path / "t")
    assert tensors is not None
    np.testing.assert_array_equal(tensors["update"], UPDATE["update"])


@pytest.mark.parametrize("direction", ["up", "down"])
def test_only_the_version_of_the_server_says_who_can_read_a_transcript(tmp_path: Path, direction: str) -> None:
    """A client may send any number, and must not make the record of its run unreadable."""
    header = replace(Stamp("ab", "0" * 64).header(kind="HELLO"), version=VERSION + 1)
    with closing(Transcript(tmp_path / "t")) as transcript:
        transcript.record(direction, "client 3", encode(header))
    if direction == "up":
        assert [found.version for _, found, _ in messages(tmp_path / "t")] == [VERSION + 1]
    else:
        with pytest.raises(ConfigError, match=f"wire protocol {VERSION + 1}"):
            list(messages(tmp_path / "t"))


def test_every_changed_bit_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write(path, "headers")
    whole = path.read_bytes()
    honest = list(read(path))
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        reader, found = read(path), list[Record]()
        try:
            for record in reader:
                found.append(record)
        except Refused as error:
            broken = error
            assert broken.code == "transcript-broken"
            assert f"record {len(found)} " in broken.reason
        else:
            assert reader.cut
        assert found == honest[: len(found)]
        assert len(found) < len(honest)


def rewrite(path: Path, change: object) -> None:
    frames = list(msgpack.Unpacker(path.open("rb"), max_buffer_size=1 << 24))
    path.write_bytes(b"".join(msgpack.packb(frame) for frame in change(frames)))  # type: ignore[operator]


@pytest.mark.parametrize(
    "change",
    [
        lambda frames: frames[1:],
        lambda frames: frames[:2] + frames[3:],
        lambda frames: [frames[0], frames[2], frames[1], *frames[3:]],
        lambda frames: [*frames, frames[-1]],
        lambda frames: [*frames[:2], [frames[3][0], frames[2][1]], *frames[3:]],
        lambda frames: [*frames, [b"x", b"y"]],
        lambda frames: [*frames, 7],
    ],
)
def test_removed_swapped_repeated_and_forged_records_are_noticed(tmp_path: Path, change: object) -> None:
    write(tmp_path / "t")
    rewrite(tmp_path / "t", change)
    with pytest.raises(Refused) as caught:
        list(read(tmp_path / "t"))
    assert caught.value.code == "transcript-broken"


def chained(frames: list[list[bytes]]) -> list[list[bytes]]:
    """Compute the hash chain of the records again, as anyone can."""
    digest, found = hashlib.sha256(FORMAT.encode()).digest(), []
    for body, _ in frames:
        digest = hashlib.sha256(digest + body).digest()
        found.append([body, digest])
    return found


@pytest.mark.parametrize("seconds", [1e308, -1.0, math.nan, math.inf])
def test_a_chain_that_was_built_again_with_a_time_that_is_none_is_noticed(tmp_path: Path, seconds: float) -> None:
    """`dpcfl inspect` ended in an OverflowError when it printed the time."""
    write(tmp_path / "t")

    def at_another_time(frames: list[list[bytes]]) -> list[list[bytes]]:
        number, _, *rest = msgpack.unpackb(frames[0][0])
        return chained([[msgpack.packb([number, seconds, *rest]), b""], *frames[1:]])

    rewrite(tmp_path / "t", at_another_time)
    with pytest.raises(Refused, match="record 0 was changed"):
        list(read(tmp_path / "t"))


def test_a_chain_that_was_built_again_without_a_record_has_a_gap_in_its_numbers(tmp_path: Path) -> None:
    sent = write(tmp_path / "t")
    rewrite(tmp_path / "t", chained)
    assert len(list(read(tmp_path / "t"))) == len(sent)
    rewrite(tmp_path / "t", lambda frames: chained([frames[0], *frames[2:]]))
    with pytest.raises(Refused, match="record 1 was changed"):
        list(read(tmp_path / "t"))


def test_a_cut_tail_costs_one_record_and_is_flagged(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write(path)
    whole, reader = path.read_bytes(), read(path)
    records = list(reader)
    for lost in (1, 20, 100):
        path.write_bytes(whole[:-lost])
        cut = read(path)
        assert list(cut) == records[:-1]
        assert cut.cut


@pytest.mark.parametrize("mode", ["headers", "full"])
@pytest.mark.parametrize("zeros", [1, 100, 200_000])
def test_zeros_that_a_crash_of_the_machine_left_at_the_end_cost_the_records_in_them(
    tmp_path: Path, mode: Mode, zeros: int
) -> None:
    path = tmp_path / "t"
    write(path, mode)
    whole, records = path.read_bytes(), list(read(path))
    for lost in (0, 1, 33, 34, 60, 120, len(whole) - 1, len(whole)):
        damaged = whole[: len(whole) - lost] + bytes(zeros)
        path.write_bytes(damaged)
        reader = read(path)
        found = list(reader)
        assert found == records[: len(found)]
        assert reader.cut == (damaged != whole)
        # One time in 256 the byte that is lost was a zero, so that nothing is.
        assert (len(found) == len(records)) == damaged.startswith(whole)
        again = Transcript(path, mode)
        again.record("down", "client 1", b"more")
        again.close()
        reader = read(path)
        assert [record.header for record in reader] == [*(record.header for record in found), b"more"]
        assert not reader.cut


def test_zeros_do_not_hide_a_change_before_them(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write(path, "headers")
    whole = path.read_bytes()
    for place in (0, 10, 100, len(whole) // 2, len(whole) - 40):
        changed = bytearray(whole)
        changed[place] ^= 0x41
        path.write_bytes(changed + bytes(100))
        with pytest.raises(Refused) as caught:
            list(read(path))
        assert caught.value.code == "transcript-broken"
    path.write_bytes(whole[:20] + bytes(100) + whole[120:])
    with pytest.raises(Refused):
        list(read(path))


def test_a_transcript_is_continued_after_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write(path)
    path.write_bytes(path.read_bytes()[:-10])
    again = Transcript(path, "full")
    assert again.records == 5
    again.record("down", "client 1", b"more")
    again.close()
    reader = read(path)
    assert [record.header for record in reader][-1] == b"more"
    assert (reader.records, reader.cut) == (6, False)
    assert reader.digest.hex() == again.head
    changed = bytearray(path.read_bytes())
    changed[100] ^= 1
    path.write_bytes(changed)
    with pytest.raises(Refused):
        Transcript(path, "full")


def test_the_head_tells_a_transcript_that_was_shortened_cleanly(tmp_path: Path) -> None:
    write(tmp_path / "t")
    whole = read(tmp_path / "t")
    list(whole)
    rewrite(tmp_path / "t", lambda frames: frames[:-1])
    shorter = read(tmp_path / "t")
    list(shorter)
    assert shorter.digest != whole.digest
    assert not shorter.cut


def test_records_reach_the_file_within_a_second_or_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(transcript_module, "time", SimpleNamespace(time=time.time, monotonic=lambda: now[0]))
    transcript = Transcript(tmp_path / "t", "headers")
    transcript.record("up", "client 1", b"one")
    now[0] += 0.9
    transcript.flush_if_due()
    assert not list(read(tmp_path / "t"))
    now[0] += 0.2
    transcript.flush_if_due()
    assert [record.header for record in read(tmp_path / "t")] == [b"one"]
    transcript.close()


def test_what_is_recorded_decodes(tmp_path: Path) -> None:
    write(tmp_path / "t")
    assert [decode(record.header).kind for record in read(tmp_path / "t")] == ["HELLO", "RESULT", *["CHUNK"] * 3, "ACK"]
