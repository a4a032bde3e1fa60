"""Finished runs side by side: grouping over seeds, what may be compared, the table, the CSV file and the page."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import SMALL, dpcfl
from run_folder import privacy, run_json, write_lines
from scipy import stats

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.experiment import config
from dpcfl_net.launch.cli.compare import show
from dpcfl_net.report import figures, overlay, pages
from dpcfl_net.report.sweep import figures as sweep_figures
from dpcfl_net.report.sweep import write_sweep
from dpcfl_net.results import compare, compare_table, table_text
from dpcfl_net.results.comparison import Comparison
from dpcfl_net.results.result import read_result, read_sweep


def write_result(folder: Path, algorithm: str = "global", seed: int = 0, accuracy: float = 0.7, **changes) -> Path:
    """A finished run's folder with what a comparison reads: config.yaml, run.json and the observer's lines.

    changes: sections of the configuration (rounds=.., data={..}), privacy= and final= of run.json.
    """
    folder.mkdir(parents=True)
    terms, final = changes.pop("terms", {}), changes.pop("final", {})
    document = {**SMALL, "algorithm": {"name": algorithm}, "seed": seed}
    document |= {
        key: {**document.get(key, {}), **value} if isinstance(value, dict) else value for key, value in changes.items()
    }
    settings = config.resolve(document).model_dump(mode="json", exclude={"algorithms"})
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    own = {"accuracy_mean": accuracy, "accuracy_minority": accuracy - 0.02, "accuracy_worst": accuracy - 0.05, **final}
    promised = {"epsilon": settings["privacy"]["epsilon"], "epsilon_spent": settings["privacy"]["epsilon"] - 0.01}
    run = run_json(algorithm=algorithm, seed=seed, privacy=privacy(**{**promised, **terms}))
    (folder / "run.json").write_text(json.dumps({**run, "final": {**run["final"], **own}}))
    lines = [
        {"view": "observer", "round": 1, "accuracy_p10": 0.1},
        {"view": "server", "round": 2, "bytes_up": 1},
        {"view": "observer", "round": 2, "accuracy_p10": accuracy - 0.04, "accuracy_mean": 0.0},
        {"view": "observer", "round": 2, "f_acc": 0.03, "f_loss": 0.2},
    ]
    write_lines(folder / "metrics.jsonl", lines)
    return folder


def write_sweep_folder(out: Path, axes: dict[str, list], runs: list[Path], waiting: int = 0) -> Path:
    """A sweep over finished runs, and some cells that have not run."""
    folder = out / "grid-sweep-0"
    folder.mkdir(parents=True)
    cells = [{"values": {}, "folder": os.path.relpath(run, folder), "state": "finished"} for run in runs]
    cells += [{"values": {}, "folder": f"../nothing-{number}", "state": "waiting"} for number in range(waiting)]
    (folder / "sweep.json").write_text(json.dumps({"config": SMALL, "axes": axes, "cells": cells}))
    return folder


def cells(table: pages.Table) -> list[dict[str, str]]:
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def drawn(page: Path) -> dict:
    return json.loads(re.search(r"const figures = (.*);\n", page.read_text(encoding="utf-8"))[1])


def test_a_result_holds_what_run_json_and_the_last_lines_say(tmp_path):
    result = read_result(write_result(tmp_path / "run", seed=3, accuracy=0.7))
    assert (result.algorithm, result.seed, result.epsilon) == ("global", 3, 5)
    assert result.settings["local"]["lr"] == 0.5
    assert result.final["accuracy_mean"] == 0.7  # run.json has it: the lines only add
    assert result.final["accuracy_p10"] == pytest.approx(0.66)
    assert (result.final["f_acc"], result.final["f_loss"]) == (0.03, 0.2)
    assert "accuracy_disparity" not in result.final


def test_a_real_run_is_a_result(finished_run):
    result = read_result(finished_run)
    assert result.algorithm == "r-dpcfl"
    assert result.privacy["insecure"] is True
    assert 0 < result.final["accuracy_p10"] <= result.final["accuracy_mean"]


def test_seconds_of_a_run_in_virtual_time_are_virtual(tmp_path):
    folder = write_result(tmp_path / "run")
    document = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**document, "clock": "virtual", "virtual_s": 7200.0, "wall_s": 9.0}))
    assert read_result(folder).cost["seconds"] == 7200.0


def test_a_figure_that_run_json_lacks_is_that_of_the_last_round_in_any_order(tmp_path):
    folder = write_result(tmp_path / "run")
    write_lines(
        folder / "metrics.jsonl", [{"view": "observer", "round": 1, "accuracy_p10": 0.1}]
    )  # a resumed run repeats rounds
    assert read_result(folder).final["accuracy_p10"] == pytest.approx(0.66)


def test_a_run_without_a_final_accuracy_has_no_figures_of_an_earlier_round(tmp_path):
    final = read_result(write_result(tmp_path / "run", final={"accuracy_mean": None})).final
    assert not {"accuracy_p10", "f_acc", "f_loss"} & set(final)


def test_a_run_without_a_finite_epsilon_claims_infinity(tmp_path):
    assert read_result(write_result(tmp_path / "run", terms={"epsilon": None})).epsilon == math.inf


@pytest.mark.parametrize("state", ["failed", "interrupted"])
def test_only_finished_runs_are_results(tmp_path, state):
    folder = write_result(tmp_path / "run")
    (folder / "run.json").write_text(json.dumps(run_json(state=state)))
    with pytest.raises(ConfigError, match=f"is {state} after 40 rounds.*dpcfl run --resume {folder}"):
        read_result(folder)
    (folder / "placement.json").write_text("{}")  # its workers are on other hosts
    with pytest.raises(ConfigError, match=f"dpcfl launch --resume {folder}"):
        read_result(folder)


@pytest.mark.parametrize("broken", ["", "{", "[]"])
def test_a_folder_that_is_no_run_is_a_sentence(tmp_path, broken):
    if broken:
        (write_result(tmp_path / "run") / "run.json").write_text(broken)
    with pytest.raises(ConfigError, match=r"not a run folder|damaged"):
        read_result(tmp_path / "run")


def test_runs_that_differ_in_their_seed_alone_are_one_row(tmp_path):
    folders = [write_result(tmp_path / f"a{seed}", seed=seed, accuracy=0.7 + 0.02 * seed) for seed in range(3)]
    folders += [write_result(tmp_path / "b", algorithm="oracle", accuracy=0.8, final={"clusters_recovered": False})]
    folders += [write_result(tmp_path / "c", name="renamed", runtime={"slots": 1}, output={"transcript": "off"}, seed=9)]
    table = compare_table.table(compare.rows(map(read_result, [*folders, folders[0]])))
    first, second = cells(table)
    assert "; clusters found, minority found: in how many of the runs" in table.caption
    assert (first["algorithm"], first["runs"], first["mean %"], first["clusters found"]) == (
        "global",
        "4",
        "71.5 +- 1.9",
        "4/4",
    )
    assert (second["algorithm"], second["runs"], second["mean %"], second["clusters found"]) == ("oracle", "1", "80.0", "0/1")
    assert first["F_acc %"] == "3.0 +- 0.0"


@pytest.mark.parametrize(
    ("runtime", "column"), [({"quorum": 0.5}, "quorum"), ({"transport": {"security": "none"}}, "security")]
)
def test_runs_of_another_quorum_or_transport_are_another_row(tmp_path, runtime, column):
    """The cells of a sweep over such a setting were one row with a deviation, as if they were seeds of one experiment."""
    folders = [write_result(tmp_path / "a"), write_result(tmp_path / "b", runtime=runtime)]
    table = compare_table.table(compare.rows(map(read_result, folders)))
    assert [(row["runs"], row[column]) for row in cells(table)] == [
        ("1", "1.0" if column == "quorum" else "curve"),
        ("1", "0.5" if column == "quorum" else "none"),
    ]


def test_runs_of_other_noise_seeds_or_orders_of_settings_are_one_row(tmp_path):
    seeded = [{"noise": "seeded", "noise_seed": letter * 64} for letter in "ab"]
    folders = [write_result(tmp_path / str(seed), seed=seed, privacy=own) for seed, own in enumerate(seeded)]
    settings = yaml.safe_load((folders[1] / "config.yaml").read_text())
    (folders[1] / "config.yaml").write_text(yaml.safe_dump(dict(reversed(settings.items())), sort_keys=False))
    (row,) = compare.rows(map(read_result, folders))
    assert len(row.results) == 2


def test_runs_with_record_books_in_other_folders_are_one_row(tmp_path):
    real = {"noise": "os", "noise_seed": None}
    for seed, book in enumerate(("/here/book", "/there/book")):
        write_result(tmp_path / str(seed), seed=seed, privacy=real, ledger={"scope": "dataset", "root": book})
    write_result(tmp_path / "of-the-run", privacy=real)
    both, alone = compare.rows(map(read_result, sorted(tmp_path.iterdir())))
    assert (len(both.results), len(alone.results)) == (2, 1)
    assert compare.differing([both, alone]) == ["ledger.scope"]


def test_the_table_has_a_column_for_each_share(tmp_path):
    (row,) = cells(compare_table.table(compare.rows([read_result(write_result(tmp_path / "a", accuracy=0.7))])))
    assert [row[f"{share} %"] for share in ("mean", "minority", "worst", "p10")] == ["70.0", "68.0", "65.0", "66.0"]


@pytest.mark.parametrize(
    ("key", "short"),
    [("model.name", "model"), ("local.lr", "lr"), ("name", "name"), ("privacy.epsilon_by_client.3", "epsilon_by_client 3")],
)
def test_a_setting_has_the_last_word_of_its_key_that_tells_what_it_is(key, short):
    assert compare.short_key(key) == short


def test_the_caption_says_that_no_epsilon_covers_fairness_also_where_one_row_has_it(tmp_path):
    folders = [write_result(tmp_path / name, name) for name in ("global", "oracle")]
    lines = (folders[1] / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folders[1] / "metrics.jsonl").write_text("".join(line for line in lines if "f_acc" not in line))
    table = compare_table.table(compare.rows(map(read_result, folders)))
    assert [row["F_loss"] for row in cells(table)] == ["0.200", "–"]
    assert table.caption.endswith("F_acc and F_loss are against models trained without privacy: no epsilon covers them")


def test_an_alert_of_many_runs_names_the_first_and_counts_the_others(tmp_path):
    folders = [write_result(tmp_path / f"run{seed}", seed=seed, terms={"insecure": seed > 0}) for seed in range(6)]
    for count, named in ((6, "run1, run2, run3 and 2 more: "), (4, "run1, run2, run3: "), (1, None)):
        _, alerts = compare.statements(map(read_result, folders[:count]))
        assert [alert.partition("INSECURE")[0] for alert in alerts] == ([] if named is None else [named])


def test_a_run_with_tuned_settings_repeats_one_that_was_given_them(tmp_path):
    note = {
        "search": "grid", "trials": 2, "seeds": [0], "algorithms": ["global"], "settings": {"local.lr": [0.1, 0.5]},
        "score": "accuracy_mean", "validation": 0.2,
    }  # fmt: skip
    folders = [write_result(tmp_path / "a", seed=0), write_result(tmp_path / "b", seed=1, tuning=note)]
    (row,) = compare.rows(map(read_result, folders))
    assert len(row.results) == 2


def test_a_row_has_the_largest_epsilon_of_its_runs(tmp_path):
    folders = [write_result(tmp_path / f"a{e}", seed=e, terms={"epsilon": e}) for e in (4, 6, 5)]
    (row,) = cells(Comparison.of(folders, force=True).table)
    assert (row["runs"], row["epsilon"]) == ("3", "6")


def test_rows_are_compared_with_the_first_one_seed_by_seed(tmp_path):
    """The spread between seeds is that of the data, 10 points; the difference is nearly the same for every seed."""
    accuracies = {"r-dpcfl": (0.60, 0.70, 0.80), "local": (0.55, 0.66, 0.74), "oracle": (0.61, 0.70, 0.82)}
    folders = [
        write_result(tmp_path / f"{name}{seed}", algorithm=name, seed=seed, accuracy=accuracy)
        for name, own in accuracies.items()
        for seed, accuracy in enumerate(own)
    ]
    reference, local, oracle = cells(Comparison.of(folders).leads)
    assert (reference["algorithm"], reference["seeds"], reference["mean"]) == ("r-dpcfl", "reference", "–")
    low, high = stats.ttest_1samp([-5, -4, -6], 0).confidence_interval(0.95)
    assert (local["algorithm"], local["seeds"], local["mean"]) == ("local", "3", f"-5.0 ({low:+.1f} to {high:+.1f})")
    assert oracle["mean"].startswith("+1.0 (")
    assert local["minority"] == local["worst"] == local["mean"]  # these differ from the mean by a constant


def test_only_rows_with_two_seeds_in_common_and_the_same_privacy_and_data_are_paired(tmp_path):
    folders = [write_result(tmp_path / f"a{seed}", algorithm="local", seed=seed, accuracy=0.7) for seed in (0, 1, 2)]
    folders += [write_result(tmp_path / f"b{seed}", algorithm="global", seed=seed, accuracy=0.5) for seed in (2, 3, 4)]
    assert Comparison.of(folders).leads is None
    folders += [write_result(tmp_path / f"b{seed}", algorithm="global", seed=seed, accuracy=0.5 + seed / 100) for seed in (0,)]
    more = {"privacy": {"epsilon": 3}}
    folders += [write_result(tmp_path / f"c{seed}", algorithm="global", seed=seed, accuracy=0.4, **more) for seed in (0, 1, 2)]
    paired = cells(Comparison.of(folders, force=True).leads)
    assert [(row["algorithm"], row["seeds"], row["mean"]) for row in paired] == [
        ("local", "reference", "–"),
        ("global", "2", "-20.0"),  # no spread, no interval
    ]


def test_two_runs_of_one_seed_count_as_one_seed(tmp_path):
    folders = [write_result(tmp_path / f"a{seed}", algorithm="local", seed=seed, accuracy=0.7) for seed in (0, 1)]
    folders += [write_result(tmp_path / f"b{seed}", seed=seed, accuracy=0.6 + seed / 50) for seed in (0, 1)]
    folders += [write_result(tmp_path / "b0-again", seed=0, accuracy=0.64)]
    paired = cells(Comparison.of(folders).leads)[1]
    assert paired["seeds"] == "2"
    assert paired["mean"].startswith("-8.0")  # the mean of 62 (from 60 and 64) and 62, less 70


def test_columns_are_the_settings_that_differ(tmp_path):
    folders = [
        write_result(tmp_path / "a"),
        write_result(tmp_path / "b", local={"lr": 0.1}),
        write_result(tmp_path / "c", algorithm="r-dpcfl"),  # its options are no difference to global, which has none
        write_result(tmp_path / "d", rounds=8),
    ]
    table = compare_table.table(compare.rows(map(read_result, folders)))
    assert table.columns[:5] == ["algorithm", "epsilon", "rounds", "lr", "runs"]
    assert [row[2:4] for row in table.rows] == [["6", "0.5"], ["6", "0.1"], ["6", "0.5"], ["8", "0.5"]]
    options = [write_result(tmp_path / f"r{m}", "r-dpcfl", algorithms={"r-dpcfl": {"clusters": m}}) for m in (3, 4)]
    assert compare_table.table(compare.rows(map(read_result, options))).columns[2] == "clusters"


def test_the_table_prints_as_latex_and_as_csv_alone_on_standard_output(tmp_path):
    runs = [write_result(tmp_path / f"a{seed}", seed=seed, accuracy=0.7 + 0.02 * seed) for seed in range(2)]
    runs.append(write_result(tmp_path / "b", algorithm="oracle", local={"lr": 0.1}))
    latex = dpcfl("compare", *runs, "--format", "latex", "--csv", tmp_path / "runs.csv")
    assert latex.returncode == 0, latex.stderr
    lines = latex.stdout.splitlines()
    assert lines[0] == "% Privacy: epsilon 5, delta 0.0001, per sample"
    assert [line for line in lines if line.startswith("\\")] == [
        f"\\begin{{tabular}}{{l{'r' * (lines[3].count('&'))}}}", "\\toprule", "\\midrule", "\\bottomrule", "\\end{tabular}",
    ]  # fmt: skip
    assert len({line.count("&") for line in lines if "&" in line}) == 1
    assert "mean \\%" in lines[3]
    assert "71.0 $\\pm$ 1.4" in latex.stdout
    assert "wrote 3 runs" in latex.stderr
    printed = dpcfl("compare", *runs, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(printed.stdout)))
    assert [(row["algorithm"], row["mean %"]) for row in rows] == [("global", "71.0 +- 1.4"), ("oracle", "70.0")]


def test_latex_escapes_its_words():
    text = table_text.latex(pages.Table("t", ["a_b", "100 %"], [["x & y", "inf"], ["\\ {1}", "–"]]), ["two\nlines"])
    assert text.splitlines() == [
        "% two lines", "\\begin{tabular}{lr}", "\\toprule", "a\\_b & 100 \\% \\\\", "\\midrule", "x \\& y & $\\infty$ \\\\",
        "\\textbackslash{} \\{1\\} & -- \\\\", "\\bottomrule", "\\end{tabular}",
    ]  # fmt: skip


def test_runs_are_laid_over_each_other_by_round_with_bands_over_seeds(tmp_path):
    runs = []
    for algorithm, low in (("global", 0.2), ("oracle", 0.4)):
        for seed in range(2):
            runs.append(folder := write_result(tmp_path / f"{algorithm}{seed}", algorithm, seed))
            write_lines(folder / "metrics.jsonl", [
                line
                for at in (3, 4, 5)
                for line in (
                    {"view": "server", "round": at, "seconds": 2.0},
                    {"view": "observer", "round": at, "accuracy_mean": low + at / 10 + seed / 50},
                )
            ])  # fmt: skip
    done = dpcfl("compare", *runs, "--page", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    shown = drawn(tmp_path / "page.html")
    lines = {trace["name"]: trace for trace in shown["accuracy-round"]["data"] if "name" in trace}
    assert lines["oracle"]["x"] == [3, 4, 5]
    assert lines["oracle"]["y"] == pytest.approx([71, 81, 91])
    bands = [trace for trace in shown["accuracy-round"]["data"] if trace.get("fill")]
    assert len(bands) == 2
    assert bands[0]["y"][0] - bands[0]["y"][-1] == pytest.approx(2 * np.std([0, 2], ddof=1), abs=1e-4)
    assert shown["seconds"]["data"][0]["x"] == [168.2, 168.2]
    assert [trace["x"][0] for trace in shown["bytes"]["data"]] == [97, 110]
    assert "97.0 +- 0.0" in done.stdout


def test_the_figure_by_round_names_rows_whose_seeds_share_too_few_timed_rounds(tmp_path):
    """Such a row was left out in silence."""
    rounds = {"global": [(1, 2), (3, 4)], "oracle": [(1, 2), (1, 2)], "local": [(1, 2, 3), (1, 4, 5)], "mr-mtl": [(2,), (2,)]}
    for algorithm, of_seeds in rounds.items():
        for seed, own in enumerate(of_seeds):
            folder = write_result(tmp_path / f"{algorithm}{seed}", algorithm, seed)
            lines = [
                ({"view": "server", "round": t, "seconds": 2.0}, {"view": "observer", "round": t, "accuracy_mean": 0.5})
                for t in own
            ]
            write_lines(folder / "metrics.jsonl", [line for pair in lines for line in pair])
    table = compare.rows(map(read_result, [tmp_path / f"{name}{seed}" for name in rounds for seed in range(2)]))
    figure = overlay.by_round(table, [*rounds])
    assert {trace["name"] for trace in figure.spec["data"] if "name" in trace} == {"oracle"}
    assert figure.caption == (
        "Line: mean over seeds; band: one standard deviation. Without a line, since their seeds share fewer than two evaluated and "
        "timed rounds: global; local; mr-mtl."
    )
    assert "Without a line" not in overlay.by_round(table[1:2], ["oracle"]).caption
    assert overlay.by_round(table[:1], ["global"]).why == "no row has two evaluated and timed rounds that all its seeds share"


def test_a_band_over_epsilon_has_a_gap_where_only_one_seed_was_run(tmp_path):
    """A band that narrows to a line there would say that seeds agree."""
    seeds = {1.0: 2, 2.0: 2, 3.0: 1, 5.0: 2, 10.0: 2}
    for epsilon, count in seeds.items():
        for seed in range(count):
            folder, terms = tmp_path / f"{epsilon}-{seed}", {"epsilon": epsilon}
            write_result(folder, seed=seed, accuracy=epsilon / 100 + seed / 50, privacy=terms, terms=terms)
    done = dpcfl("compare", *tmp_path.iterdir(), "--force", "--page", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    traces = drawn(tmp_path / "page.html")["accuracy_mean"]["data"]
    (band,) = (trace for trace in traces if trace.get("fill"))
    assert band["x"] == [1, 2, 2, 1, None, 5, 10, 10, 5]
    wide = np.std([0, 2], ddof=1)
    assert band["y"][:4] == pytest.approx([2 + wide, 3 + wide, 3 - wide, 2 - wide], abs=1e-4)
    (mean,) = (trace for trace in traces if trace.get("name"))
    assert mean["x"] == [*seeds]


def test_a_figure_that_was_never_measured_is_a_dash(tmp_path):
    missing = {"accuracy_minority": None, "clusters_recovered": None, "minority_recovered": None}
    table = compare_table.table(compare.rows([read_result(write_result(tmp_path / "a", final=missing))]))
    (row,) = cells(table)
    assert (row["minority %"], row["clusters found"], row["minority found"]) == ("–", "–", "–")
    assert "found" not in table.caption


def test_settings_with_the_same_last_word_have_columns_that_tell_them_apart(tmp_path):
    budgets = [(1e-4, 1e-3), (1e-5, 1e-3), (1e-4, 1e-2)]
    folders = [
        write_result(
            tmp_path / f"{k}",
            privacy={"delta": delta, "noise": "os", "noise_seed": None},
            ledger={"scope": "dataset", "root": "/book", "budget": {"epsilon": 9, "delta": most}},
        )
        for k, (delta, most) in enumerate(budgets)
    ]
    table = compare_table.table(compare.rows(map(read_result, folders)))
    assert table.columns[2:4] == ["privacy.delta", "ledger.budget.delta"]
    assert [tuple(map(float, row[2:4])) for row in table.rows] == budgets


def test_a_setting_that_differs_for_one_algorithm_tells_its_rows_apart(tmp_path):
    folders = [write_result(tmp_path / f"r{m}", "r-dpcfl", algorithms={"r-dpcfl": {"clusters": m}}) for m in (3, 4)]
    folders.append(write_result(tmp_path / "g"))
    folders.append(write_result(tmp_path / "i", "dp-ifca", algorithms={"dp-ifca": {"clusters": 4}}))
    assert compare.telling(compare.rows(map(read_result, folders))) == ["algorithm.clusters"]


def test_bytes_are_in_megabytes_if_those_of_one_row_fill_a_tenth(tmp_path):
    runs = []
    for name, up in (("local", 60_000), ("global", 200_000)):
        runs.append(write_result(tmp_path / name, name))
        document = json.loads((runs[-1] / "run.json").read_text())
        (runs[-1] / "run.json").write_text(json.dumps({**document, "bytes_up": up, "bytes_down": 99_000}))
    one, other = Comparison.of(runs).rows
    assert (one["MB up"], other["MB up"], one["kB down"]) == ("0.1", "0.2", "99.0")


def test_the_epsilon_of_a_row_is_rounded_up(tmp_path):
    (row,) = cells(Comparison.of([write_result(tmp_path / "a", terms={"epsilon": 5.0001})]).table)
    assert row["epsilon"] == "5.001"


def test_a_mean_over_some_of_the_runs_says_over_how_many(tmp_path):
    """It stood beside the number of all runs, as if all had it: a run without a final accuracy was left out in silence."""
    lost = {"accuracy_mean": None, "accuracy_worst": None}
    folders = [write_result(tmp_path / f"a{seed}", seed=seed, accuracy=0.6 + 0.02 * seed) for seed in range(3)]
    folders += [
        write_result(tmp_path / f"b{seed}", "oracle", seed, 0.7 + 0.03 * seed, final=lost if seed == 2 else {})
        for seed in range(3)
    ]
    comparison = Comparison.of(folders)
    whole, part = comparison.rows
    assert (whole["runs"], whole["mean %"], part["runs"], part["mean %"]) == ("3", "62.0 +- 2.0", "3", "71.5 +- 2.1 (2/3)")
    assert (part["minority %"], part["worst %"]) == ("71.0 +- 3.0", "66.5 +- 2.1 (2/3)")
    assert "(k/n): only k of the n runs have the figure" in comparison.table.caption
    assert "(k/n)" not in Comparison.of(folders[:3]).table.caption
    (_, pair) = cells(comparison.leads)
    assert (pair["seeds"], pair["mean"]) == ("3", "+10.5 (+4.1 to +16.9) (2/3)")
    assert pair["minority"] == "+11.0 (+8.5 to +13.5)"
    for table in (comparison.table, comparison.leads):  # such cells are figures, too, and aligned to the right
        assert all(pages.numeric_columns(table.without_empty_columns())[2:])


def test_points_are_means_and_shares_of_the_runs_of_a_row(tmp_path):
    accuracies, found = (0.5, 0.5, 0.8), (True, False, False)
    folders = [
        write_result(
            tmp_path / f"{e}-{seed}", seed=seed, accuracy=own, privacy={"epsilon": e}, final={"clusters_recovered": judged}
        )
        for e in (3, 8)
        for seed, (own, judged) in enumerate(zip(accuracies, found, strict=True))
    ]
    rows = compare.rows(map(read_result, folders))
    for shown, across in ((rows, "x"), (rows[:1], "y")):  # against epsilon, and by row
        figures_of = {figure.key: figure for figure in sweep_figures(shown)}
        drawn_of = {key: figure.spec["data"] for key, figure in figures_of.items()}
        for key, by_hand, word in (
            ("accuracy_mean", 60, "Mean"),
            ("accuracy_minority", 58, "minority"),
            ("accuracy_worst", 55, "worst"),
        ):
            mean = drawn_of[key][-1]
            assert word in figures_of[key].title
            assert mean["y" if across == "x" else "x"] == pytest.approx([by_hand] * len(shown))
        (bars,) = drawn_of["clusters_recovered"]
        assert bars["x"] == pytest.approx([1 / 3] * len(shown))
        assert bars["text"] == ["1 of 3"] * len(shown)


def test_lines_of_one_algorithm_have_its_colour_and_a_dash_for_each_epsilon(tmp_path):
    folders = [
        write_result(tmp_path / f"{name}{e}", name, privacy={"epsilon": e}) for name in ("global", "local") for e in (1, 3, 8)
    ]
    found = overlay.styles(compare.rows(map(read_result, folders)), [*["global"] * 3, *["local"] * 3])
    assert [style.colour for style in found] == [*["@c0"] * 3, *["@c1"] * 3]
    assert [style.dash for style in found] == ["solid", "dash", "dashdot"] * 2
    assert [style.name for style in found][:3] == ["global, epsilon 1", "global, epsilon 3", "global, epsilon 8"]


def test_a_figure_of_no_run_says_why(tmp_path):
    missing = {"accuracy_minority": None, "minority_recovered": None}
    found = sweep_figures(compare.rows([read_result(write_result(tmp_path / "a", final=missing))]))
    why = {figure.key: figure.why for figure in found if figure.why}
    assert sorted(why) == ["accuracy_minority", "minority_recovered"]
    assert "cluster clients" not in why["accuracy_minority"]  # it is measured whether or not the server clusters them
    assert why["minority_recovered"].endswith("or the server does not cluster clients")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"terms": {"epsilon": None}}, "epsilon is inf, elsewhere 5"),
        ({"privacy": {"epsilon": 3}}, "epsilon is 3, elsewhere 5"),
        ({"privacy": {"epsilon": 5.01}}, "epsilon is 5.01, elsewhere 5"),
        ({"terms": {"delta": 1e-5}}, "delta is 1e-05, elsewhere 0.0001"),
        ({"terms": {"unit": "client"}}, "unit is client, elsewhere sample"),
        ({"terms": {"adjacency": "replace-one"}}, "adjacency is replace-one, elsewhere zero-out"),
        ({"terms": {"trust": "trusted-server"}}, "trust is trusted-server, elsewhere untrusted-server"),
        ({"terms": {"insecure": True}}, "insecure is True, elsewhere False"),
        ({"privacy": {"epsilon_by_client": {"2-3": 0.5}}}, "privacy.epsilon_by_client.2-3 is 0.5, elsewhere –"),
        ({"data": {"shift": "none"}}, "data.shift is none, elsewhere rotation"),
        ({"data": {"train_per_client": 500}}, "data.train_per_client is 500, elsewhere 700"),
    ],
)
def test_unequal_privacy_or_data_is_refused_and_shown_only_by_force(tmp_path, change, words):
    folders = [write_result(tmp_path / "a"), write_result(tmp_path / "b", seed=1), write_result(tmp_path / "odd", **change)]
    for order in (folders, folders[::-1]):  # the terms of most runs are the usual ones, not those of the first
        assert compare.unequal([read_result(folder) for folder in order]) == {tmp_path / "odd": words}


@pytest.mark.parametrize(
    ("usual", "odd"),
    [
        ({"trust": "trusted-server"}, {"trust": "trusted-server", "participations": 20}),
        (
            {"trust": "secure-aggregation", "secure_sums": {"participation": "secret coins"}},
            {"trust": "secure-aggregation", "secure_sums": {"participation": "visible"}},
        ),
    ],
)
def test_runs_that_protect_who_takes_part_are_not_compared_with_runs_that_do_not(tmp_path, usual, odd):
    folders = [write_result(tmp_path / name, terms={"unit": "client", **usual}) for name in "ab"]
    folders.append(write_result(tmp_path / "odd", terms={"unit": "client", **odd}))
    found = compare.unequal([read_result(folder) for folder in folders])
    assert found == {tmp_path / "odd": "participation is public, elsewhere protected"}


def test_runs_that_count_on_other_numbers_of_colluders_are_not_compared(tmp_path):
    """Their epsilons are equal, but hold against others: with none, not against a participant of a sum."""
    section = {"trust": "secure-aggregation", "secure_aggregation": {"colluders": 1}}
    folders = [write_result(tmp_path / name, terms={"trust": "secure-aggregation"}, privacy=section) for name in "ab"]
    odd = {**section, "secure_aggregation": {"colluders": 0}}
    folders.append(write_result(tmp_path / "odd", terms={"trust": "secure-aggregation"}, privacy=odd))
    found = compare.unequal([read_result(folder) for folder in folders])
    assert found == {tmp_path / "odd": "privacy.secure_aggregation.colluders is 0, elsewhere 1"}


def test_the_command_refuses_unequal_runs_with_every_reason(tmp_path):
    odd = write_result(tmp_path / "odd", terms={"epsilon": None, "trust": "trusted-server"})
    folders = [write_result(tmp_path / "a"), write_result(tmp_path / "b", seed=1), odd]
    refused = dpcfl("compare", *folders)
    assert refused.returncode == 2, refused.stdout
    assert "odd: epsilon is inf, elsewhere 5; trust is trusted-server" in refused.stderr
    assert "--force" in refused.stderr
    assert "mean" not in refused.stdout
    forced = dpcfl("compare", *folders, "--force")
    assert forced.returncode == 0, forced.stderr
    assert forced.stdout.count("NOT COMPARABLE") == 1
    assert "! odd: epsilon is inf" in forced.stdout


def test_rounds_and_the_place_of_the_data_may_differ(tmp_path):
    results = [write_result(tmp_path / "a"), write_result(tmp_path / "b", rounds=9, data={"root": str(tmp_path)})]
    assert compare.unequal(list(map(read_result, results))) == {}


def test_csv_has_a_line_a_run_with_whole_figures(tmp_path):
    third = 1 / 3
    folders = [
        write_result(tmp_path / "a", accuracy=third),
        write_result(tmp_path / "b", local={"lr": 0.1}, terms={"epsilon": None}),
    ]
    file = io.StringIO()
    compare_table.write_csv(file, list(map(read_result, folders)))
    first, second = csv.DictReader(io.StringIO(file.getvalue()))
    assert (first["folder"], first["algorithm"], first["seed"], first["local.lr"]) == (
        str(tmp_path / "a"),
        "global",
        "0",
        "0.5",
    )
    assert float(first["accuracy_mean"]) == third
    assert (first["epsilon"], second["epsilon"], first["delta"]) == ("5.0", "inf", "0.0001")
    assert first["clusters_recovered"] == "True"
    assert (first["epsilon_spent"], first["epsilon_replace_one"], first["trust"]) == ("4.99", "10.87", "untrusted-server")


def test_command_prints_the_table_and_writes_the_csv(tmp_path):
    folders = [write_result(tmp_path / f"a{seed}", seed=seed) for seed in range(2)]
    done = dpcfl("compare", *folders, "--csv", tmp_path / "all.csv")
    assert done.returncode == 0, done.stderr
    assert "70.0 +- 0.0" in done.stdout
    assert len((tmp_path / "all.csv").read_text().splitlines()) == 3


def test_one_run_is_written_in_the_singular(tmp_path):
    done = dpcfl("compare", write_result(tmp_path / "a"), "--csv", tmp_path / "all.csv")
    assert done.stdout.splitlines()[-1] == f"wrote 1 run to {tmp_path}/all.csv"


def test_the_store_of_sweeps_beside_runs_is_left_out(tmp_path):
    """After a sweep `dpcfl compare runs/*` names the store, too."""
    write_result(tmp_path / "store/global-1")
    folders = [write_result(tmp_path / "a"), tmp_path / "store"]
    done = dpcfl("compare", *folders, "--json")
    assert done.returncode == 0, done.stderr
    assert [run["folder"] for run in json.loads(done.stdout)["runs"]] == [str(tmp_path / "a")]
    assert f"left out {tmp_path}/store: it holds the runs of sweeps" in done.stderr
    assert dpcfl("compare", tmp_path / "store").returncode == 2


def test_a_term_that_other_runs_lack_is_a_dash(tmp_path):
    others = [write_result(tmp_path / name) for name in "ab"]
    apart = write_result(tmp_path / "c", data={"evaluate": "validation", "validation": 0.2})
    assert "data.evaluate is validation, elsewhere –" in dpcfl("compare", *others, apart).stderr


def test_a_folder_of_runs_is_refused_with_the_way_to_name_them(tmp_path):
    write_result(tmp_path / "a")
    done = dpcfl("compare", tmp_path)
    assert done.returncode == 2
    assert f"is not a run folder: it needs run.json and config.yaml; for the runs in it give {tmp_path}/*" in done.stderr


def test_every_folder_that_cannot_be_compared_is_named(tmp_path):
    done = dpcfl("compare", tmp_path / "no", tmp_path / "none", write_result(tmp_path / "a"))
    assert done.returncode == 2
    assert done.stderr.count("is not a run folder") == 2


@pytest.fixture
def swept(tmp_path) -> Path:
    """Two algorithms, two epsilons, two seeds; one cell more that has not run."""
    runs = [
        write_result(
            tmp_path / f"{name}{epsilon}{seed}", name, seed, 0.6 + epsilon / 100 + seed / 50, privacy={"epsilon": epsilon}
        )
        for name in ("global", "oracle")
        for epsilon in (3.0, 8.0)
        for seed in range(2)
    ]
    axes = {"algorithm.name": ["global", "oracle"], "privacy.epsilon": [3, 8], "seed": [0, 1]}
    return write_sweep_folder(tmp_path, axes, runs, waiting=1)


def test_a_sweep_over_epsilon_compares_equal_epsilons(swept):
    assert len(read_sweep(swept)) == 8
    done = dpcfl("compare", swept)
    assert done.returncode == 0, done.stderr
    assert "64.0 +- 1.4" in done.stdout


def test_a_sweeps_page_draws_accuracy_against_epsilon_and_recovery(swept):
    page = write_sweep(swept)
    shown = drawn(page)
    assert set(shown) == {"accuracy_mean", "accuracy_minority", "accuracy_worst", "clusters_recovered", "minority_recovered"}
    lines = {trace["name"]: trace for trace in shown["accuracy_mean"]["data"] if trace.get("mode") == "lines+markers"}
    assert lines["oracle"]["x"] == [3, 8]
    assert lines["oracle"]["y"] == pytest.approx([64, 69])
    text = page.read_text(encoding="utf-8")
    assert "8 of 9 runs have finished" in text
    assert "<td>oracle</td>" in text
    assert 'class="alert" role' not in text
    assert dpcfl("report", swept).stdout == f"report: {page}\n"
    refused = dpcfl("report", swept, "--alone", swept)
    assert (refused.returncode, "--alone is for the report of a run" in refused.stderr) == (2, True)


def test_a_run_that_two_sweeps_share_is_one_line_of_the_records_and_of_the_csv_file(tmp_path):
    """The table had it once, records and CSV file twice."""
    runs = [write_result(tmp_path / f"{seed}", seed=seed) for seed in range(3)]
    sweeps = [write_sweep_folder(tmp_path / name, {"seed": [0, 1]}, own) for name, own in (("a", runs[:2]), ("b", runs[1:]))]
    comparison = Comparison.of([*sweeps, tmp_path / "." / "2"])
    assert [one["seed"] for one in comparison.records] == [0, 1, 2]
    assert [line["seed"] for line in csv.DictReader(io.StringIO(comparison.to_csv()))] == ["0", "1", "2"]
    assert (len(comparison), comparison.rows[0]["runs"]) == (3, "3")


def test_a_sweep_over_data_compares_runs_on_the_same_data(tmp_path):
    runs = [
        write_result(tmp_path / f"{name}{shift}", name, data={"shift": shift})
        for shift in ("none", "rotation")
        for name in ("global", "oracle")
    ]
    folder = write_sweep_folder(tmp_path, {"data.shift": ["none", "rotation"], "algorithm.name": ["global", "oracle"]}, runs)
    assert Comparison.of([folder]).marked == {}
    other = write_sweep_folder(tmp_path / "runs", {"data.shift": ["none"], "algorithm.name": ["global", "oracle"]}, runs)
    with pytest.raises(ConfigError, match=r"data\.shift is rotation, elsewhere none"):  # not swept, but the runs differ
        Comparison.of([other])


def test_a_sweeps_page_without_epsilons_draws_every_run(tmp_path):
    runs = [write_result(tmp_path / f"{name}{seed}", name, seed) for name in ("global", "oracle") for seed in range(3)]
    shown = drawn(write_sweep(write_sweep_folder(tmp_path, {"algorithm.name": ["global", "oracle"]}, runs)))
    points = [trace for trace in shown["accuracy_worst"]["data"] if len(trace["x"]) == 3]
    assert [trace["name"] for trace in points] == ["global", "oracle"]


def test_words_of_a_run_reach_the_terminal_without_control_characters(tmp_path, capsys):
    runs = [write_result(tmp_path / name) for name in ("ours", "theirs")]
    path = runs[1] / "config.yaml"
    path.write_text(path.read_text().replace("dataset: digits", 'dataset: "digits\\e[2J"'))
    done = dpcfl("compare", *runs, "--force")
    assert "data.dataset is digits" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    show(write_sweep_folder(tmp_path, {"seed": [0]}, runs))
    said = capsys.readouterr().out
    assert "data.dataset is digits" in said
    assert "\x1b" not in said


def test_a_sweeps_page_does_not_show_the_secret_of_seeded_noise(tmp_path):
    runs = [write_result(tmp_path / name, name) for name in ("global", "oracle")]
    axes = {"algorithm.name": ["global", "oracle"], "privacy.noise_seed": [16 * "5eed"]}
    text = write_sweep(write_sweep_folder(tmp_path, axes, runs)).read_text()
    assert "Set in all runs: privacy.noise_seed secret, not shown here." in text
    assert "5eed5eed" not in text


def test_a_sweeps_page_tells_swept_settings_from_those_of_all_runs_and_draws_no_bytes_that_were_not_sent(tmp_path):
    runs = [write_result(tmp_path / name, name) for name in ("global", "oracle")]
    axes = {"algorithm.name": ["global", "oracle"], "rounds": [6], "seed": [0]}
    page = write_sweep(write_sweep_folder(tmp_path, axes, runs))
    assert "Swept: algorithm.name global, oracle." in page.read_text()
    assert "Set in all runs: rounds 6; seed 0." in page.read_text()
    cost = drawn(page)["bytes"]
    assert cost["layout"]["barmode"] == "stack"
    assert [(bar["name"], bar["y"], bar["x"]) for bar in cost["data"]] == [
        ("from clients (up)", ["global", "oracle"], [97.0, 97.0]),
        ("to clients (down)", ["global", "oracle"], [110.0, 110.0]),
    ]
    for run in runs:
        document = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps({**document, "bytes_up": 0, "bytes_down": 0}))
    page = write_sweep(page.parent)
    assert "bytes" not in drawn(page)
    assert "Bytes of a run: these runs sent no messages: all clients were in one process" in page.read_text()
    assert "MB up" not in page.read_text()


def test_bytes_of_a_run_in_one_process_are_blank_and_not_zero(tmp_path):
    """A table of a paper showed them as 0.0 MB beside those of runs with messages."""
    runs = [write_result(tmp_path / name, name) for name in ("global", "oracle")]
    document = json.loads((runs[0] / "run.json").read_text())
    (runs[0] / "run.json").write_text(json.dumps({**document, "bytes_up": 0, "bytes_down": 0}))
    found = Comparison.of(runs)
    assert [row["MB up"] for row in found.rows] == ["–", f"{document['bytes_up'] / 1e6:.1f}"]
    lines = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [line["bytes_down"] for line in lines] == ["", f"{float(document['bytes_down'])}"]
    assert [record["bytes_up"] for record in found.records] == [None, document["bytes_up"]]


def test_a_notebook_shows_no_empty_columns_and_few_bytes_in_kilobytes(tmp_path):
    """The bytes of a model with a hundred parameters were 0.0 MB; four columns held dashes only."""
    unknown = {"clusters_recovered": None, "minority_recovered": None, "accuracy_minority": None}
    runs = [
        write_result(tmp_path / f"{name}{seed}", name, seed, final=unknown) for name in ("global", "oracle") for seed in (0, 1)
    ]
    for run in runs:
        document = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps({**document, "bytes_up": 41_250, "bytes_down": 99_000}))
    found = Comparison.of(runs)
    assert {row["kB up"] for row in found.rows} == {"41.2 +- 0.0"}
    for text in (str(found), found._repr_html_()):
        assert "kB down" in text
        assert "minority" not in text
        assert "clusters found" not in text
        assert text.lower().count("differences") == 1


def test_records_tell_runs_apart_by_the_settings_that_differ(tmp_path):
    runs = [write_result(tmp_path / f"{lr}", local={"lr": lr}) for lr in (0.1, 0.2)]
    records = Comparison.of(runs).records
    assert [record["local.lr"] for record in records] == [0.1, 0.2]
    assert all("seconds" in record and "rounds" not in record for record in records)


def test_a_page_is_loud_about_runs_that_do_not_compare(tmp_path):
    runs = [write_result(tmp_path / f"{seed}", seed=seed) for seed in range(2)]
    runs.append(write_result(tmp_path / "open", "oracle", terms={"epsilon": None}))
    text = write_sweep(write_sweep_folder(tmp_path, {"algorithm.name": ["global", "oracle"]}, runs)).read_text(encoding="utf-8")
    assert "Not comparable: open: epsilon is inf, elsewhere 5." in text
    assert "open: Unprotected: this run has no finite epsilon." in text
    assert "NOT COMPARABLE" in text
    assert text.index("</h1>") < text.index('role="alert"') < text.index('<p class="muted">')  # above all details


def test_an_unprotected_run_is_not_drawn_as_if_it_kept_its_epsilon(tmp_path):
    runs = [
        write_result(tmp_path / f"{name}{epsilon}", name, privacy={"epsilon": epsilon}, terms=terms)
        for name, terms in (("global", {}), ("oracle", {"epsilon": None}))
        for epsilon in (3.0, 8.0)
    ]
    shown = drawn(write_sweep(write_sweep_folder(tmp_path, {"privacy.epsilon": [3, 8]}, runs)))
    names = [trace["name"] for trace in shown["accuracy_mean"]["data"] if "name" in trace]
    assert names == ["global", "oracle (unprotected)"]


def test_a_sweep_of_which_nothing_is_finished_is_a_sentence(tmp_path):
    done = dpcfl("report", write_sweep_folder(tmp_path, {}, [], waiting=2))
    assert (done.returncode, "none of the sweep's 2 runs has finished" in done.stderr) == (2, True)


def test_a_page_escapes_its_texts_and_lists_missing_figures(tmp_path):
    drawn_one = figures.Figure("one", "One", "<i>", figures.spec([{"type": "scatter", "x": [1], "y": [float("nan")]}]))
    rows = [["<script>", "3", "71.0 +- 0.2", "reference", "–"], ["b", "–", "yes", "3", "-0.9 (-5.4 to +3.5)"]]
    table = pages.Table("Claims", ["what", "runs", "found", "seeds", "lead"], rows, "as <b>")
    page = pages.write_page(
        tmp_path / "page.html", title="A & B", lead=["one", "two"], tables=[table],
        figures=[drawn_one, figures.Figure("two", "Two", why="no run has measured it")],
    )  # fmt: skip
    text = page.read_text(encoding="utf-8")
    assert "<title>A &amp; B</title>" in text
    assert "<td>&lt;script&gt;</td>" in text
    assert '<td class="number">71.0 +- 0.2</td>' in text
    assert '<td class="number">-0.9 (-5.4 to +3.5)</td>' in text  # in one line, also on a phone
    assert "Two: no run has measured it." in text
    assert drawn(page)["one"]["data"][0]["y"] == [None]
    bare = pages.write_page(tmp_path / "bare.html", title="t", lead=[], figures=[], tables=[table])
    assert bare.stat().st_size < 20_000  # no figure, no plotting script


def test_a_sweep_with_unknown_true_clusters_does_not_say_that_no_algorithm_clusters_clients(tmp_path):
    unknown = {"clusters_recovered": None, "minority_recovered": None, "accuracy_minority": None}
    run = write_result(tmp_path / "dp-ifca", "dp-ifca", algorithms={"dp-ifca": {"clusters": 2}}, final=unknown)
    text = write_sweep(write_sweep_folder(tmp_path, {}, [run])).read_text(encoding="utf-8")
    assert "no run has clusters to compare: the true clusters are unknown, or no algorithm here clusters clients" in text


def test_settings_that_belong_to_an_algorithm_do_not_name_its_line(tmp_path):
    own = [
        write_result(tmp_path / f"{name}-{epsilon}", name, local={"lr": lr}, privacy={"epsilon": epsilon})
        for name, lr in (("global", 0.4), ("local", 0.1))
        for epsilon in (3, 5)
    ]
    rows = compare.rows([read_result(folder) for folder in own])
    assert compare.telling(rows) == []
    assert "local.lr" in compare.differing(rows)
    names = {trace.get("name") for figure in sweep_figures(rows) if figure.spec for trace in figure.spec["data"]}
    assert {"global", "local"} <= names
    twice = write_result(tmp_path / "again", "global", local={"lr": 0.8})
    assert compare.telling([*rows, *compare.rows([read_result(twice)])]) == ["local.lr"]


def test_compare_writes_plots_and_fairness(finished_run, tmp_path):
    import shutil

    shutil.copytree(finished_run, tmp_path / "run")
    done = dpcfl("compare", tmp_path / "run", "--page", tmp_path / "page.html", "--fairness")
    assert done.returncode == 0, done.stderr
    assert "F_acc %" in done.stdout
    assert drawn(tmp_path / "page.html")


def with_times(folder: Path, seconds: float, accuracies: list[float], **more) -> Path:
    """A finished run whose rounds take `seconds` each and reach these mean accuracies."""
    write_result(folder, accuracy=accuracies[-1], **more)
    (folder / "metrics.jsonl").unlink()
    for t, accuracy in enumerate(accuracies, 1):
        write_lines(
            folder / "metrics.jsonl",
            [
                {"view": "server", "round": t, "seconds": seconds, "bytes_up": 1},
                {"view": "observer", "round": t, "accuracy_mean": accuracy},
            ],
        )
    return folder


def test_time_to_accuracy_is_beside_the_rounds_to_it(tmp_path):
    runs = [
        with_times(tmp_path / "a", 2.0, [0.3, 0.5, 0.7]),
        with_times(tmp_path / "b", 2.0, [0.5, 0.6, 0.65], seed=1),
        with_times(tmp_path / "c", 10.0, [0.62, 0.8, 0.8], algorithm="local"),
    ]
    usual, other = Comparison.of(runs).rows
    assert (usual["rounds to 61 %"], usual["seconds to 61 %"]) == ("3.0 +- 0.0", "6.0 +- 0.0")  # 95 % of 65 %
    assert (other["rounds to 61 %"], other["seconds to 61 %"]) == ("1", "10.0")
    assert "; 61 %: 95 % of the worst run's best mean accuracy, rounded down" in Comparison.of(runs).table.caption
    assert "rounded down" not in Comparison.of(runs, target=0.7).table.caption
    first, second = Comparison.of(runs, target=0.7).rows
    assert (first["rounds to 70 %"], first["seconds to 70 %"]) == ("3 (1/2)", "6.0 (1/2)")
    assert (second["rounds to 70 %"], second["seconds to 70 %"]) == ("2", "20.0")
    assert "never" in Comparison.of(runs, target=0.9).rows[0].values()
    later, _ = Comparison.of(runs, target=0.5).rows
    assert later["rounds to 50 %"] == "1.5 +- 0.7"  # rounds 2 and 1; rounded to whole rounds it was 2 +- 1
    table = list(csv.DictReader(io.StringIO(Comparison.of(runs, target=0.7).to_csv())))
    assert [(line["rounds_to_target"], line["seconds_to_target"]) for line in table] == [("3", "6.0"), ("", ""), ("2", "20.0")]
    with pytest.raises(ConfigError, match="target is 70: must be an accuracy above 0 and up to 1"):
        Comparison.of(runs, target=70)
    page = tmp_path / "page.html"
    done = dpcfl("compare", *runs, "--target", "0.7", "--page", page)
    assert (done.returncode, "seconds to 70 %" in done.stdout) == (0, True), done.stderr
    traces = drawn(page)["accuracy-time"]["data"]
    assert [trace["x"][-1] for trace in traces[:3]] == [6.0, 6.0, 30.0]
    assert (traces[-1]["name"], traces[-1]["x"], traces[-1]["y"]) == ("target 70 %", [0, 30], pytest.approx([70, 70]))


def test_settings_of_one_client_have_readable_columns(tmp_path):
    network = {"runtime": {"federation": "in-process"}, "output": {"transcript": "off"}}
    folders = [
        write_result(
            tmp_path / f"{factor:g}", network={"clock": "virtual", "clients": {"2": {"compute_factor": factor}}}, **network
        )
        for factor in (1.0, 4.0)
    ]
    table = compare_table.table(compare.rows(map(read_result, folders)))
    assert table.columns[2] == "clients 2 compute_factor"
    assert [row[2] for row in table.rows] == ["1.0", "4.0"]


def test_names_of_foreign_runs_are_no_formulas_in_a_spreadsheet(tmp_path):
    formula = "=HYPERLINK(0)"
    run = write_result(tmp_path / "run")
    settings = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**settings, "name": formula}))
    (line,) = csv.DictReader(io.StringIO(Comparison.of([run]).to_csv()))
    assert line["name"].removeprefix("'") == read_result(run).name
    assert not line["name"].startswith("=")
