"""The report page and the reading of run folders: finished, running, crashed, hostile."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from run_folder import privacy, run_json, true_clusters, write_lines, write_many, write_round, write_run, write_start

from dpcfl_net.core import files, runlog
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.report import cluster_figures, figures, pages
from dpcfl_net.report.diagnostics import diagnostics
from dpcfl_net.report.lead import privacy_facts, result_line
from dpcfl_net.report.page import key_figures, write_report
from dpcfl_net.report.run import Run
from dpcfl_net.report.server_view import cluster_sizes, two_views
from dpcfl_net.report.time_section import time_tables
from dpcfl_net.report.timeline import BARS, ROWS, timeline
from dpcfl_net.report.transcript_figures import transcript_figures
from dpcfl_net.results import run_view
from dpcfl_net.results.attack_results import AttackResult
from dpcfl_net.results.number_format import at_most, duration, percent, plain, size, tiny
from dpcfl_net.results.privacy_statement import statement
from dpcfl_net.results.run_files import JsonlTail
from dpcfl_net.results.run_view import read_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "finished")


def own_part(page: Path) -> str:
    """The page without its script and its drawings."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"<svg.*?</svg>", "", re.sub(r"<script>\n//.*?</script>", "", text, flags=re.DOTALL), flags=re.DOTALL)


def specs(text: str) -> dict:
    return json.loads(re.search(r"const figures = (.*);\n", text)[1])


def test_page_is_one_file_that_loads_nothing(finished: Path) -> None:
    page = write_report(finished)
    text = own_part(page)
    assert page == finished / "report.html"
    assert page.stat().st_size < 1_500_000
    assert not re.findall(r"(?:src|href)\s*=", page.read_text(encoding="utf-8"))
    assert "default-src 'none'" in text
    assert not list(finished.glob(".report*"))


def test_a_page_of_many_rounds_stays_light(tmp_path: Path) -> None:
    assert write_report(write_run(tmp_path / "run", 600)).stat().st_size < 1_500_000


def test_a_page_of_many_clients_shows_quantiles_and_samples(tmp_path: Path) -> None:
    sizes = []
    for clients in (500, 2000):
        true = write_many(tmp_path / str(clients), clients, 62)
        sizes.append(write_report(tmp_path / str(clients)).stat().st_size)
    assert sizes[1] - sizes[0] < 20_000  # names of clients have more digits; the page has no line for each
    assert sizes[1] < 1_000_000
    drawn = specs(own_part(tmp_path / "2000" / "report.html"))
    by_round = {trace["name"]: trace for trace in drawn["clients-rounds"]["data"]}
    assert list(by_round) == ["least", "10 % of the clients below", "median", "90 % of the clients below", "largest"]
    last = sorted((client * 62 * 7919 % 1000) / 1000 for client in range(2000))
    assert by_round["median"]["y"][-1] == pytest.approx(100 * last[round(0.5 * 1999)])
    assert by_round["10 % of the clients below"]["y"][-1] == pytest.approx(100 * last[200])
    assert len([name for trace in drawn["clients"]["data"] for name in trace["y"]]) == 20
    assert max(value for trace in drawn["clients"]["data"] for value in trace["x"]) <= 100 * last[20]
    assert [trace["name"] for trace in drawn["epsilon"]["data"]] == [*by_round, "promised"]
    assert len(drawn["diagnostics-distance"]["data"]) == 5
    rows = drawn["assignments"]["data"][0]["z"]
    assert (len(rows), len(rows[0])) == (pytest.approx(100, abs=12), 31)
    assert {row[0] for row in rows} == set(range(4)), "a sample has clients of the smallest cluster too"
    view = read_run(tmp_path / "2000")
    assert (view.clients, view.true_clusters) == (2000, true)
    assert "4 of 4 clusters found" in result_line(view)


def test_page_says_what_is_protected_and_what_is_not(finished: Path) -> None:
    text = own_part(write_report(finished))
    for words in (
        "epsilon 5, delta 0.0001, per sample",
        "untrusted server",
        "zero-out",
        "pld",
        "1.269",
        "10.87",
        "4.98",
        "cluster selections",
        "hyper-parameter search",
        "71.2 %",
        "65.5 %",
    ):
        assert words in text
    assert 'class="alert" role' not in text


def test_every_figure_of_a_finished_run_has_data(finished: Path) -> None:
    drawn = specs(own_part(write_report(finished)))
    usual = {"accuracy", "accuracy-time", "epsilon", "bytes", "first-round", "candidates", "assignments", "timeline"}
    # Its numbers never change, so the summary at the top has them; sizes that count the assignment are in the figure `sizes`.
    assert set(drawn) == usual | {"clients", "clients-rounds", "sizes"}
    names = [trace["name"] for trace in drawn["accuracy"]["data"]]
    assert names == ["A (3 clients, minority)", "B (6 clients)", "C (6 clients)", "D (6 clients)", "mean", "worst client"]
    assert all(len(trace["x"]) == len(trace["y"]) == 40 for trace in drawn["accuracy"]["data"])


def test_insecure_and_unprotected_runs_are_loud(tmp_path: Path) -> None:
    insecure = own_part(write_report(write_run(tmp_path / "a", 2, privacy=privacy(insecure="noise is seeded"))))
    assert 'role="alert">INSECURE: noise is seeded' in insecure
    assert "at epsilon 5 (insecure: it does not hold)" in insecure
    assert "<dt>Promise</dt>" not in insecure
    bare = privacy(epsilon=None, epsilon_spent=None, not_covered=["cluster index unprotected", "hyper-parameter search"])
    unprotected = own_part(write_report(write_run(tmp_path / "b", 2, privacy=bare)))
    assert "epsilon inf (cluster index unprotected)" in unprotected
    assert 'role="alert">Unprotected' in unprotected


