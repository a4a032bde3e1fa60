"""Trackers: what reaches TensorBoard, MLflow and Weights & Biases, live, after a resumption, and of a run that has ended."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from api_runs import TINY
from cli_cases import call

import dpcfl_net as dpcfl
from dpcfl_net.launch.cli.watch import watch
from dpcfl_net.launch.feed import RoundFeed
from dpcfl_net.report.trackers import base

SEED = TINY["privacy"]["noise_seed"]


class Recorder(dpcfl.Tracker):
    """Keeps what it gets."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.fails_at = fails_at

    def open(self, run: Any) -> None:
        self.calls.append(("open", (run.state, self.first_round)))

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        if step == self.fails_at:
            raise ConnectionError("no route\nto the server")
        self.calls.append(("log", (step, dict(values), at)))

    def close(self, run: Any) -> None:
        self.calls.append(("close", run.state))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    @property
    def steps(self) -> list[int]:
        return [what[0] for name, what in self.calls if name == "log" and "server/seconds" in what[1]]


def test_every_figure_of_a_round_belongs_to_one_view() -> None:
    figures = {*base.SERVER, *base.COUNTS, *base.OBSERVER}
    other = {"round", "rounds", "time", "assignment", "accuracy_by_cluster", "accuracy_by_client"}
    assert len(figures) == len(base.SERVER) + len(base.COUNTS) + len(base.OBSERVER)
    assert figures | other == {field.name for field in dataclasses.fields(dpcfl.RoundMetrics)}
    metrics = dpcfl.RoundMetrics(3, 9, accuracy=0.5, accuracy_by_cluster=(0.4, None), missing=(1, 2), clusters=2, time=7.0)
    found = base.scalars(metrics)
    assert found["server/missing"] == 2
    assert found["observer/accuracy_cluster/A"] == 0.4
    assert "observer/accuracy_cluster/B" not in found
    assert "server/seconds" not in found
    assert {tag.split("/")[0] for tag in found} == {"server", "observer"}


def test_the_tags_of_many_clusters_are_names_that_mlflow_takes() -> None:
    """It refused `#26`, so that it was left out from round 1 on."""
    found = base.scalars(dpcfl.RoundMetrics(1, 9, accuracy_by_cluster=(0.5,) * 28))
    assert [tag for tag in found if not re.fullmatch(r"[/\w.\- ]*", tag)] == []
    assert list(found)[-3:] == ["observer/accuracy_cluster/Z", "observer/accuracy_cluster/26", "observer/accuracy_cluster/27"]


def test_the_result_has_the_last_accuracies_the_agreement_and_the_epsilon_spent(
    with_epsilon: dpcfl.Run, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(with_epsilon.path, tmp_path / "run"))
    document = json.loads((folder / "run.json").read_text())
    accuracies = {"accuracy_mean": 0.6, "accuracy_worst": 0.4, "accuracy_minority": 0.5, "accuracy_central": 0.55}
    document["final"] |= {**accuracies, "ari": 0.25}
    for spent in (4.5, None):
        document["privacy"]["epsilon_spent"] = spent
        (folder / "run.json").write_text(json.dumps(document))
        assert base.result(dpcfl.open_run(folder)) == {
            "final/observer/mean": 0.6,
            "final/observer/worst": 0.4,
            "final/observer/minority": 0.5,
            "final/observer/central": 0.55,
            "final/observer/ari": 0.25,
        } | ({} if spent is None else {"final/server/epsilon_spent": spent})


def test_a_tracker_hears_of_begin_rounds_and_end_and_a_resumed_run_gives_it_the_rest(tmp_path: Path) -> None:
    first, second = Recorder(), Recorder()
    callbacks = [first, lambda metrics: metrics.round < 1]
    stopped = dpcfl.run(TINY, tmp_path, "in-process", callbacks=callbacks, progress=False)
    assert (first.steps, first.calls[0], first.calls[-1]) == ([1], ("open", ("running", 1)), ("close", "interrupted"))
    run = dpcfl.resume(stopped.path, callbacks=[second], progress=False)
    assert second.names[0] == "open"
    assert second.calls[0][1] == ("running", 2)
    assert (second.steps, second.calls[-1]) == ([2, 3], ("close", "finished"))
    values = [what for name, what in second.calls if name == "log"][-1]
    assert values[1]["observer/accuracy"] == run.rounds[-1].accuracy
    assert values[2] == run.rounds[-1].time


