"""Earlier results of a figure: lines that stand for runs, published verdicts judged again, and more seeds."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from conftest import ROOT, dpcfl
from scipy import stats
from test_reproduce_runs import BEST, HONEST, MadeUp

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.reproduce import rr_mechanisms
from dpcfl_net.reproduce.base import (
    CLAIMS,
    UNCOUNTED_LOOK,
    Earlier,
    OutOfTime,
    ReproductionResult,
    find,
    folder_name,
    registry,
    write,
)
from dpcfl_net.reproduce.claims import Claim, Comparison, Decision, judge
from dpcfl_net.reproduce.planned import SETTINGS, read_earlier, read_rows, settings_of
from dpcfl_net.reproduce.r_dpcfl_accuracy import CONFIGS

NOTHING = Earlier()
MEASURED = ROOT / "docs" / "measured"
PUBLISHED = [
    name
    for name, figure in registry().items()
    if figure.run_columns and (MEASURED / folder_name(figure, "laptop") / "data.csv").exists()
]


def judged_from(name, folder):
    """Judge the lines of a folder without any run."""
    return find(name)().compute(MadeUp({}, asked_seeds=0, known=read_earlier(folder, find(name))))


def shares_by_budget() -> dict[float, dict[str, float]]:
    """Published shares of right labels, by epsilon and mechanism."""
    found: dict[float, dict[str, float]] = {}
    for row in read_rows(MEASURED / "rr-cluster-labels-laptop" / "data.csv"):
        if row["mechanism"]:
            found.setdefault(row["budget"], {})[row["mechanism"]] = row["right"] / 100
    return found


@pytest.fixture
def published_shares(monkeypatch):
    """No computation of shares, which takes ten seconds; `test_published_shares_are_those_of_the_computation` does it."""
    monkeypatch.setattr(rr_mechanisms, "right_labels", shares_by_budget().__getitem__)
    monkeypatch.setattr(rr_mechanisms, "right_beside_sums", lambda budget: {})


@pytest.mark.slow
def test_published_shares_are_those_of_the_computation():
    for budget, published in shares_by_budget().items():
        computed = rr_mechanisms.right_labels(budget) | rr_mechanisms.right_beside_sums(budget)
        assert published == pytest.approx(computed, rel=1e-9)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_verdicts_follow_from_the_published_lines(name, published_shares):
    folder = MEASURED / folder_name(find(name), "laptop")
    printed = json.loads((folder / "claims.json").read_text())["claims"]
    outcome = judged_from(name, folder)
    assert [(one.claim.text, one.claim.measured, one.verdict, one.basis) for one in outcome.judged()] == [
        (claim["text"], claim["measured"], claim["verdict"], claim["basis"]) for claim in printed
    ]
    assert not outcome.partial


def variants(seeds, known=NOTHING, **more):
    context = MadeUp(BEST, ("r-dpcfl",), asked_seeds=seeds, known=known, **more)
    return find("r-dpcfl/variants")().compute(context), context


def test_only_runs_without_an_earlier_line_are_run(tmp_path):
    first, context = variants(3)
    assert (first.looks, len(context.asked), first.runs) == (1, 15, 15)
    write(find("r-dpcfl/variants"), first, MadeUp(BEST, asked_seeds=3, folder=tmp_path))
    known = read_earlier(tmp_path)
    assert known.looks == 1
    assert [dict(row) for row in known.rows] == first.rows

    again, context = variants(3, known)
    assert (again.rows, context.asked, again.looks) == (first.rows, [], 1)
    assert [one.document() for one in again.judged()] == [one.document() for one in first.judged()]

    more, context = variants(5, known)
    assert {axes["seed"][0] for _, axes in context.asked} == {3, 4}
    assert (more.looks, more.runs, more.planned_runs) == (2, 25, 25)
    assert more.rows == variants(5)[0].rows  # made-up runs repeat: the order is that of one computation
    assert "15 runs come from an earlier data.csv." in more.notes
    fewer, _ = variants(1, known)  # earlier lines of other seeds count
    assert sorted(map(str, fewer.rows)) == sorted(map(str, first.rows))


def test_an_earlier_line_that_names_no_run_or_occurs_twice_is_refused():
    rows = variants(3)[0].rows
    with pytest.raises(ConfigError) as refused:
        variants(4, Earlier([{**rows[0], "variant": "r-dpfcl"}, *rows[1:]], 1))
    assert "--earlier: no run of this figure has the line of variant r-dpfcl, seed 0: variant must be one of " in str(
        refused.value
    )
    with pytest.raises(ConfigError, match="--earlier: variant r-dpcfl, seed 0 has the same line twice: remove one"):
        variants(4, Earlier([*rows, dict(rows[0])], 1))


def test_a_second_look_needs_half_the_p_value(tmp_path):
    spread = {"r-dpcfl": 0.012}

    def told(looks):
        known = Earlier(variants(4, varies=spread)[0].rows, looks)
        outcome, _ = variants(5, known, varies=spread)
        write(find("r-dpcfl/variants"), outcome, MadeUp(BEST, folder=tmp_path))
        claims = json.loads((tmp_path / "claims.json").read_text())
        assert claims["looks"] == looks + 1
        return [(claim["p_holm"], claim["verdict"]) for claim in claims["claims"]]

    for looks in (1, 2, 3):
        level = 0.05 / 2**looks
        assert {verdict != "undecided" for p, verdict in told(looks) if p <= level} <= {True}
        assert {verdict for p, verdict in told(looks) if p > level} <= {"undecided"}
    assert any(0.05 / 8 < p <= 0.05 for p, _ in told(3))
    page = (tmp_path / "report.html").read_text()
    assert "This is look 4, with 0.9938 instead of 0.95 as confidence." in page


def test_a_decided_claim_keeps_its_verdict_while_its_seeds_are_the_same(tmp_path):
    """Six seeds at epsilon 5, and then at epsilon 3, do not make a claim about epsilon 5 undecided."""

    def accuracy(known=NOTHING, seeds=None, epsilon=None):
        figure, context = find("r-dpcfl/fig6"), MadeUp(HONEST, known=known, asked_seeds=seeds, folder=tmp_path)
        outcome = figure().compute(context)
        if epsilon:
            outcome.rows = [row for row in outcome.rows if row["epsilon"] == epsilon]
            outcome = figure().judge(outcome.rows, CONFIGS["laptop"])
        write(figure, outcome, context)
        return {one.claim.text: one for one in outcome.judged()}

    first = {text: one for text, one in accuracy(epsilon=5).items() if "mnist" in text}
    known = read_earlier(tmp_path)
    assert set(known.decided) == {text for text, one in first.items() if one.verdict in ("holds", "does not hold")}

    second = accuracy(known)
    assert len(second) > len(first)
    for text, one in first.items():
        kept = text in known.decided
        assert (second[text].earlier_look, second[text].verdict == one.verdict) == (1 if kept else None, True)
        if kept:
            assert second[text].basis == one.basis + " at look 1"
    assert any(one.verdict == "holds" and "epsilon 3" in text and one.earlier_look is None for text, one in second.items())

    again = accuracy(read_earlier(tmp_path))  # without a new run
    assert {text: one.document() for text, one in again.items()} == {text: one.document() for text, one in second.items()}
    more = accuracy(read_earlier(tmp_path), seeds=8)
    assert not any(one.earlier_look for one in more.values())  # each claim has new seeds


@pytest.mark.slow
def test_looks_that_keep_decisions_are_together_wrong_as_seldom_as_said():
    """Six true nulls of four seeds, of which half get four more: decided in 2 looks with probability at most 5 + 2.5 %."""
    rng, trials, wrong = np.random.default_rng(11), 2000, 0
    for _ in range(trials):
        values = rng.normal(size=(6, 8)) + rng.normal(size=8)  # claims share seeds
        first = judge([claim(row[:4], index) for index, row in enumerate(values)])
        decided = {
            one.claim.text: Decision(1, one.verdict, one.p_holm, [part.document() for part in one.claim.comparisons])
            for one in first
            if one.verdict != "undecided"
        }
        later = [claim(row[: 8 if index < 3 else 4], index) for index, row in enumerate(values)]
        second = judge(later, 1 - 0.05 / 2, decided)
        wrong += any(one.verdict != "undecided" for one in [*first, *second])
    assert stats.binom.sf(wrong - 1, trials, 0.075) > 1e-6
    assert wrong  # the simulation can find errors


def claim(values, index):
    return Claim(f"claim {index}", "", [Comparison(dict(enumerate(map(float, values))))])


def test_lines_of_other_settings_are_refused():
    rows = [{**row, SETTINGS: "0" * 12} if row["seed"] == 1 else row for row in variants(2)[0].rows]
    with pytest.raises(
        ConfigError, match=r"the line of variant r-dpcfl, seed 1 has the settings 000000000000, and this version plans"
    ):
        variants(2, Earlier(rows, 1))


def test_lines_of_other_settings_are_refused_also_for_a_seed_that_is_not_planned():
    """They counted beside those of the planned seeds: a claim was judged over runs of two versions."""
    rows = [{**row, SETTINGS: "0" * 12} if row["seed"] == 2 else row for row in variants(3)[0].rows]
    with pytest.raises(
        ConfigError, match=r"the line of variant r-dpcfl, seed 2 has the settings 000000000000, and this version plans"
    ):
        variants(2, Earlier(rows, 1))


def test_settings_are_those_of_the_configuration_and_the_axes_whatever_the_seed(tmp_path):
    """With the seed among them, a line would count for no other seed; without one of the others, lines of another run would count."""
    found: dict[str, set[str]] = {}
    for row in variants(2)[0].rows:
        found.setdefault(row["variant"], set()).add(row[SETTINGS])
    assert {len(settings) for settings in found.values()} == {1}
    assert len(set.union(*found.values())) == len(found) == 5
    texts = {"plain": "rounds: 2\n", "noted": "# twice\nrounds: 2\n", "other": "rounds: 3\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    plain, noted, other = (settings_of((tmp_path / name, {"seed": (0,)})) for name in texts)
    assert plain == noted != other


def test_lines_without_settings_are_counted_in_the_notes():
    rows = [{key: value for key, value in row.items() if key != SETTINGS or row["seed"]} for row in variants(2)[0].rows]
    note = "10 runs come from an earlier data.csv; it does not say with which settings 5 of them ran."
    assert note in variants(2, Earlier(rows, 1))[0].notes


def test_a_figure_that_needs_all_its_runs_waits_for_the_missing_ones():
    context = MadeUp(BEST, asked_seeds=3, missing=frozenset({"f-cdpfl"}), known=Earlier(variants(2)[0].rows, 1))
    with pytest.raises(OutOfTime):
        find("r-dpcfl/variants")().compute(context)


def test_every_figure_of_complete_runs_names_its_runs():
    for figure in registry().values():
        assert bool(figure.run_columns) == figure.complete_runs
        assert not figure.run_columns or figure.run_columns[-1] == "seed"


def test_values_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("a,b,c,d,e,f,settings\n1,1.0,True,,B=4,1e-05,415852964182\n-3,nan,False,x y,07a,inf,\n")
    first, second = read_rows(path)
    assert first == {"a": 1, "b": 1.0, "c": True, "d": None, "e": "B=4", "f": 1e-05, "settings": "415852964182"}
    assert [type(value) for value in first.values()] == [int, float, bool, type(None), str, float, str]
    assert str(second) == "{'a': -3, 'b': nan, 'c': False, 'd': 'x y', 'e': '07a', 'f': inf, 'settings': None}"


def test_texts_that_are_quoted_for_spreadsheets_are_read_as_they_were(tmp_path):
    context = MadeUp(BEST, folder=tmp_path)
    rows = [{"variant": text, "seed": -1, "accuracy": -0.5} for text in ("=1+1", "'quoted'", "-x", "plain")]
    write(find("r-dpcfl/variants"), ReproductionResult(rows, []), context)
    assert "'=1+1" in (tmp_path / "data.csv").read_text()
    assert read_rows(tmp_path / "data.csv") == rows


def test_the_command_judges_published_lines_again_without_a_run(tmp_path):
    out = tmp_path / "out"
    done = dpcfl("reproduce", "rr-cluster/fig2", "--earlier", str(MEASURED), "--out", str(out))
    printed = json.loads((MEASURED / "rr-cluster-fig2-laptop" / "claims.json").read_text())
    for claim in printed["claims"]:
        assert f"verdict: {claim['verdict']} ({claim['basis']})" in done.stdout
    assert not (out / "store").exists()
    rows = read_rows(out / "rr-cluster-fig2-laptop" / "data.csv")
    assert rows == read_rows(MEASURED / "rr-cluster-fig2-laptop" / "data.csv")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["r-dpcfl/fig3", "--earlier", str(MEASURED)], "r-dpcfl/fig3 cannot take runs from an earlier data.csv; these figures can: "),
        (["r-dpcfl/variants", "--earlier", "nowhere"], "nowhere/r-dpcfl-variants-laptop has no result"),
        (["all", "--earlier", str(MEASURED)], "--earlier belongs to single figures, not to 'all'"),
    ],
)  # fmt: skip
def test_what_cannot_be_extended_is_said_before_any_run(arguments, words, tmp_path):
    done = dpcfl("reproduce", *arguments, "--out", str(tmp_path))
    assert done.returncode == 2
    assert words in " ".join(done.stderr.split())


def test_a_folder_without_its_claims_is_no_earlier_result(tmp_path):
    shutil.copy(MEASURED / "rr-cluster-fig2-laptop" / "data.csv", tmp_path)
    with pytest.raises(ConfigError, match="has no result"):
        read_earlier(tmp_path)


def test_runs_that_tested_no_claim_are_no_look(tmp_path):
    """A figure at the paper's scale grows by single runs: one seed of a system has no p-value."""
    single = find("r-dpcfl/fig6")().compute(MadeUp(HONEST, asked_seeds=1))
    write(find("r-dpcfl/fig6"), single, MadeUp(HONEST, folder=tmp_path))
    known = read_earlier(tmp_path)
    assert (known.looks, len(known.rows)) == (0, len(single.rows))
    tested = find("r-dpcfl/fig6")().compute(MadeUp(HONEST, known=known))
    assert tested.looks == 1
    write(find("r-dpcfl/fig6"), tested, MadeUp(HONEST, folder=tmp_path))
    known = read_earlier(tmp_path)
    assert known.looks == 1
    assert find("r-dpcfl/fig6")().compute(MadeUp(HONEST, asked_seeds=7, known=known)).looks == 2