@pytest.mark.parametrize("given", [None, {}, {"unit": "sample", "delta": 1e-4}])
def test_unstated_epsilon_is_never_made_finite(given: dict | None) -> None:
    said = statement(given)
    assert said.headline == "no privacy statement"
    assert said.alerts


@pytest.mark.parametrize("epsilon", [5.0004, 8.31409, 0.30001, 12.341, 100.02])
def test_a_promise_is_never_printed_smaller_than_it_is(epsilon: float) -> None:
    """Epsilon and delta are upper bounds, and a bound that is rounded to the nearest number does not hold half of the time."""
    given = privacy(epsilon=epsilon, epsilon_spent=epsilon, epsilon_replace_one=epsilon, delta=epsilon * 1e-5)
    said = statement(given)
    facts, (_, _, (_, promise)) = dict(said.facts), privacy_facts(given)
    printed = [facts[label] for label in ("Epsilon", "Epsilon spent", "Epsilon under replace-one")]
    printed += [said.headline.split(",")[0], promise.split(" at delta")[0], promise.split("; ")[1].split(" if")[0]]
    assert all(epsilon <= float(re.findall(r"[0-9.]+", text)[0]) <= 1.01 * epsilon for text in printed)
    assert epsilon * 1e-5 <= float(facts["Delta"])
    assert statement(privacy(epsilon=5.0, delta=0.1 + 0.2)).headline == "epsilon 5, delta 0.3001, per sample"
    assert statement(privacy(epsilon=0.3, delta=1e-5)).headline == "epsilon 0.3, delta 1e-05, per sample"


def test_different_targets_of_clients_are_no_promise_where_the_run_has_none() -> None:
    targets = {"min": 1.2340001, "max": 5.0004}
    with_promise, without = (
        dict(statement(privacy(epsilon=epsilon, epsilon_by_client=targets)).facts) for epsilon in (5.0004, None)
    )
    assert with_promise["Epsilon by client"].startswith("1.235 to 5.001: ")
    assert without["Epsilon"].startswith("inf (")
    assert "Epsilon by client" not in without


def test_statement_flags_overspending() -> None:
    assert any("Overspent" in alert for alert in statement(privacy(epsilon_spent=5.01)).alerts)
    assert not statement(privacy(epsilon_spent=5.0)).alerts


def test_what_an_early_end_has_spent_is_called_no_promise() -> None:
    ended, early = (dict(statement(privacy(epsilon_spent=spent)).facts)["Epsilon spent"] for spent in (4.99972, 2.3))
    assert ended == "5 (largest over the clients)"
    assert early.startswith("2.3 (largest over the clients); no promise")


def test_statement_flags_a_non_finite_epsilon() -> None:
    assert statement(privacy(epsilon=float("inf"))).headline.startswith("epsilon inf (")
    assert statement(privacy(epsilon=float("nan"))).headline.startswith("epsilon inf (")


