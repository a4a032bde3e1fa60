"""Computed sizes of messages against the bytes of a connection."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from wire_ends import (
    RUN,
    Cable,
    Ends,
    P,
    _nothing_is_left,  # noqa: F401 - fixtures
    _warm,  # noqa: F401
    make_client,
    make_server,
)

from dpcfl_net.core.tensors import describe
from dpcfl_net.transport.messages import Header, encode
from dpcfl_net.transport.wire_size import control_bytes, message_bytes


@pytest.mark.parametrize("security", ["curve", "none"])
def test_a_task_and_its_result_have_the_computed_bytes(security: Literal["curve", "none"]) -> None:
    rows: list[dict[str, Any]] = []
    models, update = np.zeros((2, P), "f4"), np.zeros(P, "f4")
    with (
        make_server(security=security, on_messages=rows.extend) as server,
        Cable(server.address) as cable,
        make_client(cable.address, security=security) as client,
    ):
        ends = Ends(server, client).joined()
        before = len(cable.up), len(cable.seen), server.bytes_up, server.bytes_down
        server.send_task(0, 3, "train", {"models": models})
        ends.until(lambda: ends.tasks(client))
        client.send_result(ends.tasks(client)[0].id, "release", {"update": update})
        ends.until(lambda: ends.of("result") and not client.pending)
        up = len(cable.up) - before[0]
        down = len(cable.seen) - before[1] - up
    about: dict[str, Any] = {"run": RUN, "round": 3, "task": "train", "security": security}
    task = message_bytes("TASK", describe({"models": models}), **about)
    result = message_bytes("RESULT", describe({"update": update}), **about)
    assert sum(task.parts) == pytest.approx(down, rel=0.01)
    assert sum(result.parts) == pytest.approx(up, rel=0.01)
    assert task.counted == pytest.approx(server.bytes_down - before[3], rel=0.01)
    assert result.counted == pytest.approx(server.bytes_up - before[2], rel=0.01)
    logged = {row["kind"]: row["bytes"] for row in rows}
    assert abs(logged["TASK"] - task.logged) <= 4  # the length of the sequence number
    assert abs(logged["RESULT"] - result.logged) <= 4


def test_control_messages_have_the_bytes_of_their_encoding() -> None:
    header = Header(version=2, run=RUN, job="a" * 64, boot="b" * 32, sequence=9, id="c" * 32, kind="HEARTBEAT", code="waiting")
    assert control_bytes("HEARTBEAT", RUN, code="waiting") == len(encode(header))


def test_a_refusal_has_no_chunks() -> None:
    refusal = message_bytes("RESULT", [], run=RUN, status="refused", reason="budget: none left", security="none")
    assert refusal.counted == refusal.logged == sum(refusal.parts) - 9
    assert len(refusal.parts) == 1