def test_a_replay_takes_a_run_and_not_its_path() -> None:
    """It ended in an AttributeError of the tracker."""
    recorder = Recorder()
    with pytest.raises(dpcfl.ConfigError, match=r"^run is 'runs/one': must be a run, which dpcfl\.open_run\(path\) opens$"):
        recorder.replay("runs/one")  # type: ignore[arg-type]
    assert recorder.calls == []


def test_a_replay_gives_all_figures_of_a_run_that_has_ended(with_epsilon: dpcfl.Run) -> None:
    recorder = Recorder()
    assert recorder.replay(with_epsilon) is recorder
    assert recorder.calls == [
        ("open", ("finished", 1)),
        *(("log", (one.round, base.scalars(one), one.time)) for one in with_epsilon.rounds),
        ("close", "finished"),
    ]


def test_epsilons_that_are_computed_later_reach_the_tracker_at_the_end(with_epsilon: dpcfl.Run) -> None:
    recorder = Recorder()
    spent = {m.round: m.epsilon_spent for m in with_epsilon.rounds}
    recorder.begin(with_epsilon)
    for metrics in with_epsilon.rounds:
        recorder(dataclasses.replace(metrics, epsilon_spent=metrics.epsilon_spent if metrics.round == 1 else None))
    recorder.end(with_epsilon)
    logged = [
        (what[0], what[1]["server/epsilon_spent"])
        for name, what in recorder.calls
        if name == "log" and "server/epsilon_spent" in what[1]
    ]
    assert logged == list(spent.items())
    assert base.result(with_epsilon)["final/server/epsilon_spent"] == pytest.approx(spent[3])


def test_a_tracker_of_a_resumed_part_gets_no_late_epsilons_of_the_rounds_before(with_epsilon: dpcfl.Run) -> None:
    recorder = Recorder()
    recorder.begin(with_epsilon, first_round=3)
    recorder(dataclasses.replace(with_epsilon.rounds[-1], epsilon_spent=None))
    recorder.end(with_epsilon)
    assert [what[:2] for name, what in recorder.calls if name == "log"][1:] == [
        (3, {"server/epsilon_spent": with_epsilon.rounds[-1].epsilon_spent})
    ]


def test_a_tracker_gets_each_epsilon_once_and_in_order_as_a_run_computes_it(tmp_path: Path, with_epsilon: dpcfl.Run) -> None:
    folder = Path(shutil.copytree(with_epsilon.path, tmp_path / "run"))
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    is_epsilon = ["epsilon_spent_by_client" in line for line in lines]
    numbers = [json.loads(line)["round"] for line in lines]

    def write(epsilons: int, rounds: int) -> None:
        most = {True: epsilons, False: rounds}
        with open(folder / "metrics.jsonl", "a") as file:
            for line, of_epsilon, t in zip(lines, is_epsilon, numbers, strict=True):
                if line not in written and t <= most[of_epsilon]:
                    written.append(line)
                    file.write(line)

    (folder / "metrics.jsonl").unlink()
    written: list[str] = []
    recorder = Recorder()
    feed = RoundFeed(folder, with_epsilon.config, [recorder], earlier=True)
    for epsilons, rounds in ((0, 2), (1, 2), (2, 3), (2, 3)):  # the last round's comes when the run has ended
        write(epsilons, rounds)
        feed.update()
    write(3, 3)
    feed.end()
    logged = [
        (what[0], what[1].get("server/epsilon_spent"), "server/seconds" in what[1], what[2])
        for name, what in recorder.calls
        if name == "log"
    ]
    spent, at = [one.epsilon_spent for one in with_epsilon.rounds], [one.time for one in with_epsilon.rounds]
    assert logged == [
        (1, None, True, at[0]),
        (2, None, True, at[1]),
        (1, spent[0], False, at[0]),
        (2, spent[1], False, at[1]),
        (3, None, True, at[2]),
        (3, spent[2], False, at[2]),
    ]