@pytest.mark.parametrize("same_runs", [True, False])
def test_an_uncounted_look_stays_known_in_results_that_take_runs_from_its_folder(tmp_path, same_runs):
    figure, folders = find("r-dpcfl/variants"), [tmp_path / name for name in ("first", "second", "third")]
    known = NOTHING
    for number, folder in enumerate(folders):
        folder.mkdir()
        outcome, context = variants(3 if same_runs else 3 + number, known, folder=folder)
        if number == 0:
            assert UNCOUNTED_LOOK not in outcome.notes
            outcome.notes.append(UNCOUNTED_LOOK)  # as the command does in a folder with a result of other runs
        assert outcome.notes.count(UNCOUNTED_LOOK) == 1
        write(figure, outcome, context)
        assert json.loads((folder / CLAIMS).read_text())["notes"] == outcome.notes
        known = read_earlier(folder, figure)
    assert outcome.looks == (1 if same_runs else 3)
    assert UNCOUNTED_LOOK not in variants(3)[0].notes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda text: text.replace(",", ";"),
            "has no column 'setting': must have a line for each run, with the columns setting, guarantee",
        ),
        (lambda text: text.replace(",accuracy,", ",acc,", 1), "has no column 'accuracy'"),
        (lambda text: "", "has no lines"),
        (lambda text: text[:1000], "cells: must have 21, as the first line"),
        (lambda text: text.replace("75.875", "", 1), "accuracy of record 1 is empty: must be a finite number"),
        (lambda text: text.replace("75.875", "75.9 %", 1), "accuracy of record 1 is '75.9 %': must be a finite number"),
        (lambda text: text.replace("75.875", "nan", 1), "accuracy of record 1 is nan: must be a finite number"),
        (lambda text: text.replace("DP-FedAvg,4,0,", "DP-FedAvg,4,.5,", 1), "seed of record 1 is 0.5: must be a whole number"),
        (lambda text: "\xff" + text, "is no CSV file in UTF-8"),
    ],
)
def test_damaged_lines_are_refused_before_any_run(change, words, tmp_path):
    changed(tmp_path, change)
    with pytest.raises(ConfigError) as refused:
        read_earlier(tmp_path, find("rr-cluster/table3"))
    assert words in str(refused.value)


