"""The codec takes what it made and turns everything else down with a typed error; keys are files that stay private."""

from __future__ import annotations

import math
import re
import tomllib
import tracemalloc

import msgpack
import numpy as np
import psutil
import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from dpcfl_net.core import signing
from dpcfl_net.core import tensors as named
from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.core.types import TensorSpec
from dpcfl_net.transport import keys
from dpcfl_net.transport.header_rules import RULES
from dpcfl_net.transport.messages import (
    CHUNK,
    MAX_HEADER,
    Header,
    TensorTemplate,
    WireError,
    decode,
    encode,
    match_template,
    plain,
    resolve,
)
from dpcfl_net.transport.payload import Assembly, Payload

HEX = "0123456789abcdef"
BASE = {"version": 2, "run": "ab", "job": "0" * 64, "boot": "1" * 32, "sequence": 1, "id": "2" * 32, "kind": "TASK"}


def announced(**tensors: np.ndarray) -> Header:
    payload = Payload.of(tensors)
    return Header(**BASE, task="train", tensors=payload.rows, blake3=payload.blake3, chunks=len(payload.chunks))


def raw(**changes: object) -> bytes:
    return msgpack.packb({**BASE, **changes})


def code_of(data: bytes) -> str:
    with pytest.raises(WireError) as caught:
        decode(data)
    return caught.value.code


hexes = st.text(HEX, min_size=32, max_size=32)
shapes = st.lists(st.integers(0, 300), max_size=3)
rows = st.lists(
    st.tuples(st.from_regex(r"\A[A-Za-z0-9_.]{1,20}\Z"), st.sampled_from(["f4", "i8", "u1", "u4"]), shapes), max_size=4
)


@st.composite
def headers(draw: st.DrawFn) -> Header:
    kind = draw(st.sampled_from(["HELLO", "WELCOME", "TASK", "RESULT", "CHUNK", "CREDIT", "ACK", "HEARTBEAT", "ERROR", "BYE"]))
    code = {"RESULT": "release", "HEARTBEAT": "idle", "ACK": "waiting"}.get(kind, draw(st.from_regex(r"\A[a-z0-9-]{0,64}\Z")))
    found = {name: (name, dtype, tuple(shape)) for name, dtype, shape in draw(rows)} if kind in ("TASK", "RESULT") else {}
    table = tuple((*row, math.prod(row[2]) * int(row[1][1])) for _, row in sorted(found.items()))
    size = sum(row[3] for row in table)
    return Header(
        **{**BASE, "kind": kind, "id": draw(hexes), "boot": draw(hexes), "sequence": draw(st.integers(1, 1 << 62))},
        parent=draw(st.sampled_from(["", "a" * 32])),
        round=draw(st.integers(0, 10**6)),
        task=draw(st.from_regex(r"\A[a-z_]{0,64}\Z")),
        tensors=table,
        blake3="c" * 64 if size else "",
        chunks=-(-size // CHUNK),
        index=draw(st.integers(0, 1 << 20)),
        client=draw(st.integers(-1, 10**6)),
        code=code,
        reason=draw(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=500)),
    )


@settings(max_examples=200)
@given(headers())
def test_round_trip(header: Header) -> None:
    assert decode(encode(header)) == header
    assert len(encode(header)) <= MAX_HEADER


@settings(max_examples=300)
@given(st.binary(max_size=2000))
def test_random_bytes_meet_only_wire_errors(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


numbers = st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.booleans()
nested = st.recursive(
    st.none() | numbers | st.text(max_size=80) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)


@settings(max_examples=300)
@given(st.sampled_from(sorted(RULES)), nested)
def test_any_value_in_any_field_is_valid_or_a_wire_error(name: str, value: object) -> None:
    try:
        header = decode(raw(**{name: value}))
    except WireError:
        return
    assert type(getattr(header, name)) in (str, int, tuple)
    assert header == decode(encode(header))


@settings(max_examples=100)
@given(headers(), st.data())
def test_a_truncated_header_is_refused(header: Header, data: st.DataObject) -> None:
    whole = encode(header)
    assert code_of(whole[: data.draw(st.integers(0, len(whole) - 1))]) == "not-msgpack"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        msgpack.packb({1: 2}),
        msgpack.packb({"run": b"\x00"}),
        msgpack.packb({"run": "x" * 2000}),
        msgpack.packb({"tensors": [0] * 5000}),
        msgpack.packb([1, 2]),
        b"\xa1\xff",
        encode(Header(**BASE)) + b"\x00",
    ],
)
def test_hostile_bytes_are_refused_in_little_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        assert code_of(data) == "not-msgpack"
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


