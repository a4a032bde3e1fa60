"""The decoder of headers accepts and refuses exactly as a declared schema of the same fields does."""

from __future__ import annotations

from dataclasses import asdict, fields
from random import Random
from typing import Annotated, Any, Literal

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dpcfl_net.adversaries import fuzz_bytes
from dpcfl_net.transport import messages
from dpcfl_net.transport.header_rules import MAX_PAYLOAD, RULES
from dpcfl_net.transport.messages import Header, WireError, decode, encode, unpack_strict

Whole = Annotated[int, Field(ge=0, le=MAX_PAYLOAD)]
Id = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.]{1,128}$")]
Shape = Annotated[tuple[Whole, ...], Field(strict=False, max_length=8)]
Row = Annotated[tuple[Name, Literal["f4", "i8", "f2", "b2", "i1", "i4", "u1", "u4"], Shape, Whole], Field(strict=False)]


class Declared(BaseModel):
    """The rules of a header's fields, one by one."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    version: Annotated[int, Field(ge=0, le=1 << 31)]
    run: Annotated[str, Field(pattern=r"^[0-9a-f]{1,64}$")]
    job: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    boot: Id
    sequence: Annotated[int, Field(ge=1, le=1 << 62)]
    id: Id
    kind: Literal["HELLO", "WELCOME", "TASK", "RESULT", "CHUNK", "CREDIT", "ACK", "HEARTBEAT", "ERROR", "BYE"]
    parent: Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")] = ""
    round: Annotated[int, Field(ge=0, le=10**6)] = 0
    task: Annotated[str, Field(pattern=r"^[a-z_]{0,64}$")] = ""
    tensors: Annotated[tuple[Row, ...], Field(strict=False, max_length=64)] = ()
    blake3: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    chunks: Whole = 0
    index: Whole = 0
    client: Annotated[int, Field(ge=-1, le=10**6)] = -1
    code: Annotated[str, Field(pattern=r"^[a-z0-9-]{0,64}$")] = ""
    reason: Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]{0,500}$")] = ""


def outcome_of_the_declaration(data: bytes) -> dict[str, Any] | str:
    """Return the fields, or the code of the refusal."""
    try:
        declared = Declared.model_validate(unpack_strict(data))
        header = Header(**declared.model_dump())
        messages._check_payload(header)
        allowed = messages.CODES.get(header.kind)
        if allowed and header.code not in allowed:
            return "schema"
    except ValidationError:
        return "schema"
    except WireError as error:
        return error.code
    return declared.model_dump()


def outcome(data: bytes) -> dict[str, Any] | str:
    try:
        return asdict(decode(data))
    except WireError as error:
        return error.code


def test_the_fields_and_their_order_are_the_declared_ones() -> None:
    declared = {name: None if field.is_required() else field.default for name, field in Declared.model_fields.items()}
    assert [field.name for field in fields(Header)] == list(declared) == list(RULES)
    assert [field.default for field in fields(Header)][7:] == list(declared.values())[7:]


@settings(max_examples=1500)
@given(st.randoms(use_true_random=False))
def test_valid_and_mutated_headers_meet_the_declared_outcome(rng: Random) -> None:
    data = fuzz_bytes.header(rng)
    found = outcome(data)
    assert found == outcome_of_the_declaration(data), data
    if isinstance(found, dict):
        assert encode(decode(data)) == msgpack.packb(Declared(**found).model_dump(exclude_defaults=True))


BASE = {"version": 2, "run": "ab", "job": "0" * 64, "boot": "1" * 32, "sequence": 1, "id": "2" * 32, "kind": "TASK"}
EDGES = st.sampled_from(
    (*fuzz_bytes.WHOLE, *fuzz_bytes.WORDS, *fuzz_bytes.KINDS, True, None, 1.0, [], {}, [["a", "f4", [], 4]])
)
ALPHABETS = st.sampled_from(("0123456789abcdef", "abc_", "a-9", "AZaz09_.", "\x1f \x7fé\n", "٣߀"))


@settings(max_examples=1500)
@given(
    st.sampled_from(list(RULES)),
    EDGES | st.integers(-(1 << 63), (1 << 64) - 1) | ALPHABETS.flatmap(lambda letters: st.text(letters, max_size=66)),
)
@example("id", "2" * 32 + "\n")
@example("run", "a\n")
@example("task", "train\n")
@example("reason", "x" * 500 + "\n")
@example("id", "A" * 32)
@example("id", "٣" * 32)
@example("sequence", True)
@example("reason", "\u2028")
def test_any_value_in_any_field_meets_the_declared_outcome(name: str, value: object) -> None:
    data = msgpack.packb({**BASE, name: value})
    assert outcome(data) == outcome_of_the_declaration(data), data


ROWS = (
    [[f"a{number:02}", "f4", [1], 4] for number in range(64)],
    [[f"a{number:02}", "f4", [1], 4] for number in range(65)],
    [["a", "f4", [1] * 9, 4]],
    [["a", "f4", [1] * 8, 4]],
    [["a", "f4", 1, 4]],
    [["a", "f4", [True], 4]],
    [["a", "f4", [1.0], 4]],
    [["a", "f4", [1], 4, 0]],
    [["", "f4", [1], 4]],
    [["a\n", "f4", [1], 4]],
    [["a", ["f4"], [1], 4]],
    [["a", "c8", [1], 8]],
    [["a", "f", [1], 4]],
    [["a", "f4", "1", 4]],
    [["a", "f4", {}, 4]],
    [["a", "f4", [(1 << 34) + 1], 4]],
    [{"a": 1}],
    ["abcd"],
    "abcd",
    {},
)


@pytest.mark.parametrize("rows", ROWS, ids=range(len(ROWS)))
def test_rows_of_tensors_meet_the_declared_outcome(rows: object) -> None:
    for more in ({"blake3": "c" * 64, "chunks": 1}, {}):
        data = msgpack.packb({**BASE, "tensors": rows, **more})
        assert outcome(data) == outcome_of_the_declaration(data), data