def test_hostile_words_stay_words(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    folder = write_run(tmp_path / "run", 2, name=evil, privacy=privacy(not_covered=[evil]))
    write_lines(folder / "spans.jsonl", [{"who": evil, "what": evil, "round": 2, "start": 1.0, "end": 2.0}])
    text = write_report(folder).read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text


def test_running_run_reads_and_says_what_is_missing(tmp_path: Path) -> None:
    folder = write_start(tmp_path / "run")
    empty = own_part(write_report(folder))
    assert "running, 0 of 40 rounds" in empty
    assert "Accuracy by round: the observer has written no accuracy yet." in empty
    assert "const figures" not in empty
    write_round(folder, 1, 40)
    text = own_part(write_report(folder))
    assert "running, 1 of 40 rounds" in text
    assert set(specs(text)) == {"accuracy", "clients", "bytes", "timeline"}
    assert dict(key_figures(read_run(folder)))["Clusters recovered"] == "yes"


def test_crashed_run_with_partial_and_damaged_files(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 6)
    for name in ("metrics", "clusters", "messages", "spans"):
        with (folder / f"{name}.jsonl").open("ab") as file:
            file.write(b'not json\n[1, 2]\n{"round": "x", "view": "server"}\n{"view": "server", "rou')
    (folder / "run.json").write_text('{"name": "half', encoding="utf-8")
    (folder / "first_round.npz").write_bytes((folder / "first_round.npz").read_bytes()[:700])
    view = read_run(folder)
    assert sorted(view.observed) == sorted(view.served) == list(range(1, 7))
    assert view.first_round is None
    assert view.name == "fmnist-r-dpcfl"
    text = own_part(write_report(folder))
    for note in (
        "run.json is damaged",
        "first_round.npz is damaged",
        "metrics.jsonl: 3 damaged lines left out",
        "ends within a line",
    ):
        assert note in text
    assert "no privacy statement" in text


def test_a_run_in_one_process_has_no_bytes(tmp_path: Path) -> None:
    folder = write_start(tmp_path / "run")
    with (folder / "config.yaml").open("a", encoding="utf-8") as config:
        config.write("runtime: {federation: in-process}\n")
    served = {"view": "server", "round": 1, "seconds": 4.0, "bytes_up": 0, "bytes_down": 0}
    write_lines(folder / "metrics.jsonl", [served, {"view": "observer", "round": 1, "accuracy_mean": 0.5}])
    (folder / "run.json").write_text(json.dumps(run_json(bytes_up=0, bytes_down=0)), encoding="utf-8")
    view = read_run(folder)
    assert not [label for label, _ in key_figures(view) if label.startswith("Bytes")]
    assert two_views(view)[0][:2] == ("Messages", "None: all clients ran in one process.")
    assert figures.traffic(view).why == "all clients ran in one process, without messages"
    assert {figure.why for figure in transcript_figures(view)} == {"all clients ran in one process, without messages"}


@pytest.mark.parametrize(
    ("trust", "settings", "why"),
    [
        (
            "untrusted-server",
            {"output": {"transcript": "off"}},
            "the transcript holds no tensors (output.transcript: full keeps them)",
        ),
        ("trusted-server", {"output": {"transcript": "full"}}, "raw updates, which the privacy statement does not cover"),
        ("secure-aggregation", {"output": {"transcript": "full"}}, "masked vectors in secure sums; one alone shows nothing"),
        ("secure-aggregation", {"runtime": {"aggregators": 2}}, "aggregators write no transcript"),
    ],
)
def test_updates_that_are_not_drawn_are_left_out_for_the_right_reason(
    trust: str, settings: dict, why: str, finished: Path
) -> None:
    view = read_run(finished)
    view.run["privacy"]["trust"] = trust
    view.config |= settings
    assert all(figure.why.endswith(why) for figure in transcript_figures(view))


def test_times_to_accuracies_that_are_the_same_whole_percent_are_one_row(tmp_path: Path) -> None:
    folder = write_start(tmp_path / "run")
    for t, accuracy in ((1, 0.1), (2, 0.125)):
        served = {"view": "server", "round": t, "seconds": 2.0, "bytes_up": 9, "bytes_down": 9}
        write_lines(folder / "metrics.jsonl", [served, {"view": "observer", "round": t, "accuracy_mean": accuracy}])
    (table,) = time_tables(read_run(folder))
    assert table.rows == [["6 %", "1", "2.0"], ["10 %", "1", "2.0"], ["11 %", "2", "4.0"]]


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([2000], "Number of records of the client (2000): no data, no labels."),
        ([2000, 2000], "Number of records of each of the 2 clients (2000): no data, no labels."),
        ([2000, 1500, 1700], "Number of records of each of the 3 clients (1500 to 2000): no data, no labels."),
        ([], "At most the number of records of each client: no data, no labels."),
    ],
)
def test_the_servers_view_of_the_data_is_the_clients_numbers_of_records(tmp_path: Path, records: list[int], said: str) -> None:
    folder = write_start(tmp_path / "run")
    document = json.loads((folder / "protocol.json").read_text(encoding="utf-8"))
    roster = [{**entry, "records": count} for entry, count in zip(document["roster"], records, strict=False)]
    (folder / "protocol.json").write_text(json.dumps({**document, "roster": roster}), encoding="utf-8")
    seen = {name: server for name, server, _ in two_views(read_run(folder))}
    assert seen["The data"] == said
    write_lines(folder / "roster.jsonl", roster)
    (folder / "protocol.json").write_text(json.dumps({**document, "roster": {"clients": len(roster)}}), encoding="utf-8")
    assert {name: server for name, server, _ in two_views(read_run(folder))} == seen  # in jobs of either format


def test_true_clusters_beyond_the_alphabet_have_numbers(tmp_path: Path) -> None:
    folder = write_start(tmp_path / "run")
    (folder / "experiment.json").write_text(json.dumps({"true_clusters": [*range(28)]}), encoding="utf-8")
    names = [figures.true_name(read_run(folder), cluster) for cluster in (0, 25, 26, 27)]
    assert [name.partition(" (")[0] for name in names] == ["A", "Z", "#26", "#27"]


@pytest.mark.parametrize("data", [{"partition": "natural"}, {"partition": "dirichlet", "alpha": 0.3}])
def test_without_true_clusters_the_page_shows_those_of_the_server(data: dict, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 3)
    (folder / "experiment.json").write_text(
        json.dumps({"true_clusters": [0] * 21, "data": {"clients": [21], "shift": "none", **data}}), encoding="utf-8"
    )
    accuracy = {"accuracy_mean": 0.7, "accuracy_by_cluster": [0.7], "accuracy_by_client": [0.7] * 21}
    (folder / "metrics.jsonl").write_text(json.dumps({"view": "observer", "round": 3} | accuracy) + "\n", encoding="utf-8")
    (folder / "clusters.jsonl").write_text("", encoding="utf-8")
    grouping = {"view": "server", "round": 3, "assignment": [0, 1, 1] * 7, "clusters": 2}
    write_lines(folder / "clusters.jsonl", [grouping, {"view": "observer", "round": 3, "assigned": 21}])
    view = read_run(folder)
    assert view.true_clusters == []
    assert dict(row[::2] for row in two_views(view))["Clusters"] == "True clusters: unknown."
    points = cluster_figures.first_round(view)
    assert {trace["name"] for trace in points.spec["data"]} == {f"cluster {k}" for k in range(4)}
    assert "true cluster" not in points.caption + cluster_figures.assignments(view).caption
    write_report(folder)
    assert "true A" not in (folder / "report.html").read_text(encoding="utf-8")


def test_a_shift_or_several_groups_of_named_clients_are_true_clusters(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 1)
    experiment = json.loads((folder / "experiment.json").read_text(encoding="utf-8"))
    (folder / "experiment.json").write_text(json.dumps(experiment | {"data": {"partition": "natural"}}), encoding="utf-8")
    assert read_run(folder).true_clusters == true_clusters()


