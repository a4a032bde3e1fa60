"""RR-Cluster's curves, label findings and mechanisms on made-up runs: what they ask for and what they conclude."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_reproduce_clusters import MadeUp, told

from dpcfl_net.core import runlog
from dpcfl_net.reproduce import rr_mechanisms, rr_population
from dpcfl_net.reproduce.base import find
from dpcfl_net.reproduce.rr_collapse import INFINITE


def lines_of(sent, released=None, settled=None):
    """Write observer's lines with shares of right labels, which depend on the run's settings."""

    def write(result):
        own = result.settings["algorithm"]
        shift = 1e-3 * result.seed * (1 + (own.get("min_cluster_size", 0) > 0))
        lines = runlog.Lines(result.folder / "clusters.jsonl")
        for t in range(1, 26):
            kinds = {"as sent": sent(own) + shift} | ({"as released": released(own) + shift} if released else {})
            sizes = [4.0, 40.0, 30.0, 26.0]
            lines.write({"view": "observer", "round": t, "label_accuracy": kinds, "diagnostics": {"sizes": sizes}})
        if settled:
            lines.write({"view": "observer", "round": 25, "assignment_accuracy": settled(own) + shift})
        lines.close()

    return write


def rebalanced(own):
    return own.get("min_cluster_size", 0) > 0


def reach(path, run):
    """Rebalancing gains 3 points; DP-FedAvg is 2 points above DP-IFCA; the oracle is best."""
    own = run.algorithm
    if own.get("base") == "oracle":
        return 0.7
    return 0.62 if own["name"] == "dp-fedavg" else 0.6 + 0.03 * rebalanced(own)


def test_figure_1_is_by_round_and_compares_at_every_budget(tmp_path):
    context = MadeUp(tmp_path, reach, lines_of(lambda own: 0.5), seeds=6)
    outcome = find("rr-cluster/fig1")().compute(context)
    assert told(outcome) == ["holds", "holds", "holds"]
    assert {run.privacy.epsilon for _, run in context.cells} == {2, 4, 8}
    assert {(run.output.evaluate_every, run.privacy.adjacency) for _, run in context.cells} == {(5, "zero-out")}
    assert len(outcome.figures) == 3
    few = find("rr-cluster/fig1")().compute(MadeUp(tmp_path / "1", reach, lines_of(lambda own: 0.5), seeds=1))
    assert told(few) == ["undecided"] * 3


def test_a_part_of_figure_1_has_the_claims_of_its_runs(tmp_path):
    context = MadeUp(tmp_path, reach, lines_of(lambda own: 0.5), scale="paper", most=4)
    outcome = find("rr-cluster/fig1")().compute(context)
    assert (outcome.runs, outcome.planned_runs) == (4, 3 * 3 * 5)
    assert outcome.partial
    assert [(run.seed, run.privacy.epsilon) for _, run in context.cells] == [(0, 4)] * 3 + [(1, 4)]
    assert {Path(path).stem for path, _ in context.cells} == {"paper_fmnist_balanced"}
    assert told(outcome) == ["undecided"] * 3
    assert outcome.notes[0].startswith("A CNN with 100 rounds")
    assert [[cell[:4] for cell in row] for row in outcome.tables[0].rows] == [
        ["DP-F", "62.0"],
        ["DP-I", "60.0"],
        ["RR-C", "63.0"],
    ]
    start = find("rr-cluster/fig1")().compute(MadeUp(tmp_path / "1", reach, lines_of(lambda own: 0.5), most=1))
    assert (told(start), [figure.key for figure in start.figures]) == ([], ["epsilon-4"])
    assert told(find("rr-cluster/fig2")().compute(MadeUp(tmp_path / "0", reach, most=0))) == []


def test_a_part_of_figure_1_says_nothing_of_the_epsilons_without_runs(tmp_path):
    """All seeds of one epsilon: leads at every epsilon are open, and so is that DP-IFCA lags at none."""
    context = MadeUp(tmp_path, reach, lines_of(lambda own: 0.5), scale="paper", seeds=6, most=18)
    assert told(find("rr-cluster/fig1")().compute(context)) == ["undecided", "holds", "undecided"]

    def even(path, run):
        return 0.6 + 0.001 * run.seed * (run.algorithm["name"] == "dp-fedavg")

    context = MadeUp(tmp_path / "1", even, lines_of(lambda own: 0.5), scale="paper", seeds=6, most=18)
    assert told(find("rr-cluster/fig1")().compute(context)) == ["does not hold", "undecided", "does not hold"]


def test_figure_2_judges_the_end_and_the_mean_over_rounds(tmp_path):
    outcome = find("rr-cluster/fig2")().compute(MadeUp(tmp_path, reach, lines_of(lambda own: 0.5), seeds=6))
    assert told(outcome) == ["holds"] * 8
    rows = [{**row, "round": t, "accuracy": row["accuracy"] - (25 - t)} for row in outcome.rows for t in (5, 25)]
    slow = [
        {**row, "accuracy": row["accuracy"] - 20 * (row["system"] == "RR-Cluster (IFCA)" and row["round"] == 5)} for row in rows
    ]
    assert told(find("rr-cluster/fig2")().judge(slow)) == ["holds", "does not hold"] * 4


def test_collapse_compares_labels_and_accuracy_with_the_true_clusters(tmp_path):
    write = lines_of(lambda own: 0.77 if rebalanced(own) else 0.55)
    context = MadeUp(tmp_path, reach, write, seeds=6)
    outcome = find("rr-cluster/collapse")().compute(context)
    assert told(outcome) == ["holds"] * 3
    assert {run.privacy.epsilon for _, run in context.cells} == {2}
    assert outcome.claims[0].measured.startswith("DP-IFCA 55.")
    assert [row["sent"] for row in outcome.rows if row["system"] == "Oracle, client level"] == [None] * 6
    same = find("rr-cluster/collapse")().compute(MadeUp(tmp_path / "2", reach, lines_of(lambda own: 0.6), seeds=6))
    assert told(same)[0] == "does not hold"


def test_the_table_with_64_clients_has_their_multiples(tmp_path):
    write = lines_of(lambda own: 0.5, settled=lambda own: 0.9 if rebalanced(own) else 0.4)
    context = MadeUp(tmp_path, lambda path, run: 0.5, write, seeds=6)
    outcome = find("rr-cluster/table4-64")().compute(context)
    assert told(outcome) == ["holds"] * 3
    assert {(run.privacy.epsilon, run.runtime.max_epsilon) for _, run in context.cells} == {(2, None), (INFINITE, INFINITE)}
    assert rr_population.multiples().measured == "24 of 24 entries"
    assert outcome.tables[0].rows[0][:3] == ["2", "0", "42.2"]


@pytest.mark.slow
def test_mechanisms_for_labels_are_compared_at_equal_epsilon(tmp_path, monkeypatch):
    monkeypatch.setattr(rr_mechanisms, "BUDGETS", (2.0,))
    released = {12: 0.3, 24: 0.3}
    write = lines_of(
        lambda own: 0.8, lambda own: 0.87 if own.get("labels_every") else released.get(own.get("min_cluster_size"), 0.3)
    )
    context = MadeUp(tmp_path, reach, write, seeds=6)
    outcome = find("rr-cluster/labels")().compute(context)
    by_text = {one.claim.text: one.verdict for one in outcome.judged()}
    assert (
        by_text["(ours) a single randomised response of all clients is right more often than Gaussian labels of every sample"]
        == "holds"
    )
    assert by_text["(ours) five of them are too"] == "does not hold"
    sampled = "(ours) randomised response of every sample is right more often than Gaussian labels of every sample"
    assert by_text[sampled] == by_text["(ours) the same beside sums with equal noise"] == "holds"
    assert (
        by_text["(ours) released labels are right more often with one randomised response than under labels-first"] == "holds"
    )
    assert {run.privacy.epsilon for _, run in context.cells} == {8}
    assert {run.privacy.adjacency for _, run in context.cells} == {"replace-one"}


@pytest.mark.slow
def test_labels_beside_sums_cost_the_epsilon_together():
    shares = rr_mechanisms.right_beside_sums(2.0)
    gaussian, response = shares[rr_mechanisms.GAUSSIAN_BESIDE], shares[rr_mechanisms.RESPONSE_BESIDE]
    assert 0.25 < gaussian < response < 1
    alone = rr_mechanisms.right_labels(2.0)  # labels that need not share the epsilon are right more often
    assert gaussian < alone[rr_mechanisms.GAUSSIAN_SAMPLES]
    assert response < alone[rr_mechanisms.RESPONSE_SAMPLES]


def test_a_gaussian_label_is_right_as_often_as_its_integral_says():
    assert rr_mechanisms.gaussian_right(1e6) == pytest.approx(0.25, abs=1e-4)
    assert rr_mechanisms.gaussian_right(0.05) == pytest.approx(1.0, abs=1e-6)
