"""YAML as configurations, overrides and hosts files have it: YAML 1.2's numbers and words, and copies that read back the same."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpcfl_net.core import yaml_file
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.yaml_file import dump, parse


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4), ("1E5", 1e5), ("-1.5e+3", -1500.0), (".5", 0.5), ("5.", 5.0), ("+.5e1", 5.0),
        ("7", 7), ("-7", -7), ("+7", 7), ("007", 7), ("0o17", 15), ("0x1F", 31), ("2_000", 2000), ("1_0.5", 10.5),
        (".inf", math.inf), ("-.INF", -math.inf),
        ("true", True), ("False", False), ("null", None), ("~", None), ("", None), ("a:", {"a": None}),
        ("on", "on"), ("off", "off"), ("yes", "yes"), ("No", "No"), ("y", "y"),
        ("1:30", "1:30"), ("2024-01-01", "2024-01-01"), ("0b1", "0b1"), ("1e", "1e"), ("_1", "_1"), ("tRue", "tRue"), (".", "."),
        ("'1'", "1"), ('"1e-4"', "1e-4"), ("!!str 1", "1"), ("! 1", "1"), ("|\n  a\n  b\n", "a\nb\n"),
        ("{1: a, true: b, null: c}", {"1": "a", "true": "b", "null": "c"}),
        ("a: &x {b: 1}\nc: *x", {"a": {"b": 1}, "c": {"b": 1}}),
        ("a: &x [1, &y 2]\nb: *x\nc: *y", {"a": [1, 2], "b": [1, 2], "c": 2}),
        ("a: &x {b: 1, c: 2}\nd: {<<: *x, c: 3}", {"a": {"b": 1, "c": 2}, "d": {"b": 1, "c": 3}}),
        ("a: {<<: [{b: 1}, {b: 2, c: 3}]}", {"a": {"b": 1, "c": 3}}),
        ("a: {'<<': {b: 1}}", {"a": {"<<": {"b": 1}}}),
    ],
)  # fmt: skip
def test_values(text, value):
    found = parse(text, "test")
    assert found == value
    assert type(found) is type(value)


def test_nan_is_a_number():
    assert math.isnan(parse(".nan", "test"))


def test_an_alias_is_a_copy():
    found = parse("a: &x {b: 1}\nc: *x", "test")
    found["a"]["b"] = 2
    assert found["c"]["b"] == 1


@pytest.mark.parametrize("depth", [yaml_file.MOST_DEPTH, yaml_file.MOST_DEPTH + 1])
def test_the_limit_of_depth_holds_through_aliases(depth):
    """Each anchor is one deeper than the one before it, and the last is within the mapping of all."""
    lines = ["a0: &a0 [x]", *(f"a{k}: &a{k} [*a{k - 1}]" for k in range(1, depth - 2))]
    if depth <= yaml_file.MOST_DEPTH:
        assert parse("\n".join(lines), "test")["a0"] == ["x"]
    else:
        with pytest.raises(ConfigError, match="nested more than 32 deep"):
            parse("\n".join(lines), "test")


def test_a_file_is_named_with_its_line(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("a: 1\nb: 2\na: 3\n")
    with pytest.raises(ConfigError) as refused:
        yaml_file.load(path)
    assert refused.value.problems == [f"{path}, line 3: key 'a' is given twice, first in line 1"]


def test_a_byte_order_mark_is_no_key(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert yaml_file.load(path) == {"a": 1}


TRICKY = [
    "1e5",
    "off",
    "yes",
    "1:30",
    "0o7",
    "0x1f",
    ".inf",
    "1_000",
    "null",
    "~",
    "",
    " x",
    "- a",
    "a: b",
    "#x",
    "<<",
    "2024-01-01",
]
texts = st.one_of(st.sampled_from(TRICKY), st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=20))
scalars = st.one_of(texts, st.integers(-(10**30), 10**30), st.floats(allow_nan=False), st.booleans(), st.none())
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=15
)


@given(values, st.sampled_from([None, True, False]))
@settings(max_examples=150)
def test_what_is_written_reads_back_the_same(value, flow):
    assert parse(dump(value, flow=flow), "copy") == value


def problems_of(text: str) -> list[str]:
    try:
        parse(text, "test")
    except ConfigError as error:
        return error.problems
    return []


@given(st.text(alphabet="ab01:-{}[]&*!<>'\"#|%@,?~.e \n", max_size=60))
@settings(max_examples=300)
def test_any_text_is_a_value_or_a_sentence(text):
    assert [problem for problem in problems_of(text) if not problem.startswith("test") or "\n" in problem] == []