def test_a_small_file_that_unpacks_to_more_than_the_limit_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a shared folder a run of another user, of 7 MB, took 1.5 GiB of `dpcfl serve`."""
    monkeypatch.setattr(run_view, "MOST_BYTES", 1 << 20, raising=False)
    folder = write_run(tmp_path / "run", 3)
    with np.load(folder / "first_round.npz") as file:
        arrays = dict(file)
    assert read_run(folder).first_round is not None
    np.savez_compressed(folder / "first_round.npz", **arrays, more=np.zeros(1 << 20, np.uint8))
    view = read_run(folder)
    assert view.first_round is None
    assert "first_round.npz is damaged and was left out" in view.notes


def test_a_line_longer_than_the_limit_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a terabyte without a newline takes no room on a disk, and was read whole."""
    monkeypatch.setattr(files, "MOST_BYTES", 1 << 20)
    folder = write_run(tmp_path / "run", 3)
    os.truncate(folder / "messages.jsonl", 1 << 40)
    with pytest.raises(ConfigError, match=r"cannot read .*messages\.jsonl: a line is longer than 1,048,576 bytes, the limit"):
        read_run(folder)
    with pytest.raises(ConfigError, match="the limit"):
        runlog.read(folder / "messages.jsonl")


def test_one_cluster_that_was_chosen_or_had_no_rival_is_described_as_that(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 3)
    with np.load(folder / "first_round.npz") as file:
        arrays = dict(file)
    one = {"clusters": 1, "centres": arrays["centres"][:1], "deviations": arrays["deviations"][:1]}
    np.savez(folder / "first_round.npz", **arrays | one)
    view = read_run(folder)
    rule = cluster_figures.candidates(view)
    assert f"M = 1 was used, which has no bar. {cluster_figures.CHOICE}" in rule.caption
    assert rule.spec["layout"]["yaxis"]["title"]["text"] == "MSS"
    view.protocol = {"options": {"clustering": {"space": "pca2"}}}  # the published rule: its largest MSS does decide
    published = cluster_figures.candidates(view)
    assert published.caption.endswith("M = 1 was used, which has no bar.")
    assert published.spec["layout"]["yaxis"]["title"]["text"] == "uncorrected MSS"
    assert "the server's 1 component at one and two standard deviations" in cluster_figures.first_round(view).caption
    np.savez(folder / "first_round.npz", **arrays | one | {"candidates": np.array([2]), "scores": np.array([1.0])})
    why = cluster_figures.candidates(read_run(folder)).why
    assert why == "the number was given, or the clients are too few for a choice"


def test_a_square_figure_without_a_neighbour_stays_half_as_wide_as_the_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 3)
    with np.load(folder / "first_round.npz") as file:
        arrays = dict(file)
    np.savez(folder / "first_round.npz", **arrays | {"candidates": np.array([4]), "scores": np.array([31.4])})
    lines = [json.loads(line) for line in (folder / "clusters.jsonl").read_text(encoding="utf-8").splitlines()]
    one = [{**line, "assignment": [0] * len(line["assignment"])} if "assignment" in line else line for line in lines]
    (folder / "clusters.jsonl").write_text("", encoding="utf-8")
    write_lines(folder / "clusters.jsonl", one)
    text = write_report(folder).read_text(encoding="utf-8")
    assert re.search(r'<figure([^>]*)>(?:(?!<figure).)*id="first-round"', text, flags=re.DOTALL)[1] == ""


def test_page_of_a_failed_run_says_why_and_how_to_resume_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "my run", 3, state="failed", error="client 1 <ended> with code -9")
    text = own_part(write_report(folder))
    assert '<p class="alert" role="alert">Failed: client 1 &lt;ended&gt; with code -9</p>' in text
    assert f"<pre>dpcfl run --resume &#39;{folder}&#39;</pre>" in text
    finished = own_part(write_report(write_run(tmp_path / "finished", 3)))
    assert not re.findall("Failed:|--resume", finished)


def test_the_page_lists_the_warnings_of_the_run_and_says_how_many_it_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    warnings = [{"view": "launcher", "time": 1.0, "text": f"client {k} ended <b>"} for k in range(25)]
    write_lines(
        folder / "warnings.jsonl", [*warnings, {"view": "launcher", "time": 1.0, "text": "no accuracy", "unmeasured": [3]}]
    )
    text = write_report(folder).read_text(encoding="utf-8")
    assert "Warnings: 25" in text
    assert text.count("ended &lt;b&gt;") == 20
    assert "The first 20; warnings.jsonl in the run folder has all of them." in text
    assert text.count("no accuracy") == 1


def test_clusters_beyond_the_eighth_have_markers_of_their_own() -> None:
    assert len({(figures.colour(k), figures.symbol(k)) for k in range(64)}) == 64


def test_page_names_clients_that_resemble_no_other(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 3)
    with np.load(folder / "first_round.npz") as file:
        arrays = dict(file)
    before = cluster_figures.first_round(read_run(folder)).caption
    assert not re.findall(r"Alone|Outlier|resemble no other", before)
    labels, n = arrays["labels"], len(arrays["labels"])
    labels[0] = 4
    marked = np.arange(n) < 2
    np.savez(folder / "first_round.npz", **arrays | {"outliers": marked, "unverified": np.arange(n) == 5})
    view = read_run(folder)
    caption = cluster_figures.first_round(view).caption
    assert "Alone in a cluster, since no other resembles it: client 0." in caption
    assert "Outlier in a cluster of others: client 1." in caption
    assert f"1 of {n} clients may resemble no other" in caption
    assert "Outlier in a cluster of others: client 1." in str(two_views(view))
    # Client 0 did not answer: the updates are those of the others, and keep their true clusters.
    parts = {name: arrays[name][1:] for name in ("coordinates", "posteriors", "labels")}
    parts |= {"clients": np.arange(1, n), "outliers": marked[1:], "unverified": np.zeros(n - 1)}
    np.savez(folder / "first_round.npz", **arrays | parts)
    view = read_run(folder)
    figure = cluster_figures.first_round(view)
    assert "Outlier in a cluster of others: client 1." in figure.caption
    assert figure.caption.startswith(f"One point for each of {n - 1} clients that answered, coloured by true cluster; ")
    shown = {figures.true_name(view, kind): kind for kind in set(view.true_clusters)}
    for trace in figure.spec["data"]:
        kind = shown[trace["name"].removeprefix("true ")]
        ids = [int(re.match(r"client (\d+):", said)[1]) for said in trace["text"]]
        assert ids == [client for client in range(1, n) if view.true_clusters[client] == kind]