def test_accuracies_that_the_observer_measured_after_two_more_rounds_reach_the_tracker_at_the_end(
    with_epsilon: dpcfl.Run, tmp_path: Path
) -> None:
    """An observer that is slower than the rounds left gaps in the log that only a replay filled."""
    folder = Path(shutil.copytree(with_epsilon.path, tmp_path / "run"))
    lines = {name: (folder / name).read_text().splitlines(keepends=True) for name in ("metrics.jsonl", "clusters.jsonl")}
    late = {name: [line for line in own if '"view":"observer","round":1' in line] for name, own in lines.items()}
    for name, own in lines.items():
        (folder / name).write_text("".join(line for line in own if line not in late[name]))
    recorder = Recorder()
    feed = RoundFeed(folder, with_epsilon.config, [recorder], earlier=True)
    feed.update()
    for name, own in late.items():
        with (folder / name).open("a") as file:
            file.writelines(own)
    feed.end()
    first = with_epsilon.rounds[0]
    logged = [what for name, what in recorder.calls if name == "log"]
    of_the_observer = {tag: value for tag, value in base.scalars(first).items() if tag.startswith("observer/")}
    assert {"observer/accuracy", "observer/ari", "observer/accuracy_cluster/B"} <= of_the_observer.keys()
    assert (logged[0][0], of_the_observer.keys() & logged[0][1].keys()) == (1, set())
    assert logged[3:] == [(1, of_the_observer, first.time)]


def test_a_tracker_that_fails_does_not_stop_the_run(tmp_path: Path) -> None:
    broken, whole = Recorder(fails_at=2), Recorder()
    run = dpcfl.run(TINY, tmp_path, "in-process", callbacks=[broken, whole], progress=False)
    assert (run.state, whole.steps, broken.steps) == ("finished", [1, 2, 3], [1])
    assert "close" not in broken.names
    (warning,) = run.warnings
    assert warning.startswith("tracker Recorder failed and gets no more rounds: no route to the server; replay")


def test_a_tracker_gets_the_last_rounds_of_a_run_that_was_interrupted(tmp_path: Path, in_process: dpcfl.Run) -> None:
    folder = Path(shutil.copytree(in_process.path, tmp_path / "run"))
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    last_accuracy = [line for line in lines if json.loads(line)["round"] == 3 and json.loads(line)["view"] == "observer"]
    (folder / "metrics.jsonl").write_text("".join(line for line in lines if line not in last_accuracy))
    recorder, seen = Recorder(), []
    feed = RoundFeed(folder, in_process.config, [lambda metrics: seen.append(metrics.round), recorder], earlier=True)
    feed.update()
    assert (seen, recorder.steps) == ([1, 2], [1, 2])  # the observer may still measure round 3
    feed.end()
    assert (seen, recorder.steps, recorder.names[-1]) == ([1, 2], [1, 2, 3], "close")
    shutil.rmtree(folder)
    feed.end()
    assert not folder.exists()


@pytest.mark.parametrize("answer", [False, dpcfl.StopRun("enough"), ValueError("broken")])
def test_a_tracker_gets_the_rounds_after_the_one_in_which_a_callback_stopped_the_run(
    in_process: dpcfl.Run, answer: bool | Exception
) -> None:
    def stop(metrics: dpcfl.RoundMetrics) -> bool:
        stops.append(metrics.round)
        if isinstance(answer, Exception):
            raise answer
        return answer

    recorder, stops = Recorder(), []
    feed = RoundFeed(in_process.path, in_process.config, [stop, recorder], earlier=True)
    feed.update(ended=True)
    assert (stops, recorder.steps, feed.stopped) == ([1], [1, 2, 3], True)


def test_settings_hold_the_configuration_without_secrets(in_process: dpcfl.Run) -> None:
    found = base.settings(in_process)
    assert (found["privacy.epsilon"], found["data.dataset"], found["algorithm.name"]) == (5, "digits", "dp-ifca")
    assert SEED in (in_process.path / "config.yaml").read_text()
    assert SEED not in json.dumps(found)
    assert None not in found.values()


def test_watch_gives_all_rounds_to_a_tracker_and_writes_nothing_into_the_run(in_process: dpcfl.Run) -> None:
    recorder, before = Recorder(), {path: path.stat().st_mtime_ns for path in in_process.path.rglob("*")}
    assert watch(in_process.path, trackers=[recorder]) == 0
    assert (recorder.steps, recorder.names[0], recorder.names[-1]) == ([1, 2, 3], "open", "close")
    with pytest.raises(dpcfl.RunFailed, match="tracker Recorder failed"):
        watch(in_process.path, trackers=[Recorder(fails_at=2)])
    with pytest.raises(dpcfl.ConfigError, match="to send the rounds of a run, also of one that has ended, leave out --once"):
        watch(in_process.path, once=True, trackers=[Recorder()])
    assert {path: path.stat().st_mtime_ns for path in in_process.path.rglob("*")} == before


