"""`dpcfl bench`: every row runs, and its tables, targets and choices of other software are right. Never how fast it is."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from dpcfl_net.core import runlog
from dpcfl_net.core.errors import ConfigError, RunFailed
from dpcfl_net.core.extras import advice
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.experiment import host_costs
from dpcfl_net.launch.bench import family, machine, options, registry, tables, tree
from dpcfl_net.launch.bench.figures import Figure, Result, Target
from dpcfl_net.launch.bench.options import Options
from dpcfl_net.launch.bench.peers import process
from dpcfl_net.launch.bench.runs import Cost, rounds_done
from dpcfl_net.launch.bench.timing import Sample, Spread, enough, interleave, timed
from dpcfl_net.launch.cli import doctor
from dpcfl_net.launch.cli.commands import app
from dpcfl_net.transport.keys import aggregator_key

QUICK = Options(quick=True, against=frozenset())
STARTS_PROCESSES = ("start", "clients", "curves", "tree", "noop", "round", "wire")
IN_THIS_PROCESS = tuple(row for row in registry.ROWS if row not in STARTS_PROCESSES)


def samples(*seconds: float) -> list[Sample]:
    return [Sample(value, 2 * value) for value in seconds]


def test_quick_rows_print_json_with_the_machine():
    done = CliRunner().invoke(app, ["bench", "aggregate", "--quick", "--json"])
    found = json.loads(done.stdout)
    assert found["machine"]["processor"] == host_costs.processor()
    assert found["machine"]["cores"] >= 1
    (row,) = found["rows"]
    (figure,) = row["figures"]
    assert {"dpcfl", "dpcfl, as they come", "memcpy"} == figure["ways"].keys()
    assert figure["ways"]["memcpy"]["quotient"]["median"] > 0
    assert figure["targets"][0]["verdict"] in ("hit", "miss")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("resnet", "noop"))) for name in (*IN_THIS_PROCESS, "noop")]
)
def test_every_row_measures_in_quick_mode(name):
    check(registry.measure(name, QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.ROWS)
def test_every_row_measures_with_what_it_compares(name):
    check(registry.measure(name, Options(quick=True)))


def test_a_measured_run_has_as_many_rounds_as_it_has_done(private_run, tmp_path):
    """Not twice as many: metrics.jsonl also has lines with the epsilon spent, in a run of more than half a minute while it lasts."""
    metrics = RunFolder(private_run).metrics
    lines = [line for line in runlog.read(metrics) if line["view"] == "server"]
    rounds = {line["round"] for line in lines}
    assert len(lines) > len(rounds) == rounds_done(metrics)
    assert rounds_done(tmp_path / "metrics.jsonl") == 0


def test_aggregators_are_measured_beside_a_round_without():
    def cost(coordinator, up, **others):
        by_role = {"coordinator": coordinator, "worker": 0.4, **others}
        return Cost(Sample(sum(by_role.values()), 0.25), by_role, {}, 0.0, 0.0, 0.0, up, up / 2)

    case = tree.Case("cnn", 28_938, 40, 20)
    names = [*tree.ways(case)]
    assert names == ["dpcfl", "1 aggregator", "2 aggregators", "4 aggregators"]
    found = {
        figure.case.split(": ")[1]: figure
        for figure in tree.figures(
            case,
            {"dpcfl": [cost(0.2, 4e6)], "4 aggregators": [cost(0.05, 1e6, aggregator=0.3)]},
        )
    }
    assert found["all processes"].ways["4 aggregators"].value.median == pytest.approx(750)
    assert found["the coordinator"].ways["4 aggregators"].quotient.median == pytest.approx(0.25)
    aggregators = found["all aggregators"].ways
    assert [aggregators[name].value.median for name in ("dpcfl", "4 aggregators")] == [0.0, 300.0]
    assert found["to the coordinator"].ways["dpcfl"].value.median == 4.0
    assert found["from the coordinator"].ways["4 aggregators"].value.median == 0.5


def test_processes_are_counted_by_their_role():
    titles = {aggregator_key(12): "aggregator", "client": "worker", "clients": "worker", "coordinator": "coordinator"}
    assert {title: family.role_of(title) for title in titles} == titles


def check(result: Result) -> None:
    """Every figure has values, and the tables hold every case."""
    assert result.figures
    for figure in result.figures:
        assert figure.ways["dpcfl"].value.median >= 0
        assert all(
            way.quotient is not None
            for name, way in figure.ways.items()
            if name != "dpcfl" and figure.ways["dpcfl"].value.low > 0
        )
        assert figure.case in tables.text(result)
        assert figure.case in tables.markdown([result], machine.describe())


@pytest.mark.slow
def test_this_host_can_be_measured(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lines = doctor.cost_lines(doctor.measure())
    costs, source = host_costs.load()
    assert source == "constants measured on this host"
    assert costs.start_s > 0
    assert costs.worker_bytes > 2**20
    assert costs.aggregator_bytes > 2**20
    assert costs.aggregator_parameter_bytes > 8  # a sum
    assert costs.processor in lines[0]
    assert any(line.startswith("each aggregator: ") for line in lines)


def test_repetitions_are_interleaved_in_both_orders():
    calls = []
    ways = {name: timed(lambda name=name: calls.append(name)) for name in "ab"}
    found = interleave(ways, 3)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert {name: len(values) for name, values in found.items()} == {"a": 3, "b": 3}


def test_time_is_per_unit_and_counts_ended_children():
    def work() -> None:
        process.subprocess.run([process.sys.executable, "-c", "sum(range(10**7))"], check=True)

    once, halved = timed(work)(), timed(work, units=10**6)()
    assert once.cpu > 0.01
    assert halved.cpu < once.cpu
    assert halved.wall < once.wall


def test_enough_runs_at_least_the_fewest_steps():
    assert enough(lambda steps: None, 4, 0.0) == 4


def test_quartiles_and_quotients_are_of_paired_repetitions():
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(3.0, 2.0, 4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)
    figure = Figure.of_times("case", "ms", {"dpcfl": samples(1.0, 2.0, 4.0), "other": samples(3.0, 6.0, 4.0)})
    assert figure.ways["other"].value.median == 4000.0
    assert figure.ways["other"].quotient is not None
    assert figure.ways["other"].quotient.median == 3.0
    assert figure.ways["other"].wall == Spread(8000.0, 7000.0, 10000.0)


@pytest.mark.parametrize(
    ("target", "verdict"),
    [
        (Target(2.0, "other"), "hit"),
        (Target(2.5, "other"), "miss"),
        (Target(2.0, "absent"), "not measured"),
        (Target(1000.0), "hit"),
        (Target(999.0), "miss"),
    ],
)
def test_targets_are_lower_bounds_of_quotients_and_upper_bounds_of_values(target, verdict):
    figure = Figure.of_times("case", "ms", {"dpcfl": samples(1.0), "other": samples(2.0)}, [target])
    assert figure.verdict(target) == verdict
    assert verdict in tables.markdown([Result("row", "title", (figure,))], machine.describe())


def test_software_that_is_absent_or_not_asked_for_is_skipped_with_the_reason(monkeypatch):
    monkeypatch.setattr(options.importlib.util, "find_spec", lambda module: None)
    assert Options().refusal("flower") == f"flwr, ray is not installed: {advice('bench')}"
    assert not Options().uses("pfl")
    monkeypatch.setattr(options.importlib.util, "find_spec", lambda module: module)
    assert Options().uses("flower")
    assert Options(against=options.against("pfl, grpc")).refusal("flower") == "not asked for"
    with pytest.raises(ConfigError, match="unknown name 'jax'"):
        options.against("opacus,jax")


def test_a_markdown_page_keeps_what_is_around_the_tables(tmp_path):
    page = tmp_path / "page.md"
    figure = Figure.of_values("size", "MiB", {"dpcfl": [3.0]})
    tables.write(page, [Result("row", "title", (figure,))], machine.describe())
    page.write_text(f"first\n{page.read_text()}last\n")
    changed = Figure.of_values("length", "m", {"dpcfl": [5.0]})
    tables.write(page, [Result("row", "title", (changed,))], machine.describe())
    text = page.read_text()
    assert text.startswith("first\n")
    assert text.endswith("last\n")
    assert "length" in text
    assert "size" not in text
    page.write_text("mine")
    with pytest.raises(ConfigError, match="has no part between the lines"):
        tables.write(page, [], machine.describe())


def test_of_all_rows_one_that_fails_is_left_out_and_named_at_the_end(monkeypatch, tmp_path):
    def measure(name, how):
        if name == "epoch":
            raise RunFailed("the run ended too soon")
        return Result(name, name, (Figure.of_times("case", "ms", {"dpcfl": samples(1.0)}, []),), {})

    monkeypatch.setattr(registry, "measure", measure)
    done = CliRunner().invoke(app, ["bench", "all", "--markdown", str(tmp_path / "page.md")])
    assert "epoch: not measured: the run ended too soon" in done.stderr
    assert isinstance(done.exception, RunFailed)
    assert "not measured: epoch" in str(done.exception)
    page = (tmp_path / "page.md").read_text()
    assert "### epoch" not in page
    assert all(f"### {name}: " in page for name in registry.ROWS if name != "epoch")


def test_a_program_that_fails_is_named_with_its_last_words():
    with pytest.raises(RunFailed, match=r"(?s)peers\.wire flying .*KeyError"):
        process.run("wire", "flying", 10, 1)