def test_odd_values_in_lines_do_not_stop_the_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 3)
    write_lines(
        folder / "metrics.jsonl",
        [
            {"view": "observer", "round": 3, "accuracy_mean": "high", "accuracy_by_cluster": [None, 0.5, "x"], "ari": [1]},
            {"view": "observer", "round": 3, "accuracy_mean": 0.5, "accuracy_by_cluster": [float("nan")]},  # damaged
            {"view": "server", "round": 3, "missing": None, "late": "x", "away": 2, "answered": [], "paused_s": "x"},
            {"view": "server", "round": 3, "bytes_up": None},  # damaged
            {"view": "server", "round": -1, "missing": []},
        ],
    )
    write_lines(
        folder / "clusters.jsonl",
        [
            {"view": "server", "round": 3, "assignment": [0, None, "x", 2.0, -1], "diagnostics": {"sizes": [None]}},
            {"view": "observer", "round": 3, "recovered": "x", "ari": None, "minority_recovered": 2},
            {"view": "server", "round": -1, "assignment": [0]},
        ],
    )
    write_lines(folder / "spans.jsonl", [{"who": 3, "what": None, "round": 3, "start": 5, "end": 1}])
    view = read_run(folder)
    assert [note for note in view.notes if "damaged" in note] == ["metrics.jsonl: 2 damaged lines left out"]
    assert {*view.served, *view.observed, *view.grouping, *view.agreement} == {1, 2, 3}
    assert view.grouping[3]["assignment"] == [0, None, None, 2, None]
    assert "NaN" not in re.search(r"const figures = (.*);\n", own_part(write_report(folder)))[1]


def test_not_a_run_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run folder"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match="absent"):
        write_report(tmp_path / "absent")


def test_tail_reads_only_whole_new_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    tail = JsonlTail(path)
    assert tail.new() == []
    path.write_text('{"a": 1}\n{"a": 2', encoding="utf-8")
    assert tail.new() == [{"a": 1}]
    assert tail.partial
    with path.open("a", encoding="utf-8") as file:
        file.write('2}\n{"a": 3}\n')
    assert tail.new() == [{"a": 22}, {"a": 3}]
    assert not tail.partial
    assert tail.new() == []
    path.write_text('{"a": 9}\n', encoding="utf-8")
    assert tail.new() == [{"a": 9}]


def test_later_line_of_a_round_wins(tmp_path: Path) -> None:
    folder = write_start(tmp_path / "run")
    write_round(folder, 1, 40)
    write_lines(folder / "metrics.jsonl", [{"view": "observer", "round": 1, "accuracy_mean": 0.125}])
    assert read_run(folder).observed[1]["accuracy_mean"] == 0.125


def test_a_second_line_without_answers_adds_bytes_and_seconds_alone(tmp_path: Path) -> None:
    """A resumed coordinator writes what it sent and received to resume the run, for a round that was complete."""
    folder = write_start(tmp_path / "run")
    write_round(folder, 1, 40, missing=(7,))
    first = read_run(folder).served[1]
    again = {
        "view": "server",
        "round": 1,
        "seconds": 1.0,
        "paused_s": 0.5,
        "bytes_up": 10,
        "bytes_down": 20,
        "answered": 0,
        "missing": [],
    }
    write_lines(folder / "metrics.jsonl", [again])
    sums = {"seconds": 5.1, "paused_s": 0.5, "bytes_up": 10 + first["bytes_up"], "bytes_down": 20 + first["bytes_down"]}
    assert read_run(folder).served[1] == {**first, **sums}


def test_rounds_and_clients_of_a_run_are_those_of_the_signed_job_before_its_first_round(tmp_path: Path) -> None:
    folder = write_start(tmp_path / "run", rounds=40)
    config = (folder / "config.yaml").read_text(encoding="utf-8")
    (folder / "config.yaml").write_text(config.replace("rounds: 40", "rounds: 50"), encoding="utf-8")
    (folder / "experiment.json").unlink()
    view = read_run(folder)
    assert (view.rounds, view.clients, view.true_clusters, view.notes) == (40, 21, [], [])
    (folder / "protocol.json").unlink()
    assert (read_run(folder).rounds, read_run(folder).clients) == (50, 0)
    write_lines(folder / "clusters.jsonl", [{"view": "server", "round": 1, "assignment": [0, 1, 1]}])
    assert read_run(folder).clients == 3
    write_lines(folder / "metrics.jsonl", [{"view": "observer", "round": 1, "accuracy_by_client": [0.5] * 4}])
    assert read_run(folder).clients == 4
    (folder / "protocol.json").write_text('{"roster": {"clients": 5}}', encoding="utf-8")  # with roster.jsonl beside it
    assert read_run(folder).clients == 5


def test_groups_take_the_colour_of_their_true_cluster(finished: Path) -> None:
    view = read_run(finished)
    # The server numbers its groups 1, 2, 3, 0 where the truth is 0, 1, 2, 3.
    assert figures.group_colours(view) == {1: 0, 2: 1, 3: 2, 0: 3}
    view.experiment = {}
    assert sorted(figures.group_colours(view).values()) == [0, 1, 2, 3]


def test_a_split_cluster_gives_two_colours(tmp_path: Path) -> None:
    folder = write_start(tmp_path / "run")
    split = [4 if cluster == 1 and client % 2 else cluster for client, cluster in enumerate(true_clusters())]
    write_lines(
        folder / "clusters.jsonl",
        [{"view": "server", "round": 1, "assignment": split, "diagnostics": {"phase": "soft", "sizes": [3, 6, 6, 6]}}],
    )
    colours = figures.group_colours(read_run(folder))
    assert len(set(colours.values())) == len(set(split))