def test_a_header_above_64_kib_is_not_even_parsed() -> None:
    assert code_of(b"\x80" * (MAX_HEADER + 1)) == "header-too-large"


@pytest.mark.parametrize("name", ["noise_multiplier", "clip", "batch_size", "loss", "accuracy", "count", "label", "epsilon"])
def test_no_field_carries_a_privacy_parameter_or_a_figure(name: str) -> None:
    with pytest.raises(WireError, match=name):
        decode(raw(**{name: 1}))


@pytest.mark.parametrize(
    "changes",
    [
        {"sequence": True},
        {"sequence": 1.0},
        {"sequence": float("nan")},
        {"sequence": 0},
        {"sequence": -1},
        {"version": "1"},
        {"round": 10**6 + 1},
        {"run": "../etc"},
        {"kind": "EXEC"},
        {"task": "os.system"},
        {"task": "x" * 65},
        {"reason": "two\nlines"},
        {"reason": "\x9b2J clears a terminal that takes U+009B for an escape sequence"},
        {"reason": "x" * 501},
        {"kind": "RESULT", "code": "perhaps"},
        {"kind": "HEARTBEAT", "code": "loss-0-31"},
        {"kind": "ACK", "code": "loss-0-31"},
        {"kind": "ACK", "tensors": [["a", "f4", [1], 4]], "chunks": 1, "blake3": "c" * 64},
        {"kind": "CHUNK", "tensors": [["a", "f4", [1], 4]], "chunks": 1, "blake3": "c" * 64},
        {"tensors": [["a", "f4", [1 << 32], 1 << 34], ["b", "f4", [1], 4]], "chunks": (1 << 13) + 1, "blake3": "c" * 64},
        {"tensors": [["a", "f4", [1], 4]], "chunks": 2, "blake3": "c" * 64},
        {"tensors": [["a", "f4", [1], 4]], "chunks": 1},
        {"chunks": 1},
        {"blake3": "c" * 64},
        {"tensors": [["a", "f4", [1], 4], ["a", "f4", [1], 4]], "chunks": 1, "blake3": "c" * 64},
        {"tensors": [["b", "f4", [1], 4], ["a", "f4", [1], 4]], "chunks": 1, "blake3": "c" * 64},
        {"tensors": [["a", "f4", [1]]], "chunks": 1, "blake3": "c" * 64},
    ],
)
def test_mistyped_and_contradictory_fields_are_refused(changes: dict[str, object]) -> None:
    assert code_of(raw(**changes)) == "schema"