@pytest.mark.parametrize("kind", ["tensorboard", "mlflow", "wandb"])
def test_a_library_that_is_not_installed_and_a_bad_name_are_sentences(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == kind]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, kind, None)
    done = call(capsys, "watch", tmp_path, "--track", f"{kind}:{tmp_path}", "--track", "csv:x")
    assert (done.code, done.out) == (2, "")
    first, second = done.err.splitlines()
    assert f"pip install -e '.[{kind}]'" in first
    assert second == "error: --track is 'csv:x': must be tensorboard:FOLDER, mlflow:URI or wandb:PROJECT"


# With the libraries


def read_board(folder: Path) -> Any:
    """All events of a folder, as TensorBoard reads them."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    return accumulators.EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def points(board: Any, tag: str) -> list[tuple[int, float, float]]:
    return [(event.step, event.value, event.wall_time) for event in board.Scalars(tag)]


def test_tensorboard_reads_back_what_a_live_run_and_a_replay_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    live = tmp_path / "live"
    shown: list[int] = []

    def look(metrics: dpcfl.RoundMetrics) -> None:
        shown.append(points(read_board(next(live.iterdir())), "server/bytes_up")[-1][0])

    run = dpcfl.run(TINY, tmp_path, "in-process", callbacks=[dpcfl.TensorBoard(live), look], progress=False)
    assert shown == [1, 2, 3]  # each round at once
    name = run.path.name
    board = read_board(live / name)
    tags = set(board.Tags()["scalars"])
    assert {tag.split("/")[0] for tag in tags} == {"server", "observer", "final"}
    expected = [(m.round, pytest.approx(m.accuracy), pytest.approx(m.time, abs=1e-3)) for m in run.rounds]
    assert points(board, "observer/accuracy") == expected
    assert [step for step, *_ in points(board, "server/bytes_up")] == [1, 2, 3]
    statements = board.Tensors("privacy statement")
    assert [event.step for event in statements] == [1, 3]  # also while the run goes on
    assert all("Unprotected: this run has no finite epsilon" in str(event.tensor_proto.string_val) for event in statements)
    assert "privacy.epsilon" in str(board.Tensors("configuration")[0].tensor_proto.string_val)
    assert "_hparams_/session_start_info" in board.Tags()["tensors"]
    assert all(SEED.encode() not in path.read_bytes() for path in (live / name).iterdir())
    replayed = tmp_path / "replayed"
    for _ in range(2):  # the second replaces the first
        assert call(capsys, "watch", run.path, "--track", f"tensorboard:{replayed}").code == 0
    again = read_board(replayed / name)
    assert set(again.Tags()["scalars"]) == tags
    assert [points(again, tag) for tag in tags if tag[:5] != "final"] == [
        points(board, tag) for tag in tags if tag[:5] != "final"
    ]
    resumed = dpcfl.TensorBoard(replayed)
    resumed.begin(
        run, first_round=3
    )  # hides what an interrupted part may have written of this round, and keeps the rounds before
    resumed(run.rounds[2])
    resumed.end(run)
    assert points(read_board(replayed / name), "observer/accuracy") == expected


def test_mlflow_keeps_a_run_through_a_resumption_and_a_second_replay(
    tmp_path: Path, with_epsilon: dpcfl.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setattr("dpcfl_net.report.trackers.mlflow.MOST", 10)  # several requests for the parameters
    monkeypatch.chdir(tmp_path)  # where MLflow keeps artifacts if not told otherwise
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = mlflow.MlflowClient(tracking_uri=uri)
    client.create_experiment("tiny", artifact_location=f"file://{tmp_path}/artifacts")
    stopped = dpcfl.run(
        TINY, tmp_path, "in-process", callbacks=[dpcfl.MLflow(uri), lambda metrics: metrics.round < 1], progress=False
    )

    def stored() -> Any:
        (found,) = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
        return found

    assert stored().info.status == "KILLED"
    run = dpcfl.resume(stopped.path, callbacks=[dpcfl.MLflow(uri)], progress=False)
    dpcfl.MLflow(uri).replay(run)
    found = stored()
    history = client.get_metric_history(found.info.run_id, "observer/accuracy")
    assert [(m.step, m.value) for m in history] == [(m.round, m.accuracy) for m in run.rounds]
    assert history[-1].timestamp == int(1000 * run.rounds[-1].time)
    assert found.info.status == "FINISHED"
    assert found.data.params["privacy.delta"] == "0.0001"
    assert found.data.params.keys() == base.settings(run).keys()
    assert "privacy.noise_seed" not in found.data.params
    assert found.data.metrics["final/observer/mean"] == run.final["accuracy_mean"]
    assert found.data.tags["privacy"].startswith("epsilon inf")
    names = {one.path for one in client.list_artifacts(found.info.run_id)}
    assert names == {"configuration.json", "privacy.txt"}
    assert all(SEED.encode() not in path.read_bytes() for path in (tmp_path / "artifacts").rglob("*") if path.is_file())
    dpcfl.MLflow(uri, experiment="other").replay(with_epsilon)
    (other,) = client.search_runs([client.get_experiment_by_name("other").experiment_id])
    assert other.data.tags["privacy"] == "epsilon 5, delta 0.0001, per sample"
    assert len(client.get_metric_history(other.info.run_id, "server/epsilon_spent")) == 3


def test_mlflow_refuses_an_unknown_store_with_a_sentence() -> None:
    pytest.importorskip("mlflow")
    with pytest.raises(dpcfl.ConfigError, match="MLflow does not open 'nowhere://x'"):
        dpcfl.MLflow("nowhere://x")


class Weights:
    """Stands in for wandb and its run: keeps what both are told."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.metrics: list[tuple[str, str]] = []
        self.rows: list[dict[str, float]] = []
        self.summary: dict[str, Any] = {}
        self.codes: list[int] = []

    def init(self, **options: Any) -> Weights:
        self.options = options
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        self.metrics.append((name, step_metric))

    def log(self, row: dict[str, float]) -> None:
        self.rows.append(row)

    def finish(self, exit_code: int) -> None:
        self.codes.append(exit_code)