def test_assignments_are_sorted_by_true_cluster(finished: Path) -> None:
    spec = cluster_figures.assignments(read_run(finished)).spec
    assert spec is not None
    rounds, truth = spec["data"]
    assert [row[0] for row in truth["z"]] == sorted(true_clusters())
    assert rounds["x"] == list(range(2, 41))
    wrong = sum(cell != row[0] for cells, row in zip(rounds["z"], truth["z"], strict=True) for cell in cells)
    assert wrong == 5


def test_the_page_begins_with_the_result_and_three_facts(finished: Path) -> None:
    text = own_part(write_report(finished))
    assert "<h1>R-DPCFL: 71.2 % at epsilon 5, 4 of 4 clusters found</h1>" in text
    facts = dict(re.findall(r"<dt>(Protects|Against|Promise)</dt><dd>(.*?)</dd>", text))
    assert facts == {
        "Protects": "one training record of a client",
        "Against": "the server: each client adds noise before it sends anything",
        "Promise": "epsilon 5 at delta 0.0001, of which 4.98 is spent; 10.9 if a record may be exchanged for another",
    }
    assert text.index("<h1>") < text.index("Protects") < text.index("<details>") < text.index("floating-point effects")
    assert "Whole statement: 3 covered, 3 not covered" in text


def test_a_result_says_how_many_clusters_were_found_and_how_far_it_came(tmp_path: Path) -> None:
    folder = write_start(tmp_path / "run")
    assert result_line(read_run(folder)) == "R-DPCFL: accuracy not measured yet at epsilon 5, running after 0 rounds"
    write_round(folder, 2, 40)
    true = true_clusters()
    merged = [0 if cluster == 1 else cluster for cluster in true]
    write_lines(folder / "clusters.jsonl", [{"view": "server", "round": 2, "assignment": merged}])
    assert ", 2 of 4 clusters found, running after 2 rounds" in result_line(read_run(folder))
    unassigned = [None if cluster == 0 else cluster for cluster in true]
    write_lines(folder / "clusters.jsonl", [{"view": "server", "round": 2, "assignment": unassigned}])
    assert ", 3 of 4 clusters found" in result_line(read_run(folder)), "clients without a cluster are none"
    other = write_start(tmp_path / "other")
    write_round(other, 1, 40)
    assert result_line(read_run(other)).endswith("running after 1 round")
    write_lines(folder / "clusters.jsonl", [{"view": "server", "round": 2, "assignment": [0] * len(true)}])
    assert "one model for all clients" in result_line(read_run(folder))
    assert cluster_sizes(read_run(folder)).spec is None


def test_a_finished_run_without_a_final_accuracy_does_not_borrow_that_of_an_earlier_round(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 2)
    (folder / "run.json").write_text(
        json.dumps({**run_json(rounds_done=3), "final": {"accuracy_mean": None}}), encoding="utf-8"
    )
    assert result_line(read_run(folder)).startswith("R-DPCFL: no final accuracy at epsilon 5")


@pytest.mark.parametrize(("spent", "said"), [(4.999, "all of it spent"), (4.98, "of which 4.98 is spent")])
def test_what_is_spent_is_all_of_epsilon_if_it_is_printed_alike(spent: float, said: str) -> None:
    promise = dict(privacy_facts(privacy(epsilon_spent=spent)))["Promise"]
    assert promise.startswith(f"epsilon 5 at delta 0.0001, {said}")


def test_no_facts_of_privacy_without_a_finite_epsilon(tmp_path: Path) -> None:
    text = own_part(write_report(write_run(tmp_path / "run", 2, privacy=privacy(epsilon=None))))
    assert "at epsilon inf" in text
    assert "<dt>Promise</dt>" not in text


@pytest.mark.parametrize(
    ("trust", "words"),
    [
        # Who sees the traffic of the network knows samples that epsilon takes for secret: the statement names it as not covered.
        ("trusted-server", "everybody who sees only what the server publishes, not the server"),
        ("secure-aggregation", "the server, which sees only sums over clients"),
    ],
)
def test_the_page_says_against_whom_a_run_protects(tmp_path: Path, trust: str, words: str) -> None:
    text = own_part(write_report(write_run(tmp_path / "run", 2, privacy=privacy(trust=trust, unit="client"))))
    (against,) = re.findall(r"<dt>Against</dt><dd>(.*?)</dd>", text)
    assert against.startswith(words)


def test_terms_are_explained_for_pointer_and_keyboard(finished: Path) -> None:
    text = own_part(write_report(finished))
    terms = {term: title for title, term in re.findall(r'<abbr tabindex="0" title="([^"]+)"[^>]*>([^<]+)</abbr>', text)}
    assert {"MSS", "MPO", "ARI", "Noise multiplier"} <= terms.keys()
    # With samples of fixed size noise is z times 2 C (`test_noise_on_sums_covers_a_clipped_update`), and clients are exchanged.
    assert "twice the clip norm where a sample of fixed size" in terms["Noise multiplier"]
    assert "a record (or client)" in terms["Epsilon under replace-one"]
    # Of points of two equal Gaussians Q(SS) are nearer to the other centre: half of them at SS 0, where the overlap is 1.
    assert "twice the share of their clients" in terms["MPO"]


def test_the_page_holds_settings_versions_and_the_command_that_repeats_the_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 2, versions={"torch": "2.13.0"})
    text = own_part(write_report(folder))
    assert f"<pre>dpcfl run {folder}/config.yaml</pre>" in text
    assert "<dt>torch</dt><dd>2.13.0</dd>" in text


