"""Runs below a folder and their key figures: what a listing holds, bounds, and growing, replaced and damaged files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_folder import privacy, run_json, write_lines, write_round, write_run, write_start

import dpcfl_net as dpcfl
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.locks import run_lock
from dpcfl_net.launch.cli.progress import tail_progress
from dpcfl_net.report.figures import epsilon_spent as epsilon_figure
from dpcfl_net.report.served import epsilon, facts
from dpcfl_net.results.listing import MOST_DEPTH, list_runs
from dpcfl_net.results.overview import Overview, RunTail, fingerprint, of_sweep
from dpcfl_net.results.run_view import read_run, read_unfinished


def places(root: Path) -> list[str]:
    return sorted(found.place for found in list_runs(root).found.values())


def test_a_listing_holds_runs_at_any_place_but_not_within_runs(tmp_path: Path) -> None:
    for name in ("a", "b/c", ".draft", "a/export/inner", "logs/x"):
        write_start(tmp_path / name)
    (tmp_path / "logs" / "run.json").write_text("{}")  # of another program
    assert places(tmp_path) == ["a", "b/c", "logs/x"]
    assert places(tmp_path / "a") == ["."]
    ids = set(list_runs(tmp_path).found)
    assert ids == set(list_runs(tmp_path / "b" / "..").found)  # the same after a restart, and through another name
    assert len(ids) == 3


def test_deep_folders_are_named_not_searched(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*"abcdef")
    assert len(deep.relative_to(tmp_path).parts) == MOST_DEPTH
    write_start(deep)
    write_start(tmp_path.joinpath(*"ABCDEF") / "G")
    listing = list_runs(tmp_path)
    assert [found.place for found in listing.found.values()] == ["a/b/c/d/e/f"]
    assert listing.notes == (f"not searched: 1 folder more than {MOST_DEPTH} levels down",)


@pytest.mark.parametrize("name", ["none", "file"])
def test_what_is_no_folder_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot list"):
        list_runs(tmp_path / name)


def test_key_figures_of_a_growing_run(tmp_path: Path) -> None:
    folder = write_start(tmp_path / "run", 6)
    tail = RunTail(folder)
    with run_lock(folder):
        assert (tail.read().state, tail.read().done, tail.read().mean) == ("running", 0, None)
        before = fingerprint(folder)
        write_round(folder, 1, 6)
        write_lines(folder / "metrics.jsonl", [{"view": "server", "round": 1, "epsilon_spent_by_client": [1.5, 0.0, 2.25]}])
        assert fingerprint(folder) != before
        one = tail.read()
        write_round(folder, 2, 6)
        two = tail.read()
    assert (one.done, one.total, one.spent, two.done) == (1, 6, 2.25, 2)
    assert (epsilon(one), epsilon(two)) == (
        "2.25 of 5",
        "2.25 of 5 after round 1",
    )  # epsilon is counted more rarely than rounds end
    assert one.mean is not None
    assert two.mean > one.mean
    assert one.started == two.started == pytest.approx(1_760_000_000 + 5.1, abs=0.1)
    assert RunTail(folder).read().state == "interrupted"
    (folder / "run.json").write_text(json.dumps(run_json()))
    assert (tail.read().spent, tail.read().spent_round) == (
        4.98,
        None,
    )  # the last count of the lines is not that of the last round
    (folder / "run.json").unlink()
    (folder / "metrics.jsonl").write_bytes(b"")  # another run took the place
    assert tail.read().mean is None


def test_the_largest_epsilon_is_not_that_of_the_clients_with_a_finite_one(tmp_path: Path) -> None:
    """Null in a line is an infinite epsilon, such as of a client whose ledger is damaged: the largest of the others was shown."""
    folder = write_start(tmp_path / "run", 6)
    write_round(folder, 1, 6)
    write_lines(folder / "metrics.jsonl", [{"view": "server", "round": 1, "epsilon_spent_by_client": [1.5, None, 2.25]}])
    (one,) = dpcfl.open_run(folder).rounds
    assert one.epsilon_spent is None
    assert RunTail(folder).read().spent is None
    assert tail_progress(folder).epsilon_text == "at most 5"
    figure = epsilon_figure(read_run(folder))
    assert figure.spec is not None
    assert [trace["name"] for trace in figure.spec["data"]] == ["client 0", "client 2", "promised"]
    assert figure.caption.endswith("That of 1 client is not finite.")
    write_lines(folder / "metrics.jsonl", [{"view": "server", "round": 1, "epsilon_spent_by_client": [1.5, None, 1.5]}])
    figure = epsilon_figure(read_run(folder))
    assert figure.spec is not None
    assert figure.spec["data"][0]["name"] == "clients 0, 2"


def test_key_figures_of_a_finished_run_are_those_of_run_json(tmp_path: Path) -> None:
    shown = RunTail(write_run(tmp_path / "run", 3)).read()
    assert (shown.state, shown.mean, shown.worst, shown.minority, shown.spent) == ("finished", 0.712, 0.655, 0.698, 4.98)
    assert dict(facts(shown, "round"))["epsilon"] == "4.98 of 5"


def test_a_run_that_is_being_prepared_is_running(tmp_path: Path) -> None:
    folder = write_start(tmp_path / "run", 3)
    (folder / "run.json").unlink()
    assert RunTail(folder).read().state == "unknown"  # a job for processes that are started by hand
    with run_lock(folder):
        assert RunTail(folder).read().state == "running"
    assert RunTail(folder).read().state == "interrupted"


def test_damaged_files_leave_gaps(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 3)
    (folder / "run.json").write_text('{"state": "fin')
    (folder / "protocol.json").write_text("[]")
    shown = RunTail(folder).read()
    assert (shown.state, shown.name, shown.algorithm, shown.total, shown.done) == ("unknown", "fmnist-r-dpcfl", "r-dpcfl", 3, 3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"epsilon_spent": None}, "at most 5"),
        ({"epsilon": None, "epsilon_spent": None}, "inf"),
        ({"insecure": "noise is seeded"}, "4.98 of 5 (insecure)"),
        ({"epsilon": 5.123}, "4.98 of 5.123"),  # as `dpcfl watch` and the statement say it
    ],
)
def test_an_epsilon_is_never_said_without_its_limits(tmp_path: Path, changes: dict, said: str) -> None:
    folder = write_start(tmp_path / "run")
    (folder / "run.json").write_text(json.dumps(run_json(privacy=privacy(**changes))))
    assert epsilon(RunTail(folder).read()) == said
    assert epsilon(Overview("name", "local", "unknown")) == "–"


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ((), "waiting"),
        (("finished", "finished"), "waiting"),
        (("finished", "running", "failed"), "running"),
        (("finished", "failed", "interrupted"), "failed"),
        (("finished", "interrupted"), "interrupted"),
        (("finished",) * 3, "finished"),
    ],
)
def test_state_of_a_sweep_of_three_runs(states: tuple[str, ...], said: str) -> None:
    shown = of_sweep("grid", 3, [Overview("name", "local", state) for state in states])
    assert (shown.state, shown.done, shown.total) == (said, states.count("finished"), 3)


def test_an_unfinished_run_is_read_from_its_rounds(tmp_path: Path) -> None:
    folder = write_start(tmp_path / "run", 6)
    started = {**run_json(state="running", rounds_done=0, bytes_up=0, wall_s=1.5), "final": {"accuracy_mean": None}}
    (folder / "run.json").write_text(json.dumps(started))
    for at in (1, 2):
        write_round(folder, at, 6)
    view = read_unfinished(folder, "interrupted")
    assert (view.state, view.run["bytes_up"], "final" in view.run) == ("interrupted", 2 * 21 * 116_000, False)
    assert view.run["wall_s"] == pytest.approx(8.2)
    done = write_run(tmp_path / "done", 2)
    for state in ("finished", "failed"):  # a run that ended has its own figures
        assert read_unfinished(done, state).run["wall_s"] == 168.2
    document = json.loads((done / "run.json").read_text())
    (done / "run.json").write_text(
        json.dumps({**document, "final": {"accuracy_mean": None}})
    )  # its last round was not measured
    assert read_unfinished(done, "finished").run["wall_s"] == 168.2
    assert read_unfinished(write_start(tmp_path / "begun", 6), "running").run["wall_s"] is None


def test_a_run_has_the_names_of_the_first_of_its_files_that_has_any(tmp_path: Path) -> None:
    folder = write_start(tmp_path / "folder")
    for file, of in (("run.json", "run"), ("protocol.json", "job")):
        document = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**document, "name": f"{of} name", "algorithm": f"{of} algorithm"}))
    (folder / "config.yaml").write_text("name: config name\nalgorithm: {name: config algorithm}\n")
    for file, of in (("run.json", "run"), ("protocol.json", "job"), ("metrics.jsonl", "config")):
        view = read_run(folder)
        assert (view.name, view.algorithm) == (f"{of} name", f"{of} algorithm")
        (folder / file).unlink(missing_ok=True)
    for damaged in ("algorithm: global\n", "rounds: 3\n"):
        (folder / "config.yaml").write_text(damaged)
        view = read_run(folder)
        assert (view.name, view.algorithm, view.state) == ("folder", "unknown algorithm", "unknown")
