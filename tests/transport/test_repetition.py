"""A message is sent again only if its receiver makes no progress, and a quick answer needs no acknowledgement of its task."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from wire_ends import JOB, RUN, Ends, P, make_client, make_server

from dpcfl_net.transport.channel import CONTROLS, RECENT_MESSAGES, SLOW, Channel, Stamp, Stream, new_id, remember
from dpcfl_net.transport.endpoint import Payload
from dpcfl_net.transport.messages import CHUNK, WINDOW, Header, WireError, decode
from dpcfl_net.transport.peers import OpenTask
from dpcfl_net.transport.transcript import Transcript, read

RESEND_S = 0.5
FIELDS = {"kind": "TASK", "round": 1, "task": "train"}


def sent_stream(chunks: int) -> tuple[Channel, Stream]:
    """A channel that has sent a whole message, as far as its window allows, to a peer that says nothing."""
    channel = Channel(Stamp(RUN, JOB), lambda header, data, chunk: True)
    stream = Stream(FIELDS, Payload.of({"models": np.zeros(chunks * CHUNK // 4, "f4")}))
    channel.push(stream)
    assert channel.pump()
    return channel, stream


def test_progress_of_the_receiver_puts_off_the_repetition_also_after_the_last_chunk_was_sent() -> None:
    channel, stream = sent_stream(2)
    assert stream.sent == 2
    task = OpenTask(1, "train", stream)
    stream.moved -= 100.0
    overdue_at = stream.due(RESEND_S)
    assert task.is_overdue("receiving", overdue_at + 0.001, RESEND_S)
    channel.credit(stream.id, 1)
    assert not task.is_overdue("receiving", overdue_at + 0.001, RESEND_S)
    assert stream.due(RESEND_S) > overdue_at + 50.0
    channel.drop(stream.id)
    before = stream.moved
    channel.credit(stream.id, 2)
    assert stream.moved == before  # a forgotten message does not come back


def test_a_repetition_starts_from_the_first_chunk_and_is_sent_once() -> None:
    said: list[Header] = []
    channel = Channel(Stamp(RUN, JOB), lambda header, data, chunk: said.append(header) is None)
    stream = Stream(FIELDS, Payload.of({"models": np.zeros(CHUNK // 2, "f4")}))
    channel.push(stream)
    channel.pump()
    channel.repeat_overdue(stream)
    channel.pump()
    assert [header.kind for header in said] == ["TASK", "CHUNK", "CHUNK"] * 2
    assert [header.index for header in said if header.kind == "CHUNK"] == [0, 1, 0, 1]


def test_few_messages_wait_for_a_peer_that_does_not_read() -> None:
    said: list[Header] = []
    reads = [False]
    channel = Channel(Stamp(RUN, JOB), lambda header, data, chunk: reads[0] and said.append(header) is None)
    for _ in range(2 * CONTROLS):
        channel.say("HEARTBEAT", code="idle")
        channel.pump()
    reads[0] = True
    channel.pump()
    assert len(said) == CONTROLS


def test_the_time_between_repetitions_doubles_three_times() -> None:
    channel, stream = sent_stream(1)
    waits = []
    for _ in range(6):
        waits.append(stream.due(RESEND_S) - stream.moved)
        channel.repeat_overdue(stream)
        channel.pump()
    on_its_way_s = CHUNK / SLOW
    assert waits == pytest.approx([RESEND_S * factor + on_its_way_s for factor in (1, 2, 4, 8, 8, 8)])


def test_credit_for_chunks_that_were_not_sent_opens_no_larger_window() -> None:
    channel, stream = sent_stream(3 * WINDOW)
    assert stream.sent == WINDOW
    channel.credit(stream.id, 3 * WINDOW)
    channel.pump()
    assert stream.sent == 2 * WINDOW


def test_a_message_is_admitted_once_and_never_after_a_newer_one() -> None:
    channel, _ = sent_stream(1)
    header = Stamp(RUN, JOB).header(kind="HEARTBEAT", code="idle")
    channel.admit(replace(header, sequence=3))
    for sequence in (3, 2):
        with pytest.raises(WireError, match=f"message {sequence} after message 3"):
            channel.admit(replace(header, sequence=sequence))
    channel.admit(replace(header, sequence=4))


def test_of_the_ids_that_a_peer_chooses_the_newest_are_kept() -> None:
    known: OrderedDict[int, int] = OrderedDict()
    for key in (*range(RECENT_MESSAGES), 0, RECENT_MESSAGES):
        remember(known, key, key)
    assert (len(known), 0 in known, 1 in known) == (RECENT_MESSAGES, True, False)


def test_chunks_of_a_refused_message_are_dropped_once() -> None:
    channel, _ = sent_stream(1)
    stamp, refused = Stamp(RUN, JOB), new_id()

    def arrives(index: int) -> object:
        return channel.take(stamp.header(kind="CHUNK", parent=refused, index=index), memoryview(b"x"))

    channel.ignore(refused)
    assert arrives(0) is None
    assert arrives(1) is None
    for _ in range(2):  # sent again, and its header did not arrive: the sender has to know
        with pytest.raises(WireError, match="no message expects this chunk"):
            arrives(0)
    assert arrives(1) is None
    with pytest.raises(WireError, match="no message expects this chunk"):
        arrives(1)


def test_credits_come_from_a_slow_transfer_before_half_a_window_has_arrived() -> None:
    said: list[Header] = []
    channel = Channel(Stamp(RUN, JOB), lambda header, data, chunk: said.append(header) is None)
    payload = Payload.of({"models": np.zeros(3 * CHUNK // 4, "f4")})
    stamp = Stamp(RUN, JOB)
    channel.begin(stamp.header(tensors=payload.rows, blake3=payload.blake3, chunks=3, **FIELDS))
    task = channel.assembly.header.id
    channel._credit_due = 0.0  # a second has passed
    assert channel.take(stamp.header(kind="CHUNK", parent=task, index=0), payload.chunks[0]) is None
    assert channel.take(stamp.header(kind="CHUNK", parent=task, index=1), payload.chunks[1]) is None
    channel.pump()
    assert [(header.kind, header.index) for header in said] == [("CREDIT", 1)]


def test_an_answer_acknowledges_its_task(tmp_path: Path) -> None:
    with (
        closing(Transcript(tmp_path / "t", "headers")) as transcript,
        make_server(transcript=transcript) as server,
        make_client(server.address, ack_delay_s=3600.0) as client,
    ):
        ends = Ends(server, client).joined()
        for number in (1, 2):
            server.send_task(0, number, "train", {"models": np.zeros((1, P), "f4")})
            ends.until(lambda number=number: len(ends.tasks(client)) == number)
            client.heartbeat("computing")
            client.send_result(ends.tasks(client)[-1].id, "release", {"update": np.zeros(P, "f4")})
            ends.until(lambda number=number: len(ends.of("result")) == number and not client.pending)
        assert len(ends.tasks(client)) == 2
    up = [decode(record.header).kind for record in read(tmp_path / "t") if record.direction == "up"]
    assert up.count("RESULT") == 2
    assert "ACK" not in up


def test_nothing_is_sent_again_to_a_peer_that_says_nothing() -> None:
    channel, stream = sent_stream(1)
    peer = Stamp(RUN, JOB)
    assert not channel.was_read(stream)
    channel.admit(peer.header(kind="HEARTBEAT", code="idle"))  # may have left before the peer read the message
    assert not channel.was_read(stream)
    channel.admit(peer.header(kind="HEARTBEAT", code="idle"))
    assert channel.was_read(stream)
    channel.repeat_overdue(stream)
    channel.pump()
    assert not channel.was_read(stream)


def test_a_server_that_acknowledges_nothing_makes_a_client_keep_two_results() -> None:
    with make_server() as server, make_client(server.address) as client:
        server._tasks.answer = lambda peer, header: peer.channel.ignore(header.id)
        ends = Ends(server, client).joined()
        sent = []
        for number in range(1, 8):
            server.send_task(0, 1, "small", {})
            ends.until(lambda number=number: len(ends.tasks(client)) == number)
            client.send_result(ends.tasks(client)[-1].id, "release", {"update": np.full(P, number, "f4")})
            sent += [result for result in client._results if result not in sent]
            assert client.pending == min(number, 2)
        assert list(client._results) == sent[-2:]