@pytest.mark.parametrize("claims", ["", ', "claims": {}', ', "claims": [{"text": "x"}]'])
def test_damaged_claims_are_refused(claims, tmp_path):
    changed(tmp_path, str)
    (tmp_path / "claims.json").write_text(f'{{"state": "finished"{claims}}}')
    with pytest.raises(ConfigError, match=r"claims of .*claims\.json: must be a list of objects with comparisons, p_holm"):
        read_earlier(tmp_path, find("rr-cluster/table3"))


def test_lines_that_a_spreadsheet_wrote_again_are_the_same_runs(tmp_path):
    before = read_rows(MEASURED / "rr-cluster-table3-laptop" / "data.csv")
    changed(tmp_path, lambda text: "\xef\xbb\xbf" + text.replace("\n", "\r\n").replace(",4,0,", ",4,0.0,"))
    rows = list(read_earlier(tmp_path, find("rr-cluster/table3")).rows)
    assert rows == before
    assert {type(row["seed"]) for row in rows} == {int}


def changed(folder, change):
    """Copy the earlier result of a table with a change of its data.csv, as bytes."""
    source = MEASURED / "rr-cluster-table3-laptop"
    shutil.copy(source / "claims.json", folder)
    (folder / "data.csv").write_bytes(change((source / "data.csv").read_text()).encode("latin-1"))