@pytest.mark.parametrize("size", [0, 4, CHUNK - 4, CHUNK, CHUNK + 4, 3 * CHUNK])
def test_a_header_announces_as_many_chunks_as_its_payload_takes(size: int) -> None:
    chunks = len(Payload.of({"a": np.zeros(size // 4, "f4")}).chunks)
    about = {
        "kind": "RESULT",
        "code": "release",
        "tensors": [["a", "f4", [size // 4], size]],
        "blake3": "c" * (64 * bool(size)),
    }
    assert decode(raw(**about, chunks=chunks)).size == size
    for wrong in (chunks - 1, chunks + 1):
        assert code_of(raw(**about, chunks=wrong)) == "schema"


def test_own_sentences_are_sent_without_control_characters() -> None:
    assert plain("a\nb\x7fc\x9b2J\ud800 é") == "a?b?c?2J? é"


def test_template_takes_exactly_the_pinned_tensors() -> None:
    specs = {"models": TensorSpec("f4", ("M", "p")), "choice": TensorSpec("i8")}
    template = resolve(specs, {"M": (1, 3), "p": 5})
    good = {"models": np.zeros((3, 5), "f4"), "choice": np.array(2)}
    for rows in (1, 3):
        match_template(announced(**{**good, "models": np.zeros((rows, 5), "f4")}).tensors, template)
    for bad in (
        {"models": good["models"]},
        {**good, "extra": np.zeros(1, "f4")},
        {**good, "models": np.zeros((4, 5), "f4")},
        {**good, "models": np.zeros((0, 5), "f4")},
        {**good, "models": np.zeros((3, 6), "f4")},
        {**good, "models": np.zeros(15, "f4")},
        {**good, "models": np.zeros((3, 5), "i8")},
        {**good, "choice": np.zeros(1, "i8")},
    ):
        with pytest.raises(WireError) as caught:
            match_template(announced(**bad).tensors, template)
        assert caught.value.code == "template"


def test_a_message_gives_the_range_of_a_side() -> None:
    """It was "expected f4 [(1, 3), 5]", the inside of the program."""
    template = resolve({"models": TensorSpec("f4", ("M", "p"))}, {"M": (1, 3), "p": 5})
    with pytest.raises(WireError, match=re.escape("tensor models: f4 [4, 5], expected f4 [1 to 3, 5]")):
        match_template(announced(models=np.zeros((4, 5), "f4")).tensors, template)


def test_a_message_tells_missing_tensors_from_unexpected_ones() -> None:
    template = resolve({"model": TensorSpec("f4"), "scale": TensorSpec("f4")}, {})
    sent = {"modl": np.array(0.0, "f4"), "scale": np.array(0.0, "f4")}
    with pytest.raises(WireError, match=r"tensors missing: model; unexpected: modl$"):
        match_template(announced(**sent).tensors, template)


def test_unresolved_side_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        resolve({"u": TensorSpec("f4", ("p",))}, {})
    assert resolve({"u": TensorSpec("f4", ("p", 2))}, {"p": 4}) == {"u": TensorTemplate("f4", (4, 2))}


def put_together(payload: Payload) -> dict[str, np.ndarray]:
    header = Header(**BASE, tensors=payload.rows, blake3=payload.blake3, chunks=len(payload.chunks))
    assembly = Assembly(header)
    done = [assembly.add(index, chunk) for index, chunk in enumerate(payload.chunks)]
    assert done == [False] * (len(payload.chunks) - 1) + [True]
    return assembly.tensors()


def test_payload_across_chunk_borders_comes_back_bit_for_bit_and_aligned() -> None:
    rng = np.random.default_rng(0)
    sent = {
        "a": rng.standard_normal(CHUNK // 4 + 1).astype("f4"),  # b then starts inside a chunk, off 8-byte alignment
        "b": rng.integers(-5, 5, (7, 3)),
        "c": rng.standard_normal((3, CHUNK // 4)).astype("f4"),
        "empty": np.zeros((0, 4), "f4"),
    }
    payload = Payload.of(sent)
    assert [chunk.nbytes for chunk in payload.chunks[:-1]] == [CHUNK] * (len(payload.chunks) - 1)
    found = put_together(payload)
    assert found.keys() == sent.keys()
    for name, array in sent.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype
        assert found[name].flags.aligned
        assert not found[name].flags.writeable


def test_packed_release_travels_as_the_same_bytes() -> None:
    tensors = {"update": np.arange(5, dtype="f4"), "choice": np.array([3])}
    one, two = Payload.of(tensors), Payload.from_packed(named.pack(tensors))
    assert (one.rows, one.blake3) == (two.rows, two.blake3)
    assert [bytes(chunk) for chunk in one.chunks] == [bytes(chunk) for chunk in two.chunks]
    assert Payload.from_packed(b"").chunks == []


@pytest.mark.parametrize(("elements", "shared"), [(30_000, True), (100, False)])
def test_the_only_chunk_of_a_large_message_is_not_copied(elements: int, shared: bool) -> None:
    """A small message is: it would keep all bytes that ZeroMQ received with it."""
    update = np.arange(elements, dtype="f4")
    payload = Payload.of({"update": update})
    assembly = Assembly(Header(**BASE, tensors=payload.rows, blake3=payload.blake3, chunks=1))
    assert assembly.add(0, payload.chunks[0])
    found = assembly.tensors()["update"]
    assert np.array_equal(found, update)
    assert not found.flags.writeable
    assert np.shares_memory(found, update) == shared


@pytest.mark.parametrize(
    ("value", "flip", "code"), [(np.nan, False, "non-finite"), (np.inf, False, "non-finite"), (1.0, True, "hash")]
)
def test_assembly_refuses_what_is_not_finite_or_not_what_was_hashed(value: float, flip: bool, code: str) -> None:
    payload = Payload.of({"a": np.array([0, value], "f4")})
    assembly = Assembly(Header(**BASE, tensors=payload.rows, blake3=payload.blake3, chunks=1))
    assert assembly.add(0, memoryview(b"\x01" * 8) if flip else payload.chunks[0])
    with pytest.raises(WireError) as caught:
        assembly.tensors()
    assert caught.value.code == code


def test_keys_are_private_files_that_are_never_overwritten(tmp_path: object) -> None:
    folder = tmp_path / "keys"  # type: ignore[operator]
    public = keys.write_keypair(folder, "client-3")
    assert (folder / "client-3/client-3.secret").stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert keys.read_public(folder, "client-3") == public
    secret = keys.read_secret(folder, "client-3")
    assert len(secret) == 40
    assert secret != public
    with pytest.raises(ConfigError, match="not overwritten"):
        keys.write_keypair(folder, "client-3")
    assert keys.read_secret(folder, "client-3") == secret
    for mode in (0o640, 0o604, 0o660):
        (folder / "client-3/client-3.secret").chmod(mode)
        with pytest.raises(Refused) as caught:
            keys.read_secret(folder, "client-3")
        assert caught.value.code == "key-permissions"
    (folder / "client-3/client-3.public").write_text("nonsense")
    with pytest.raises(ConfigError):
        keys.read_public(folder, "client-3")
    with pytest.raises(ConfigError):
        keys.read_secret(folder, "nobody")


def test_signature_holds_for_the_very_bytes_and_key_only(tmp_path: object) -> None:
    one, two = tmp_path / "one", tmp_path / "two"  # type: ignore[operator]
    public, other = signing.write_operator_key(one), signing.write_operator_key(two)
    signature = signing.sign(one / "operator.secret", b"a job")
    assert signing.verify(public, b"a job", signature)
    assert not signing.verify(public, b"a jot", signature)
    assert not signing.verify(other, b"a job", signature)
    assert not signing.verify(public, b"a job", signature[:-2] + ("00" if signature[-2:] != "00" else "11"))
    assert not signing.verify("zz", b"a job", signature)
    assert not signing.verify(public, b"a job", "")
    (one / "operator.secret").chmod(0o644)
    with pytest.raises(Refused) as caught:
        signing.sign(one / "operator.secret", b"a job")
    assert caught.value.code == "key-permissions"


def test_norm_and_finiteness_of_large_arrays_agree_with_numpy() -> None:
    array = np.random.default_rng(4).standard_normal((3, 70_001)).astype("f4")
    assert named.norm(array) == pytest.approx(float(np.linalg.norm(array.astype("f8"))), rel=1e-12)
    assert named.norm(np.full(5, 3e38, "f4")) == pytest.approx(3e38 * math.sqrt(5))
    assert named.finite(array)
    for place, value in ((0, np.nan), (65_536, np.inf), (array.size - 1, -np.inf)):
        array.flat[place] = value
        assert not named.finite(array)
        array.flat[place] = 0.0
    bits = np.full(70_000, 0x3F80, "<u2")
    assert named.finite(bits)
    bits[-1] = 0x7F80
    assert not named.finite(bits)


LIST = b"\xdc\x0f\xff" + 4095 * b"\x90"  # 4,095 empty lists
ENDS = {"format": b"\xc1", "cut": b"", "binary": b"\xc4\x01a", "text": b"\xda\x04\x01" + 1025 * b"a", "extension": b"\xd4\x01a"}


@pytest.mark.parametrize("end", [pytest.param(end, marks=[pytest.mark.slow] * (end not in ("format", "cut"))) for end in ENDS])
def test_a_malformed_header_leaves_no_memory_behind(end):
    """msgpack kept what it had read until the mistake: 0.9 MB for each message of 12 kB."""
    data = b"\x81\xa1a\x94" + 3 * LIST + ENDS[end]
    memory = psutil.Process().memory_info().rss
    for _ in range(100):
        with pytest.raises(WireError, match="not-msgpack"):
            decode(data)
    assert psutil.Process().memory_info().rss - memory < 20 << 20


def test_no_msgpack_that_keeps_malformed_headers_can_be_installed():
    (needed,) = [
        name for name in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"] if "msgpack" in name
    ]
    assert tuple(map(int, needed.partition(">=")[2].split("."))) >= (1, 2, 1)
