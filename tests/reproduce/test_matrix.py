"""The matrix: every figure of every paper has a status; `all` fills it within a time budget, and goes on where it stopped."""

from __future__ import annotations

import json
import re
import shutil
from types import SimpleNamespace

import pytest
from conftest import ROOT, dpcfl

from dpcfl_net.core.errors import ConfigError, RunFailed
from dpcfl_net.experiment.config import load
from dpcfl_net.launch.cli import reproduce, reproduce_all
from dpcfl_net.launch.new_run import write_config
from dpcfl_net.launch.sweep_grid import cell_folder
from dpcfl_net.reproduce import matrix
from dpcfl_net.reproduce.base import UNCOUNTED_LOOK, Reproduction, ReproductionResult, registry
from dpcfl_net.reproduce.claims import Claim, Comparison, Exact
from dpcfl_net.reproduce.inventory import papers
from dpcfl_net.reproduce.planned import measure

MEASURED = ROOT / "docs" / "measured"
START, END = "<!-- matrix -->", "<!-- end of matrix -->"


def test_every_reproduction_belongs_to_an_item_and_every_item_names_known_ones():
    named = {name for paper in papers() for item in paper.items for name in item.by}
    assert named == set(registry())
    assert [paper.key for paper in papers()] == ["r-dpcfl", "rc-dpfl", "em-fdro", "rr-cluster"]


@pytest.mark.parametrize(
    ("key", "figures", "tables"),
    [("r-dpcfl", range(1, 15), (1, 2, 3)), ("em-fdro", (1, 2, 3), ()), ("rr-cluster", (1, 2, 3), range(1, 10))],
)
def test_every_figure_and_table_is_listed(key, figures, tables):
    (paper,) = [paper for paper in papers() if paper.key == key]
    listed = {item.item for item in paper.items}
    assert {f"Figure {k}" for k in figures} | {f"Table {k}" for k in tables} <= listed
    assert not {item for item in listed if re.fullmatch(r"(Figure|Table) \d+", item)} - (
        {f"Figure {k}" for k in figures} | {f"Table {k}" for k in tables}
    )


def test_every_item_has_a_status_without_any_result(tmp_path):
    tables = matrix.tables(matrix.read_cells(tmp_path))
    for paper, table in zip(papers(), tables, strict=True):
        for item in paper.items:
            (*found,) = (row for row in table.rows if row[0] == item.item)
            assert len(found) == (0 if item.drawing else 1)
            assert (f"{item.item} ({item.drawing})" in table.caption) == bool(item.drawing)
    rows = [row for table in tables for row in table.rows]
    assert all(row[1].startswith("not run") for row in rows)
    assert [row[0] for row in rows if "ResNet-18 on CIFAR-10" in row[1]] == ["Figure 5"]
    assert {row[5] for row in rows} == {"not run"}


def test_the_page_of_results_has_the_matrix_of_the_committed_cells():
    """Rendered again with: dpcfl reproduce matrix --out docs/measured."""
    (page,) = (ROOT / "docs").rglob("results.md")
    _, _, after = page.read_text().partition(START)
    shown = after.partition(END)[0].strip()
    assert shown == matrix.markdown(matrix.tables(matrix.read_cells(MEASURED))).strip()


def test_committed_cells_keep_their_raw_data():
    cells = matrix.read_cells(MEASURED)
    assert cells
    for (name, scale), cell in cells.items():
        folder = MEASURED / f"{name.replace('/', '-')}-{scale}"
        assert cell["state"] in (matrix.FINISHED, matrix.PARTIAL), name
        assert (folder / "data.csv").exists() or (MEASURED / cell.get("data", "nowhere")).is_file(), name
        for claim in cell.get("claims", ()):
            assert claim["exact"] or claim["verdict"] in ("undecided", "not tested") or claim["seeds"] > 1, claim["text"]


def test_formulas_need_no_other_scale():
    (item,) = (item for paper in papers() for item in paper.items if item.by == ("r-dpcfl/fig3",) and paper.key == "r-dpcfl")
    cell = {"state": "finished", "claims": []}
    assert matrix.row(item, {("r-dpcfl/fig3", "laptop"): cell})[5] == "the same"
    assert matrix.row(item, {})[5] == "not run"


QUICKSTART = ROOT / "configs" / "quickstart.yaml"


