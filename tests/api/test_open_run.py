"""A run folder as an object: what it tells of finished and of interrupted runs, and how it looks."""

from __future__ import annotations

import builtins
import json
import math
import shutil
from itertools import pairwise

import plotly.graph_objects as go
import pytest
from api_runs import interrupted
from trace_events import check_trace

import dpcfl_net as dpcfl
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.report.transcript_figures import transcript_figures


def test_a_finished_run_tells_its_configuration_privacy_and_figures(with_epsilon, tmp_path):
    run = dpcfl.open_run(shutil.copytree(with_epsilon.path, tmp_path / "run"))
    assert (run.state, run.rounds_done, run.config.rounds) == ("finished", 3, 3)
    privacy = run.privacy
    assert (privacy.epsilon, privacy.delta, privacy.unit, privacy.trust) == (5, 1e-4, "sample", "untrusted-server")
    assert 0 < privacy.epsilon_spent <= 5
    assert str(privacy).startswith("epsilon 5, delta 0.0001, per sample")
    assert privacy.document["covered"]
    assert run.final["accuracy_mean"] == run.rounds[-1].accuracy
    assert run.rounds[-1].epsilon_spent == pytest.approx(privacy.epsilon_spent)
    assert all(check.holds is not False for check in run.verify())
    assert run.report() == run.path / "report.html"


@pytest.mark.parametrize("key", ["", "5eed", "operator.pub", 5])
def test_a_key_that_is_none_is_refused_and_not_replaced_by_that_of_the_folder(in_process, key):
    with pytest.raises(ConfigError, match=f"operator_key is {key!r}: must be an operator's public key, 64 hex digits"):
        in_process.verify(operator_key=key)


def test_verify_takes_the_operator_whose_key_it_is_given(in_process):
    key = RunFolder(in_process.path).operator_key.read_text().strip()
    assert all(check.holds is not False for check in in_process.verify(operator_key=key))
    (check,) = in_process.verify(operator_key="0" * 64)
    assert check.holds is False
    assert "protocol.json is not signed by the operator whose key is pinned here" in check.detail


def test_a_run_records_the_steps_of_its_preparation(in_process):
    spans = [span for span in in_process.view.spans if span["who"] == "launcher"]
    assert [span["what"].split()[0] for span in spans] == ["keys", "data", "layout", "noise", "start"]
    assert all(before["end"] <= after["start"] + 1e-3 for before, after in pairwise(spans))


def test_the_trace_of_a_run_with_processes_has_an_arrow_for_each_task_and_result(by_network, tmp_path):
    path = by_network.trace(tmp_path / "trace.json")
    events = json.loads(path.read_text())["traceEvents"]
    answers = [message for message in by_network.transcript if message.kind in ("TASK", "RESULT")]
    assert check_trace(events)["s"] == len(answers) > 0
    assert {event["name"] for event in events if event["ph"] == "X"} >= {
        "round 1",
        "round 3",
        "train",
        "receive",
        "send",
        "evaluate",
    }


def test_seeded_noise_has_no_epsilon(in_process):
    assert in_process.privacy.epsilon == in_process.privacy.epsilon_spent == math.inf
    assert "INSECURE" in str(in_process.privacy)


def test_metrics_are_a_data_frame_and_records_need_no_pandas(in_process, monkeypatch):
    frame = in_process.metrics
    assert list(frame.index) == [1, 2, 3]
    assert frame["accuracy"].iloc[-1] == in_process.final["accuracy_mean"]
    assert (
        frame["accuracy_central"].dtype == frame["accuracy_minority"].dtype == float
    )  # not measured: NaN, which pandas can average
    assert frame["accuracy_central"].round(2).isna().all()
    original = builtins.__import__

    def without_pandas(name, *arguments, **more):
        if name == "pandas":
            raise ImportError(name)
        return original(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without_pandas)
    with pytest.raises(dpcfl.ConfigError, match=r"pip install -e '\.\[pandas\]' in a checkout"):
        _ = in_process.metrics
    assert [row["round"] for row in in_process.records] == [1, 2, 3]


def test_the_ledger_and_its_events_give_the_epsilon_that_was_spent(with_epsilon):
    entries = with_epsilon.ledger(0)
    assert [entry.round for entry in entries if entry.type == "debit"] == [1, 2, 3]
    spent = dpcfl.account(with_epsilon.events(0), delta=1e-4)["epsilon"]
    assert spent == pytest.approx(with_epsilon.privacy.epsilon_spent)
    with pytest.raises(dpcfl.ConfigError, match="client is 7: must be 0 to 1"):
        with_epsilon.ledger(7)


