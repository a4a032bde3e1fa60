"""Tables as text: equal columns, and columns that do not fit into a terminal below the others."""

from __future__ import annotations

from dpcfl_net.results.tables import Table

TABLE = Table(
    "Audit",
    ["view", "score", "in, missed", "out, accused", "(a)", "the claim"],
    [["every step", "likelihood", "683/2504", "672/2496", "1.55", "stands"], ["server", "two clients", "433/1243", "", "1.00", "BROKEN"]],
    keys=2,
)  # fmt: skip


def test_columns_have_equal_width():
    lines = [
        "view        score        in, missed  out, accused  (a)   the claim",
        "every step  likelihood   683/2504    672/2496      1.55  stands",
        "server      two clients  433/1243                  1.00  BROKEN",
    ]
    assert TABLE.lines() == lines
    assert TABLE.lines(len(lines[0])) == lines


def test_columns_that_do_not_fit_follow_below_with_those_that_tell_rows_apart():
    assert TABLE.lines(50) == [
        "view        score        in, missed  out, accused",
        "every step  likelihood   683/2504    672/2496",
        "server      two clients  433/1243",
        "",
        "view        score        (a)   the claim",
        "every step  likelihood   1.55  stands",
        "server      two clients  1.00  BROKEN",
    ]


def test_a_table_is_left_whole_where_a_column_does_not_fit_in_any_case():
    assert TABLE.lines(30) == TABLE.lines()


def test_a_table_without_rows_has_its_titles():
    assert Table("", ["a", "b"], []).lines(80) == ["a  b"]