@pytest.mark.parametrize(("state", "code"), [("finished", 0), ("failed", 1)])
def test_wandb_is_told_the_settings_the_rounds_the_result_and_how_a_run_ended(
    state: str, code: int, tmp_path: Path, with_epsilon: dpcfl.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, kept = Path(shutil.copytree(with_epsilon.path, tmp_path / "run")), Weights()
    monkeypatch.setitem(sys.modules, "wandb", kept)
    document = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**document, "state": state}))
    run = dpcfl.open_run(folder)
    dpcfl.WandB(mode="offline").replay(run)
    text, settings = kept.options.pop("notes"), kept.options.pop("config")
    assert kept.options == {"project": "tiny", "name": "run", "id": run.job.protocol.run, "resume": "allow", "mode": "offline"}
    assert (settings["privacy.delta"], settings["algorithm.name"], "privacy.noise_seed" in settings) == (1e-4, "dp-ifca", False)
    assert kept.metrics == [("*", "round")]
    assert kept.rows == [{"round": one.round, **base.scalars(one)} for one in run.rounds]
    assert kept.summary == {
        "privacy": "epsilon 5, delta 0.0001, per sample", "privacy statement": text, **base.result(run),
    }  # fmt: skip
    assert "not covered" in text.lower()
    assert kept.codes == [code]
    dpcfl.WandB("project", name="another").replay(run)
    assert (kept.options["project"], kept.options["name"]) == ("project", "another")


@pytest.mark.slow
def test_wandb_writes_an_offline_run(tmp_path: Path, with_epsilon: dpcfl.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    dpcfl.WandB("project", mode="offline", dir=str(tmp_path)).replay(with_epsilon)
    (written,) = tmp_path.rglob("run-*.wandb")
    wanted = (b"observer/accuracy", b"server/epsilon_spent", b"epsilon 5, delta 0.0001, per sample", b"privacy.delta")
    deadline = time.monotonic() + 30  # a process of wandb writes the file, also after the run has ended
    while not all(words in written.read_bytes() for words in wanted) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert all(words in written.read_bytes() for words in wanted)