def test_events_under_the_other_adjacency_give_its_epsilon(with_epsilon):
    """The charged events are those of zero-out: under replace-one a choice by counts of records has twice the range."""
    stated = json.loads((with_epsilon.path / "run.json").read_text())["privacy"]["epsilon_replace_one"]
    under = with_epsilon.events(0, "replace-one")
    assert dpcfl.account(under, delta=1e-4, adjacency="replace-one")["epsilon"] == pytest.approx(stated, rel=1e-6)
    assert with_epsilon.events(0, "zero-out") == with_epsilon.events(0)
    as_charged = dpcfl.account(with_epsilon.events(0), delta=1e-4, adjacency="replace-one")
    assert as_charged["epsilon"] < stated
    assert "twice its range under zero-out" in as_charged["assumes"]
    assert "assumes" not in dpcfl.account(with_epsilon.events(0), delta=1e-4)
    with pytest.raises(dpcfl.ConfigError, match="adjacency is 'replace_one': must be zero-out or replace-one"):
        with_epsilon.events(0, "replace_one")  # it had the range of zero-out


def test_the_transcript_is_what_the_server_saw(by_network, in_process):
    results = [message for message in by_network.transcript if message.kind == "RESULT"]
    assert {(message.direction, message.client) for message in results} == {("up", 0), ("up", 1)}
    assert [message.round for message in results if message.client == 0] == [1, 2, 3]
    assert results[0].tensors is not None
    assert results[0].tensors["update"].shape == (6090,)
    with pytest.raises(dpcfl.ConfigError, match="kept no transcript"):
        list(in_process.transcript)


def test_the_report_shows_the_choices_that_a_full_transcript_holds(by_network):
    view = by_network.view
    updates, choices = transcript_figures(view)
    assert "fewer than three clients" in updates.why  # the run has two
    answers = [message for message in by_network.transcript if message.kind == "RESULT" and "choice" in message.tensors]
    released = {(message.client, message.round): int(message.tensors["choice"]) for message in answers}
    assert released
    assert choices.spec is not None
    words = [cell for row in choices.spec["data"][0]["text"] for cell in row]
    assert set(words) == {f"client {client}, round {t}: cluster {choice}" for (client, t), choice in released.items()}


def test_the_report_leaves_out_the_raw_updates_of_a_trusted_server(by_network):
    view = by_network.view
    view.run["privacy"]["trust"] = "trusted-server"
    assert all("raw updates" in figure.why for figure in transcript_figures(view))
    view.config["output"]["transcript"] = "headers"
    assert all("holds no tensors" in figure.why for figure in transcript_figures(view))


def test_figures_are_plotly_objects_in_the_colours_of_the_report(with_epsilon, by_network):
    figure = with_epsilon.figures.accuracy()
    assert isinstance(figure, go.Figure)
    assert [trace.name for trace in figure.data][-2:] == ["mean", "worst client"]
    assert "@" not in figure.to_json()
    for run, name in (
        (with_epsilon, "epsilon_spent"),
        (by_network, "traffic"),
        (by_network, "timeline"),
    ):
        assert isinstance(getattr(run.figures, name)(), go.Figure)
    with pytest.raises(dpcfl.ConfigError, match="no figure first-round"):
        with_epsilon.figures.first_round()


def test_an_interrupted_run_tells_how_far_it_is(tmp_path):
    run = interrupted(tmp_path)
    assert (run.state, run.rounds_done) == ("interrupted", 1)
    assert run.privacy.epsilon == math.inf
    assert [row["round"] for row in run.records] == [1]
    assert run.models.metadata(0)["round"] == "1"
    assert "interrupted after 1 of 20 rounds" in repr(run)


def test_a_run_shows_itself_in_terminals_and_notebooks(with_epsilon):
    assert repr(with_epsilon).startswith("<Run tiny: algorithm dp-ifca, finished after 3 of 3 rounds, accuracy ")
    assert "epsilon 5, delta 0.0001, per sample" in repr(with_epsilon)
    html = with_epsilon._repr_html_()
    assert html.startswith("<strong>tiny</strong><table>")
    assert str(with_epsilon.path) in html
    assert repr(with_epsilon.privacy).startswith("Privacy(epsilon=5.0, delta=0.0001, unit='sample', ")
    assert "Statement(" not in repr(with_epsilon.privacy)
    assert repr(with_epsilon.figures).startswith("<Figures: accuracy(), epsilon_spent(), ")


def test_a_relative_path_in_a_folder_that_was_removed_is_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigError, match="path is 'runs': must be absolute, since the current folder was removed"):
        dpcfl.open_run("runs")


def test_an_empty_path_is_not_the_run_in_the_current_folder(in_process, monkeypatch):
    monkeypatch.chdir(in_process.path)
    with pytest.raises(ConfigError, match=r"^path is '': must be a path; write '\.' for the current folder$"):
        dpcfl.Run("")
    assert dpcfl.Run(".").path == in_process.path


def test_a_folder_that_is_no_run_is_a_sentence(tmp_path):
    with pytest.raises(dpcfl.ConfigError, match="is not a run folder"):
        dpcfl.open_run(tmp_path)