class Quick(Reproduction):
    """One exact claim and one over seeds."""

    name, paper, title = "quick/fig1", "A paper, Figure 1", "Quick"
    computed: list = []

    def compute(self, context):
        self.computed.append((context.scale, context.asked_seeds))
        values = {seed: 1 + 0.01 * seed for seed in context.seeds((0,))}
        rows = [{"seed": seed, "value": value} for seed, value in values.items()]
        return ReproductionResult(rows, [Claim("a", "1", Exact(True)), Claim("b", "1", [Comparison(values, 0.5)])])


class Slow(Quick):
    """Needs a run."""

    name, title, complete_runs, run_columns = "slow/fig1", "Slow", True, ("seed",)

    def compute(self, context):
        measure(self, context, [0], lambda seed: ((seed,), (QUICKSTART, {"seed": [seed]})), lambda *_: [], whole=True)
        raise AssertionError("a run started after the time budget")


@pytest.fixture
def two(monkeypatch):
    figures = {figure.name: figure for figure in (Quick, Slow)}
    monkeypatch.setattr(Quick, "computed", [])
    for module in (reproduce_all, matrix):
        monkeypatch.setattr(module, "registry", lambda: figures)
    monkeypatch.setattr(matrix, "find", figures.__getitem__)
    return figures