def test_clients_worse_than_alone_are_marked_only_where_that_is_known(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 3)
    alone = write_run(tmp_path / "alone", 3, algorithm="local")
    seen = read_run(folder).observed[3]["accuracy_by_client"]
    better = [value + (0.01 if client in (2, 7) else -0.01) for client, value in enumerate(seen)]
    write_lines(alone / "metrics.jsonl", [{"view": "observer", "round": 3, "accuracy_by_client": better}])
    marked = specs(own_part(write_report(folder, alone)))["clients"]["data"][-1]
    assert marked["name"] == "worse than alone"
    assert {name.split()[0] for name in marked["y"]} == {"2", "7"}
    assert "alone" not in [trace["name"] for trace in specs(own_part(write_report(folder)))["clients"]["data"]]
    with pytest.raises(ConfigError, match="must be a run of local"):
        write_report(alone, folder)
    (alone / "config.yaml").write_text("privacy: {epsilon: 3}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"not comparable with .*privacy"):
        write_report(folder, alone)


def test_epsilons_that_differ_in_the_seventh_digit_are_one_line(tmp_path: Path) -> None:
    folder = write_start(tmp_path / "run")
    for at in (1, 2):
        spent = [2.0 * at * (1 + 1e-7 * client) for client in range(21)]
        write_lines(folder / "metrics.jsonl", [{"view": "server", "round": at, "epsilon_spent_by_client": spent}])
    spec = figures.epsilon_spent(read_run(folder)).spec
    assert spec is not None
    assert [trace["name"] for trace in spec["data"]] == ["every client", "promised"]


def test_a_malformed_figure_of_an_attack_is_named_and_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 2)
    wrong = {"data": [{"type": "scatter", "x": [1], "y": [1], "line": {"color": "url(x)"}}], "layout": {}, "height": 100}
    AttackResult("invert", "Title", "Said", figure=wrong).write(folder)
    text = own_part(write_report(folder))
    assert "the figure of invert is malformed" in text
    assert "Said" in text


def test_timeline_stays_light(tmp_path: Path) -> None:
    folder = write_start(tmp_path / "run")
    write_lines(
        folder / "spans.jsonl",
        [
            {"who": f"client {client}", "what": what, "round": at, "start": float(at), "end": at + 0.5}
            for at in range(1, 31)
            for client in range(120)
            for what in ("train", "send", "wait")
        ],
    )
    figure = timeline(read_run(folder))
    assert figure.spec is not None
    assert sum(len(bars["x"]) for bars in figure.spec["data"]) <= BARS
    assert len(figure.spec["layout"]["yaxis"]["categoryarray"]) == ROWS
    assert "of 120 processes" in figure.caption


def test_views_hold_truth_on_the_experimenters_side_only(finished: Path) -> None:
    rows = two_views(read_run(finished))
    server = " ".join(row[1] for row in rows)
    observer = " ".join(row[2] for row in rows)
    assert "840 TASK" in server
    assert "839 RESULT" in server
    assert "1 answer missing" in server
    assert "True clusters: 3/6/6/6" in observer
    assert "Mean " in observer
    assert "%" not in server
    assert rows[1][1] == "Only what the client's gate released."
    assert rows[2][1] == "Clients by cluster: 6/3/6/6. Mixture of the first round: MSS 31.4, MPO 0."
    assert rows[-1][1:] == (
        "40 rounds answered, 4.1 s each; 1 answer missing.",
        "Workers' time: wait for a core 64 %, wait for others 27 %, compute 8 %, send 1 %.",
    )


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ("local", "None: no client sends a model or an update."),
        ("mr-mtl", "Only what the client's gate released."),
        ("package.module:Class", "Only what the client's gate released."),
    ],
)
def test_the_page_of_local_says_that_its_clients_send_no_update(finished: Path, algorithm: str, said: str) -> None:
    view = read_run(finished)
    view.run["algorithm"] = algorithm
    assert dict(row[:2] for row in two_views(view))["Each client's update"] == said


@pytest.mark.parametrize("sizes", [[0], []])
def test_a_server_without_clusters_has_none_in_its_view(finished: Path, sizes: list[int]) -> None:
    """With mr-mtl its clients by cluster were "0", with local "none", and the page counted 1 and 0 clusters."""
    view = read_run(finished)
    view.grouping = {t: {"assignment": [None] * 21, "clusters": len(sizes), "diagnostics": {"sizes": sizes}} for t in (1, 2)}
    assert "The server does not cluster clients." in [row[1] for row in two_views(view)]
    assert "Clusters M" not in dict(key_figures(view))
    view.grouping[2]["diagnostics"] = {"sizes": [12.0, 9.0]}  # released counts, without clusters of clients
    assert "Clients by cluster: 12/9. Mixture of" in " ".join(row[1] for row in two_views(view))
    assert "Clusters M" in dict(key_figures(view))


