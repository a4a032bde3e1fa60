"""docs/reference/wire-protocol.md against the code: fields, kinds, limits, types and codes."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path

import msgpack
import pytest
from conftest import ROOT
from wire_page import TEXT, rows, section

import dpcfl_net.algorithms
from dpcfl_net.algorithms import base
from dpcfl_net.core.plugins import load
from dpcfl_net.core.tensors import DTYPES
from dpcfl_net.federation.capabilities import declared_steps
from dpcfl_net.federation.secure.keys import BOX_BYTES, KEYS_BYTES, SIGNATURE_BYTES
from dpcfl_net.federation.secure.shamir import PRIME, SHARE_BYTES
from dpcfl_net.federation.secure.stages import STAGES
from dpcfl_net.federation.secure.terms import COMPLETE, WITNESSES
from dpcfl_net.transport import channel, client, dialed, guard, header_rules, messages, observer_inbox, server, transcript
from dpcfl_net.transport.client_events import ClientTimes
from dpcfl_net.transport.header_rules import KINDS, RULES
from dpcfl_net.transport.messages import CODES, PHASES, STATUSES, Header, WireError
from dpcfl_net.transport.observer_notes import MAX_NOTE, MOST_CLIENTS, MOST_SPANS, Note


def test_the_fields_of_a_header():
    found = rows(section("Headers"), "field")
    assert list(found) == [field.name for field in fields(Header)] == [*RULES]
    for field in fields(Header):
        default = found[field.name][1].strip("`")
        if field.default is MISSING:
            assert default == "required"
        else:
            assert default == {"": '""', (): "[]"}.get(field.default, str(field.default))


def test_the_kinds_of_messages():
    found = rows(section("Kinds"), "kind")
    assert set(found) == KINDS
    named = {name for cells in found.values() for name in re.findall(r"`(\w+)`", cells[1])}
    assert named == {field.name for field in fields(Header) if field.default is not MISSING}
    assert set(re.findall(r"`([a-z]+)`", rows(section("Kinds"), "`code` of")["RESULT"][0])) == set(STATUSES)
    phases = rows(section("Kinds"), "`code` of")["HEARTBEAT, ACK of a task"][0]
    assert set(re.findall(r"`([a-z]+)`", phases)) == set(PHASES)
    assert set(CODES) == {"RESULT", "HEARTBEAT", "ACK"}, "the page has a row for each kind with its own codes"


@pytest.mark.parametrize(
    ("limit", "value"),
    [
        ("header", messages.MAX_HEADER),
        ("chunk", messages.CHUNK),
        ("frame", messages.MAX_FRAME),
        ("tensors of one message", header_rules.MAX_TENSORS),
        ("sides of a tensor", header_rules.MAX_SIDES),
        ("list in a header", messages.MAX_ITEMS),
        ("chunks that the receiver has not confirmed", messages.WINDOW),
        ("broken messages of a connection, before it is cut", server.FAILURES),
        ("bytes that a connection may send ahead of complete messages", guard.UNREAD_LIMIT),
        ("connections that have sent no message, with CURVE", guard.SPARE),
        ("connections under one key that have sent a message", guard.MOST_OF_KEY),
    ],
)
def test_limits(limit: str, value: int):
    said = rows(section("Limits"), "limit")[limit][0]
    assert re.match(r"[0-9,]+", said)[0].rstrip(",") == f"{value:,}"


def test_numbers_in_the_text():
    assert rows(section("Limits"), "limit")["payload of one message"] == ["2^34 bytes"]
    assert header_rules.MAX_PAYLOAD == 1 << 34
    assert f"`version` of each header). Transcript format: `{transcript.FORMAT}`" in TEXT
    assert f"Protocol version: {messages.VERSION} " in TEXT
    assert f"at most {channel.REPEATS} times" in TEXT
    assert f"after each {messages.WINDOW // 2}th chunk" in TEXT
    assert f"may have {MAX_NOTE:,} bytes, and its lists {MOST_CLIENTS:,} items" in section("Notes to the observer")
    ahead = f"{observer_inbox.NOTES_UNREAD:,} bytes ahead of complete notes, and the bytes of the largest MODELS of"
    assert ahead in section("Notes to the observer")
    assert f"at most {MOST_SPANS} |" in rows(section("Notes to the observer"), "field")["spans"][0] + " |"


@pytest.mark.parametrize(
    ("limit", "unit", "fill"),
    [
        ("text in a header", "bytes", lambda size: {"reason": "x" * size}),
        ("list in a header", "items", lambda size: {"tensors": [0] * size}),
        ("map in a header", "keys", lambda size: {str(key): 0 for key in range(size)}),
    ],
)
def test_limits_of_the_decoder(limit: str, unit: str, fill: Callable[[int], dict[str, object]]):
    said, _, named = rows(section("Limits"), "limit")[limit][0].partition(" ")
    most = int(said.replace(",", ""))
    assert named == unit
    messages.unpack_strict(msgpack.packb(fill(most)))
    with pytest.raises(WireError, match="not-msgpack"):
        messages.unpack_strict(msgpack.packb(fill(most + 1)))


def test_the_names_of_tensors():
    (most,) = re.findall(r"Names have 1 to (\d+) ASCII letters, digits, `_` and `.`; they", section("Payloads"))
    for name, fits in (("aZ9_.", True), ("x" * int(most), True), ("x" * (int(most) + 1), False), ("", False), ("a-b", False)):
        assert RULES["tensors"].fits([[name, "f4", [1], 4]]) == fits, name


def test_times_of_a_session():
    times = ClientTimes()
    text = " ".join(TEXT.split())
    assert client.HELLO_S == channel.CREDIT_S == 1
    assert "repeated each second until it is answered" in text
    assert "at least each second while chunks arrive" in text
    assert f"the sender's phase, each {times.heartbeat_s:g} s" in text
    assert f"sends ACK with its phase within {1000 * times.ack_delay_s:g} ms" in text
    assert f"ends after {dialed.HANDSHAKES} failures in a row" in text
    assert f"without a handshake within {times.handshake_limit_s:g} s ends too" in text
    assert f"the client tries for {times.duplicate_grace_s:g} s" in text
    waits = [times.resend_s * 2 ** min(repeats, channel.DOUBLINGS) for repeats in range(5)]
    assert "after {:g} s, then {:g}, {:g}, {:g}, {:g} ...".format(*waits) in text
    assert channel.SLOW == 1 << 20
    assert f"1 MiB/s ({messages.WINDOW * messages.CHUNK >> 20} MiB at most)" in text


def test_types_of_tensors():
    found = rows(section("Payloads"), "type")
    assert {code: int(cells[1]) for code, cells in found.items()} == {code: dtype.itemsize for code, dtype in DTYPES.items()}


def test_secure_sums():
    stages = {cells[0].strip("`").partition("`")[0]: cells[1:] for cells in rows(section("Secure sums"), "stage").values()}
    assert set(STAGES) <= set(stages)
    for kind, step in STAGES.items():
        takes, gives = stages[kind]
        assert set(re.findall(r"`(\w+)`", takes)) == set(step.takes)
        assert set(re.findall(r"`(\w+)`", gives)) == set(step.gives)
    sizes = f"`keys` u1 ({KEYS_BYTES})", f"(K, {BOX_BYTES})", f"u1 ({SIGNATURE_BYTES})", f"(K, {SHARE_BYTES})"
    assert [size for size in sizes if size not in section("Secure sums")] == []
    assert f"min(n, {WITNESSES} + 4 C)" in TEXT
    assert f"all of the group up to {COMPLETE} clients" in TEXT
    assert PRIME == 2**256 + 297
    assert "2^256 + 297" in TEXT


def test_the_fields_of_a_note():
    found = [name for cell in rows(section("Notes to the observer"), "field") for name in re.findall(r"\w+", cell)]
    assert sorted(found) == sorted(Note.model_fields)


def test_the_tasks_of_every_algorithm():
    tasks = rows(section("Tensors of tasks and releases"), "task")
    documented = {name for cell in tasks for name in re.findall(r"`?(\w+)`?(?: of|,|$)", cell)} & set(
        re.findall(r"[a-z_]+", " ".join(tasks))
    )
    folder = Path(dpcfl_net.algorithms.__file__).parent
    declared = set(STAGES)
    for path in folder.glob("*.py"):
        names = re.findall(r"^class (\w+)\(", path.read_text(), re.MULTILINE)
        for name in names:
            found = load("algorithm.name", f"dpcfl_net.algorithms.{path.stem}:{name}")
            if isinstance(found, type) and issubclass(found, base.Algorithm):
                declared |= set(declared_steps(found))
    assert declared - documented == set()


REFUSING = (
    "transport",
    "federation/gate.py",
    "federation/planned_slots.py",
    "federation/group_messages.py",
    "federation/secure",
)
LOCAL = {
    "authenticator",
    "transcript-broken",
    "ledger-broken",
    "ledger-foreign",
}  # errors of one process, which it does not send


def test_every_code_of_a_refusal():
    package = ROOT / "dpcfl_net"
    paths = [
        path for name in REFUSING for path in ([package / name] if name.endswith(".py") else (package / name).rglob("*.py"))
    ]
    codes = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Refused", "WireError"):
                codes |= {node.args[0].value} if isinstance(node.args[0], ast.Constant) else set()
    assert len(codes) > 30
    listed = {code for table in section("Refusals").splitlines() for code in re.findall(r"`([a-z-]+)`", table)}
    assert codes - LOCAL - listed == set()
    assert {"lost", "stale"} <= set(re.findall(r"`([a-z-]+)`", section("Kinds")))
