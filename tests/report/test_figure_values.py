"""Values of the report's figures and sentences, by hand from the lines of a run."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from run_folder import privacy, true_clusters, write_lines, write_start

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.report import figures
from dpcfl_net.report.alone import accuracy_alone
from dpcfl_net.report.client_figures import accuracy_by_client, accuracy_of_clients_by_round
from dpcfl_net.report.figures import Figure
from dpcfl_net.report.lead import privacy_facts
from dpcfl_net.report.overlay import by_round
from dpcfl_net.report.server_view import two_views
from dpcfl_net.report.settings import settings
from dpcfl_net.report.time_section import accuracy_over_time, time_of_clients, time_tables
from dpcfl_net.report.timeline import timeline
from dpcfl_net.results.compare import Row
from dpcfl_net.results.result import Result
from dpcfl_net.results.round_times import Point
from dpcfl_net.results.run_view import RunView, read_run

Lines = list[dict[str, Any]]


def view_of(folder: Path, metrics: Lines, clusters: Lines | None = None) -> RunView:
    write_start(folder)
    write_lines(folder / "metrics.jsonl", metrics)
    write_lines(folder / "clusters.jsonl", clusters or [])
    return read_run(folder)


def traces(figure: Figure) -> dict[str, dict[str, Any]]:
    assert figure.spec is not None
    return {trace["name"]: trace for trace in figure.spec["data"]}


def test_quantiles_are_those_of_the_clients_with_a_value() -> None:
    lines = figures.quantile_lines({1: [*range(20, -1, -1), None], 2: [None], 3: [5.0]}, "{:g}")
    assert [line["y"][0] for line in lines] == [0, 2, 10, 18, 20]
    assert [line["x"] for line in lines] == [[1, 3]] * 5
    assert [line["name"] for line in lines][::2] == ["least", "median", "largest"]


@pytest.mark.parametrize(
    ("most", "unit", "share"), [(999, "bytes", 1), (1_500, "kB", 1e3), (2_000_000, "MB", 1e6), (3_000_000_000, "GB", 1e9)]
)
def test_bytes_of_both_sides_have_the_unit_of_the_largest(tmp_path: Path, most: int, unit: str, share: float) -> None:
    figure = figures.traffic(view_of(tmp_path / "run", [{"view": "server", "round": 1, "bytes_up": 500, "bytes_down": most}]))
    found = traces(figure)
    assert found["from clients (up)"]["y"] == [500 / share]
    assert found["to clients (down)"]["y"] == [most / share]
    assert figure.spec is not None
    assert figure.spec["layout"]["yaxis"]["title"]["text"] == unit


@pytest.mark.parametrize(("rounds", "kind"), [(40, "bar"), (41, "scatter")])
def test_pairs_of_bars_that_a_phone_would_blend_are_lines(tmp_path: Path, rounds: int, kind: str) -> None:
    lines: Lines = [{"view": "server", "round": t, "bytes_up": 5, "bytes_down": 9} for t in range(1, rounds + 1)]
    assert {trace["type"] for trace in traces(figures.traffic(view_of(tmp_path / "run", lines))).values()} == {kind}


def test_clients_with_different_epsilons_have_a_line_each_below_the_promised_one(tmp_path: Path) -> None:
    spent = [[2.0] * 20 + [2.04], [3.0] * 20 + [3.1]]
    lines = [{"view": "server", "round": t, "epsilon_spent_by_client": own} for t, own in enumerate(spent, start=1)]
    view = view_of(tmp_path / "run", lines)
    view.run = {"privacy": privacy(epsilon=5)}
    found = traces(figures.epsilon_spent(view))
    assert found["clients 0, 1, 2, 3, 4, 5, ..."]["y"] == [2.0, 3.0]
    assert found["client 20"]["y"] == [2.04, 3.1]
    assert (found["promised"]["x"], found["promised"]["y"]) == ([1, 40], [5, 5])
    view.run["privacy"]["epsilon_by_client"] = {"min": 3.2, "max": 5}
    assert "promised, the largest" in traces(figures.epsilon_spent(view))
    promise = dict(privacy_facts(view.run["privacy"]))["Promise"]
    assert promise.startswith("epsilon 5 at delta 0.0001, the largest of the clients' own (3.2 to 5), ")
    del view.run["privacy"]["epsilon_by_client"]
    view.spent = {40: spent[1]}  # a short run has epsilon at its end only
    assert traces(figures.epsilon_spent(view))["promised"]["x"] == [1, 40]


def test_a_cluster_has_the_colour_of_the_true_cluster_with_which_it_shares_most_clients(tmp_path: Path) -> None:
    true = true_clusters()
    first = true.index(0)
    # Cluster 0 holds one client of true cluster 0 and all of true cluster 1; cluster 1 holds the others of true cluster 0.
    assignment = [{0: 1, 1: 0, 2: 2, 3: 3}[cluster] for cluster in true]
    assignment[first] = 0
    view = view_of(tmp_path / "run", [], [{"view": "server", "round": 1, "assignment": assignment}])
    colours = figures.colour_indices(view)
    assert figures.group_colours(view) == {0: colours[1], 1: colours[0], 2: colours[2], 3: colours[3]}


def test_answers_that_are_late_are_not_those_of_clients_that_are_away(tmp_path: Path) -> None:
    lines = [
        {"view": "server", "round": 1, "seconds": 2.0, "missing": [3], "late": [4, 5], "away": [], "bytes_up": 1},
        {"view": "server", "round": 2, "seconds": 4.0, "missing": [], "late": [], "away": [1, 2, 6], "bytes_up": 1},
    ]
    row = next(row for row in two_views(view_of(tmp_path / "run", lines)) if row[0] == "Time")
    assert (
        row[1]
        == "2 rounds answered, 3.0 s each; 1 answer missing; 2 answers after the deadline, set aside; 3 away by schedule."
    )


def test_a_promise_to_whole_clients_says_nothing_of_one_record() -> None:
    sample, client = (
        dict(privacy_facts(privacy(unit=unit, epsilon_replace_one=9.9)))["Promise"] for unit in ("sample", "client")
    )
    assert sample.endswith("; 9.9 if a record may be exchanged for another")
    assert "record" not in client


def test_the_time_of_the_workers_has_no_faults_that_were_injected(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    view = view_of(folder, [{"view": "server", "round": 1, "seconds": 2.0, "bytes_up": 1}])
    view.spans = [
        {"who": "client 0", "what": "train", "round": 1, "start": 0.0, "end": 3.0},
        {"who": "client 1", "what": "send", "round": 1, "start": 0.0, "end": 1.0},
        {"who": "client 1", "what": "fault stop", "round": 1, "start": 1.0, "end": 9.0, "fault": "stop"},
        {"who": "coordinator", "what": "wait", "round": 1, "start": 0.0, "end": 9.0},
    ]
    # Of the 2 s, client 1 waits 1 s; client 0 has trained for more than the rounds took.
    assert two_views(view)[-1][2] == "Workers' time: compute 60 %, send 20 %, wait for others 20 %."


def test_one_true_cluster_has_no_line_beside_the_mean_and_no_agreement(tmp_path: Path) -> None:
    metrics: Lines = [
        {"view": "server", "round": t, "seconds": 2.0, "bytes_up": 1} for t in (1, 2)
    ] + [
        {"view": "observer", "round": t, "accuracy_mean": 0.4 * t, "accuracy_worst": 0.1, "accuracy_by_cluster": [0.4 * t]}
        for t in (1, 2)
    ]  # fmt: skip
    view = view_of(tmp_path / "run", metrics, [{"view": "observer", "round": 2, "ari": None, "recovered": None}])
    view.experiment = {"true_clusters": [0] * 21}
    assert list(traces(figures.accuracy(view))) == ["mean", "worst client"]
    row = next(row for row in two_views(view) if row[0] == "Clusters")
    assert row[2] == "True clusters: 21."
    over_time = accuracy_over_time(view)
    assert traces(over_time)["76.0 % reached"]["x"] == [4.0]
    assert over_time.caption.endswith(" Diamond: 95 % of the best mean accuracy, rounded down, was reached.")


def test_injected_faults_share_an_entry_of_the_timelines_legend_and_say_their_kind(tmp_path: Path) -> None:
    view = view_of(tmp_path / "run", [])
    kinds = ("train", "fault delay", "fault drop", "wait", "pause")
    view.spans = [
        {"who": "client 0", "what": what, "round": 1, "start": float(k), "end": k + 1.0} for k, what in enumerate(kinds)
    ]
    figure = timeline(view)
    assert figure.spec is not None
    bars = figure.spec["data"]
    assert [one["name"] for one in bars if one.get("showlegend", True)] == ["train", "wait", "pause", "fault"]
    assert len({one["marker"]["color"] for one in bars}) == 4
    assert [one["hovertemplate"].split(":")[0] for one in bars if one["name"] == "fault"] == [
        "%{y}, fault delay",
        "%{y}, fault drop",
    ]
    assert {one.get("legendgroup") for one in bars if one["name"] == "fault"} == {"fault"}


def test_rounds_whose_secure_sum_was_aborted_are_counted_and_named(tmp_path: Path) -> None:
    said = ("ok", "3 of 8 clients sent keys, needs 6", "ok")
    lines = [{"view": "server", "round": t, "diagnostics": {"secure sum": text}} for t, text in enumerate(said, start=1)]
    row = next(row for row in two_views(view_of(tmp_path / "run", [], lines)) if row[0] == "Secure sums")
    assert row[1] == f"Complete in 2 of 3 rounds. Aborted, so that models stayed: round 2: {said[1]}."


def test_delays_of_a_client_are_its_total_mean_and_longest(tmp_path: Path) -> None:
    view = view_of(tmp_path / "run", [])
    for t, wait in ((1, 1.0), (2, 4.0)):
        for client, answered in ((0, 2.0), (1, 2.0 + wait)):
            common = {"peer": f"client {client}", "round": t, "bytes": 1}
            view.messages.append({"time": 10.0 * t, "kind": "TASK", "direction": "down", **common})
            view.messages.append({"time": 10.0 * t + answered, "kind": "RESULT", "direction": "up", **common})
    (table,) = (table for table in time_tables(view) if "client" in table.columns)
    assert table.rows == [["1", "2", "5.00", "2.50", "4.00"]]
    assert table.columns == ["client", "times last", "total, s", "mean, s", "longest, s"]


def test_with_many_clients_the_busiest_and_the_worst_are_shown(tmp_path: Path) -> None:
    accuracies = [client / 100 for client in range(60)]
    metrics: Lines = [
        {"view": "server", "round": 1, "seconds": 99.0, "bytes_up": 1},
        {"view": "observer", "round": 1, "accuracy_by_client": accuracies},
    ]
    view = view_of(tmp_path / "run", metrics)
    view.spans = [
        {"who": f"client {client}", "what": what, "round": 1, "start": start, "end": start + 1.0 + client}
        for client in range(60)
        for what, start in (("receive", 0.0), ("train", 70.0))
    ]
    busy = traces(time_of_clients(view))["compute"]
    assert (busy["y"][0], busy["y"][-1], len(busy["y"])) == ("client 20", "client 59", 40)
    worst = accuracy_by_client(view, {0: 0.0, 1: 0.02})
    shown = [x for name, trace in traces(worst).items() if "alone" not in name for x in trace["x"]]
    assert sorted(shown) == pytest.approx([*range(40)])
    assert traces(worst)["worse than alone"]["x"] == [1.0]  # client 0 fares as well as alone
    assert worst.caption.startswith(
        "After round 1, on each client's own test data. The 40 worst of 60 clients. Less accurate than alone: 1 of 40 clients. "
    )


def test_captions_name_the_records_on_which_the_observer_measured(tmp_path: Path) -> None:
    """Pages of trials of `dpcfl tune` called validation records test data."""
    lines: Lines = [
        {"view": "observer", "round": t, "accuracy_by_client": [0.5] * 600, "accuracy_mean": 0.5} for t in range(1, 4)
    ]
    view = view_of(tmp_path / "run", lines)
    makers = (figures.accuracy, accuracy_by_client, accuracy_of_clients_by_round)
    for part, other in (("test", "validation"), ("validation", "test")):
        view.config = {"data": {"evaluate": part}}
        captions = [make(view).caption for make in makers]
        assert all(f"each client's own {part} data" in caption and other not in caption for caption in captions), captions


def test_of_many_rounds_the_last_one_is_drawn(tmp_path: Path) -> None:
    lines: Lines = [{"view": "observer", "round": t, "accuracy_by_client": [t / 200] * 2} for t in range(1, 123)]
    figure = accuracy_of_clients_by_round(view_of(tmp_path / "run", lines))
    assert figure.spec is not None
    (map_,) = figure.spec["data"]
    assert map_["x"] == [*range(2, 123, 3)]
    assert [row[-1] for row in map_["z"]] == pytest.approx([61, 61])
    assert figure.caption.endswith("Every 3 rounds.")


def test_the_settings_of_a_page_do_not_show_the_secret_of_seeded_noise(tmp_path: Path) -> None:
    view = view_of(tmp_path / "run", [])
    view.config["privacy"] = {"epsilon": 5, "noise_seed": "5eed" * 16}
    assert dict(settings(view))["privacy"] == [("epsilon", "5"), ("noise_seed", "secret, not shown here")]


@pytest.mark.parametrize("key", ["seed", "data", "model", "privacy"])
def test_clients_alone_are_those_of_a_run_with_the_same_data_model_and_privacy(tmp_path: Path, key: str) -> None:
    view = view_of(tmp_path / "run", [])
    view_of(tmp_path / "local", [{"view": "observer", "round": 1, "accuracy_by_client": [0.5, None, 0.25]}])
    settings_of = (tmp_path / "local" / "config.yaml").read_text().replace("r-dpcfl", "local")
    (tmp_path / "local" / "config.yaml").write_text(settings_of)
    document = json.loads((tmp_path / "local" / "protocol.json").read_text())
    (tmp_path / "local" / "protocol.json").write_text(json.dumps({**document, "algorithm": "local"}))
    (tmp_path / "local" / "run.json").unlink(missing_ok=True)
    assert accuracy_alone(view, tmp_path / "local") == {0: 0.5, 2: 0.25}
    view.config[key] = "another"
    with pytest.raises(ConfigError, match=f"not comparable with .*: {key} of config.yaml differ"):
        accuracy_alone(view, tmp_path / "local")


@pytest.mark.parametrize(("rounds", "every"), [(200, 1), (201, 2), (500, 3)])
def test_the_accuracy_of_compared_runs_by_round_is_thinned_and_ends_with_the_last_round(rounds: int, every: int) -> None:
    """With an even number of rounds above 400 the last round was left out, and up to twice as many were drawn as said."""
    curve = tuple(Point(t, float(t), t / rounds) for t in range(1, rounds + 1))
    row = Row((Result(Path("run"), "run", "global", 0, {}, {}, {}, curve),), {})
    line = traces(by_round([row], ["global"]))["global"]
    assert (line["x"][-1], line["y"][-1]) == (rounds, 100)
    assert len(line["x"]) <= 200
    assert {after - before for before, after in pairwise(line["x"])} == {every}