def test_a_page_that_cannot_be_written_is_a_sentence_with_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python it was an OSError of the system."""
    folder, opened = write_run(tmp_path / "run", 2), os.open

    def denied(path: Path, flags: int, *more: int) -> int:
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, flags, *more)

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(ConfigError, match=f"^{re.escape(str(folder / 'report.html'))}: permission denied$"):
        Run(folder).report()


def test_a_page_without_a_folder_is_a_sentence_with_its_path(tmp_path: Path) -> None:
    page = tmp_path / "missing" / "page.html"
    with pytest.raises(ConfigError, match=f"^{re.escape(str(page))}: no such file or folder$"):
        pages.write_page(page, title="", lead=[], figures=[])


def test_settings_of_the_data_read_like_words(finished: Path) -> None:
    view = read_run(finished)
    view.experiment["data"] = {"clients": [2, 2], "shift": "rotation", "validation": 0.0, "test_per_client": 40, "alpha": None}
    assert "clients: 2/2; shift: rotation; test per client: 40." in [row[2] for row in two_views(view)]


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (percent(0.7123), "71.2 %"),
        (percent(None), "–"),
        (percent(float("nan")), "–"),
        (size(999), "999 B"),
        (size(116_180), "116.2 kB"),
        (size(97e6), "97.0 MB"),
        (size(3.2e9), "3.20 GB"),
        (duration(4.12), "4.1 s"),
        (duration(60), "1:00"),
        (duration(187), "3:07"),
        (duration(3765), "1:02:45"),
        (tiny(9.4e-25), "below 1e-10"),
        (tiny(0.0), "0"),
        (tiny(0.0312), "0.0312"),
        (at_most(12_801, 3), "12900"),
        (at_most(10_000.0), "10000"),
        (plain(3e7), "3e+07"),
    ],
)
def test_numbers_as_words(found: str, wanted: str) -> None:
    assert found == wanted


def test_diagnostics_are_drawn_whatever_they_are_called(tmp_path: Path) -> None:
    """Numbers become lines, lists become heat maps, words and lists of one value neither. Rounds before a split were left out."""
    folder = write_run(tmp_path / "run", 3)
    shown = {"a word": "x", "split": [0]}
    lines = [
        {
            "view": "server",
            "round": t,
            "diagnostics": {"new figure": t / 2, "by client": [t] * 21, "one": [t], "sizes": [t, 9.5], **shown},
        }
        for t in (1, 2, 3)
    ]
    lines[2]["diagnostics"]["split"] = [*range(21)]  # from one cluster to one for each client
    write_lines(folder / "clusters.jsonl", lines)
    curves, heat = (figure.spec["data"] for figure in diagnostics(read_run(folder))[:2])
    assert {trace["name"]: trace["y"] for trace in curves}["new figure"] == [0.5, 1.0, 1.5]
    by_name = {figure.title: figure.spec for figure in diagnostics(read_run(folder))}
    # Sizes that do not count an assignment, such as released ones, are in no other figure.
    assert set(by_name) == {
        "Diagnostics of the algorithm",
        *(f"Diagnostics: {name}" for name in ("by client", "sizes", "split")),
    }
    split = by_name["Diagnostics: split"]
    assert split["data"][0]["z"][:2] == [[0, 0, 0], [None, None, 1]]
    assert split["layout"]["yaxis"]["title"]["text"] == "cluster"
    assert heat[0]["z"] == [[1, 2, 3]] * 21
    assert by_name["Diagnostics: by client"]["layout"]["yaxis"]["title"]["text"] == "client"
    (found,) = (figure for figure in diagnostics(read_run(folder)) if figure.title == "Diagnostics: by client")
    assert found.caption == "One row per client, as the server computed it. From 1 (faint) to 3 (strong)."


def transfers(t: int) -> list[dict]:
    """Spans of two clients in a round of 5 s; client 1 sends for longer."""
    parts = ((0, (("receive", 1.0), ("train", 1.0), ("send", 0.5))), (1, (("receive", 1.0), ("train", 1.0), ("send", 3.0))))
    lines = []
    for client, work in parts:
        at = 5.0 * t
        for what, seconds in work:
            lines.append({"who": f"client {client}", "what": what, "round": t, "start": at, "end": at + seconds})
            at += seconds
    return lines


def test_time_and_traffic_of_a_run_in_virtual_time(tmp_path: Path) -> None:
    folder = write_start(tmp_path / "run")
    for t in (1, 2, 3):
        write_lines(folder / "spans.jsonl", transfers(t))
        served = {"view": "server", "round": t, "seconds": 400.0, "bytes_up": 300, "bytes_down": 500, "clock": "virtual"}
        write_lines(folder / "metrics.jsonl", [served, {"view": "observer", "round": t, "accuracy_mean": t / 4}])
        for client, last in ((0, 2.5), (1, 5.0)):
            task = {"time": 5.0 * t, "direction": "down", "peer": f"client {client}", "kind": "TASK", "round": t, "bytes": 200}
            result = {**task, "time": 5.0 * t + last, "direction": "up", "kind": "RESULT", "bytes": 100}
            write_lines(folder / "messages.jsonl", [task, result])
    (folder / "run.json").write_text(json.dumps({"wall_s": 10.7}))
    text = own_part(write_report(folder))
    drawn = specs(text)
    assert "20:00 of virtual time, computed in 10.7\N{NO-BREAK SPACE}s" in text
    mean, target = drawn["accuracy-time"]["data"]
    assert (mean["name"], mean["y"], mean["text"]) == ("mean", [25, 50, 75], [1, 2, 3])
    assert mean["x"] == pytest.approx([400 / 60, 800 / 60, 20])
    assert (target["name"], target["x"], target["y"]) == ("71.0 % reached", [20], [75])
    bars = {trace["name"]: trace["x"] for trace in drawn["client-time"]["data"]}
    assert bars["send"] == pytest.approx([1.5 / 60, 9 / 60], abs=1e-4)
    assert bars["wait for others"][0] > bars["wait for others"][1]
    assert [trace["name"] for trace in drawn["timeline"]["data"]] == ["train", "receive", "send"]
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", text)
    assert ["71 %", "3", "20.0"] in [cells[i : i + 3] for i in range(len(cells))]  # 95 % of 75 %
    assert ["1", "3", "7.50", "2.50", "2.50"] in [cells[i : i + 5] for i in range(len(cells))]  # client 1 was last
    assert ["tasks", "6", "–", "1.2"] in [cells[i : i + 4] for i in range(len(cells))]  # kB
    assert ["control", "–", "0.3", "0.3"] in [cells[i : i + 4] for i in range(len(cells))]