def test_all_fills_cells_once_and_stops_when_its_time_is_spent(two, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    clock = iter([0.0, 1.0, 2.0, 99.0])  # start; before Quick; before Slow; before its run
    for module in (reproduce_all, reproduce):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    reproduce_all.reproduce_all("laptop", out, None, "30s", None)
    said = capsys.readouterr().out
    assert "time budget spent in slow/fig1" in said
    assert json.loads((out / "quick-fig1-laptop" / "claims.json").read_text())["asked_seeds"] is None
    assert not (out / "slow-fig1-laptop" / "claims.json").exists()
    assert (out / "matrix.md").exists()
    assert (out / "matrix.html").exists()

    reproduce_all.reproduce_all("laptop", out, "quick", None, None)
    assert Quick.computed == [("laptop", None)]  # there already
    reproduce_all.reproduce_all("laptop", out, "quick", None, 5)
    assert Quick.computed[1:] == [("laptop", 5)]  # other seeds
    cells = matrix.read_cells(out)
    assert (matrix.status(cells["quick/fig1", "laptop"]), matrix.seeds(cells["quick/fig1", "laptop"])) == (
        "2 hold",
        "exact, 5",
    )


def test_a_failed_figure_is_kept_as_failed_and_does_not_end_the_others(two, tmp_path, monkeypatch):
    def fail(self, context):
        raise ConfigError("data.root: no such folder")

    monkeypatch.setattr(Quick, "compute", fail)
    with pytest.raises(RunFailed, match=r"quick/fig1: data\.root"):
        reproduce_all.reproduce_all("laptop", tmp_path, "quick", None, None)
    cells = matrix.read_cells(tmp_path)
    assert matrix.status(cells["quick/fig1", "laptop"]) == "failed: data.root: no such folder"


def test_a_context_with_a_spent_budget_starts_no_run(tmp_path):
    context = reproduce.RunContext("laptop", tmp_path, tmp_path / "store", until=0.0)
    assert context.finished([(QUICKSTART, {"seed": [0]})]) == [[]]


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("2h", 7200), ("1.5m", 90)])
def test_a_time_budget_has_a_unit(text, seconds, monkeypatch):
    monkeypatch.setattr(reproduce, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    assert reproduce.deadline(text) == 1000 + seconds


@pytest.mark.parametrize("text", ["2", "h", "-1h", "2 days"])
def test_a_time_budget_without_one_is_refused(text):
    with pytest.raises(ConfigError, match="--time-budget"):
        reproduce.deadline(text)


def test_a_figure_in_time_is_computed_and_one_that_lacks_a_run_is_named(two, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reproduce, "find", two.__getitem__)
    (found,) = reproduce.reproduce(["slow/fig1", "quick/fig1"], "laptop", tmp_path, "0s")
    assert found["name"] == "quick/fig1"
    assert "time budget spent in slow/fig1" in capsys.readouterr().out


class Parts(Quick):
    """Can be computed from a part of its runs; two runs are there."""

    name, title, complete_runs = "parts/fig1", "Parts", True

    def compute(self, context):
        (found,) = context.finished([(ROOT / "configs" / "quickstart.yaml", {"seed": [0, 1, 2]})])
        claims = [Claim("a", "1", [Comparison({result.seed: 1.0 for result in found}, 0.5)])] if found else []
        return ReproductionResult([{"seed": result.seed} for result in found], claims, runs=len(found), planned_runs=3)


def test_a_figure_with_missing_runs_says_so_and_is_continued(two, tmp_path, monkeypatch, capsys):
    two[Parts.name] = Parts
    monkeypatch.setattr(reproduce, "find", two.__getitem__)

    def store(seed, state):
        config = load(ROOT / "configs" / "quickstart.yaml", [f"seed={seed}"])
        folder = cell_folder(config, tmp_path / "store")
        folder.mkdir(parents=True)
        final = {"accuracy_mean": 0.5, "accuracy_worst": 0.5}
        document = {"name": "x", "algorithm": "r-dpcfl", "seed": seed, "state": state, "privacy": {}, "final": final}
        (folder / "run.json").write_text(json.dumps(document))
        (folder / "protocol.json").write_text("{}")
        write_config(folder, config)

    reproduce.reproduce([Parts.name], "laptop", tmp_path, "0s")
    assert matrix.status(matrix.read_cells(tmp_path)[Parts.name, "laptop"]) == "no claim yet (0 of 3 runs)"
    for seed, state in ((0, "finished"), (2, "finished"), (1, "stopped")):
        store(seed, state)
    reproduce.reproduce([Parts.name], "laptop", tmp_path, "0s")
    assert "partial: 2 of 3 runs; repeat the command to continue" in capsys.readouterr().out
    cell = matrix.read_cells(tmp_path)[Parts.name, "laptop"]
    assert (matrix.status(cell), matrix.seeds(cell)) == ("1 undecided (2 of 3 runs)", "2")
    assert not reproduce_all.done(Parts, "laptop", tmp_path, None)
    assert "Partial: 2 of 3 runs." in (tmp_path / "parts-fig1-laptop" / "report.html").read_text()
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(ConfigError, match=r"has a result of 2 runs, and .*store has 0 of 3: give another --out"):
        reproduce.reproduce([Parts.name], "laptop", tmp_path, "0s")
    assert matrix.read_cells(tmp_path)[Parts.name, "laptop"] == cell


def test_a_result_with_more_seeds_in_the_same_folder_says_that_the_look_before_is_not_counted(
    two, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(reproduce, "find", two.__getitem__)

    def told(seeds, out="out"):
        reproduce.reproduce([Quick.name], "laptop", tmp_path / out, seeds=seeds)
        notes = json.loads((tmp_path / out / "quick-fig1-laptop" / "claims.json").read_text())["notes"]
        assert (UNCOUNTED_LOOK in notes) is (UNCOUNTED_LOOK in capsys.readouterr().out)
        return UNCOUNTED_LOOK in notes

    assert [told(seeds) for seeds in (1, 3, 3)] == [False] * 3  # one seed tests nothing, and the same runs are the same look
    assert [told(seeds) for seeds in (5, 5)] == [True] * 2  # also when the command is repeated
    assert not told(5, "another")


def test_a_broken_cell_is_named(tmp_path):
    (tmp_path / "r-dpcfl-fig3-laptop").mkdir()
    (tmp_path / "r-dpcfl-fig3-laptop" / "claims.json").write_text('{"claims": []}')
    with pytest.raises(ConfigError, match=r"r-dpcfl-fig3-laptop.*compute the figure again"):
        matrix.read_cells(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["all", "r-dpcfl/fig3"], "'all' is given together with figures"),
        (["r-dpcfl/fig3", "--only", "r-dpcfl"], "belongs to `dpcfl reproduce all`"),
        (["matrix", "--time-budget", "2h", "--jobs", "2"], "--time-budget, --jobs: not with matrix, which runs nothing"),
        (["--list", "--scale", "paper"], "--scale: not with --list, which lists every figure"),
        (["r-dpcfl/fig3", "--time-budget", "2"], "must be a number with s, m or h"),
        (["all", "--only", "nobody"], "must be one of em-fdro, mr-mtl, r-dpcfl, rc-dpfl, rr-cluster"),
        (["matrix", "--out", "/nowhere/at/all"], "no such folder"),
    ],
)
def test_mistakes_with_all_and_matrix_are_sentences(arguments, words):
    done = dpcfl("reproduce", *arguments)
    assert done.returncode == ConfigError.exit_code
    assert words in done.stderr
    assert "Traceback" not in done.stderr
