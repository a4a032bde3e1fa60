"""What repeated cluster choices tell: exact theory, the attack on the real mechanism and on recorded runs, raw and private."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import dpcfl, only_run, write_config
from scipy import stats

from dpcfl_net.attacks import recorded_choices, selection_guess, selections
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.privacy.mechanisms import exponential_mechanism
from dpcfl_net.privacy.randomness import stream
from dpcfl_net.privacy.slots import SelectionSlot

FALSE_ALARM = 1e-7


def by_enumeration(chances: list[np.ndarray]) -> float:
    """The chance that plurality names cluster 0, a tie drawn fairly, over every sequence of choices."""
    found = 0.0
    for choices in itertools.product(range(len(chances[0])), repeat=len(chances)):
        votes = Counter(choices)
        best = [cluster for cluster, count in votes.items() if count == max(votes.values())]
        chance = math.prod(p[choice] for p, choice in zip(chances, choices, strict=True))
        found += chance * (0 in best) / len(best)
    return found


def worst_case(epsilon: float, clusters: int) -> np.ndarray:
    weights = np.ones(clusters)
    weights[0] = math.exp(epsilon)
    return weights / weights.sum()


def test_theory_gives_the_figures_of_the_threat_model():
    right = selection_guess.right_after(1.0, 4, 50)
    assert right[0] == pytest.approx(math.e / (math.e + 3), abs=1e-12)
    assert [round(right[t - 1], 3) for t in (1, 10, 50)] == [0.475, 0.773, 0.992]
    assert all(later >= sooner - 1e-12 for sooner, later in itertools.pairwise(right))


@pytest.mark.parametrize(("epsilon", "clusters", "rounds"), [(1.0, 4, 5), (0.3, 3, 7), (2.0, 2, 9), (0.0, 4, 4), (3.0, 5, 4)])
def test_theory_is_the_sum_over_all_sequences(epsilon, clusters, rounds):
    right = selection_guess.right_after(epsilon, clusters, rounds)
    assert len(right) == rounds
    for t in range(1, rounds + 1):
        assert right[t - 1] == pytest.approx(by_enumeration([worst_case(epsilon, clusters)] * t), abs=1e-12)


def test_theory_at_its_ends():
    assert selection_guess.right_after(0.0, 4, 3) == pytest.approx([0.25] * 3)
    assert selection_guess.right_after(1000.0, 4, 3) == pytest.approx([1.0] * 3)
    assert selection_guess.right_after(1.0, 1, 2) == pytest.approx([1.0] * 2)
    assert selection_guess.right_after(1.0, 4, 0) == ()
    for bad in ((-1.0, 4, 1), (math.nan, 4, 1), (1.0, 0, 1), (1.0, 4, -1)):
        with pytest.raises(ValueError, match="epsilon"):
            selection_guess.right_after(*bad)


@pytest.mark.parametrize("epsilon", [0.1, 0.9, 3.0])
def test_no_scores_within_the_range_make_the_guess_better(epsilon):
    """The chance is linear in each choice's distribution: its maximum is at scores that are all 0 or epsilon in every round."""
    raised = [np.array([1, *extra]) for extra in itertools.product((0, 1), repeat=3)]
    kinds = [np.exp(epsilon * scores) / np.exp(epsilon * scores).sum() for scores in raised]
    most = max(by_enumeration(list(chances)) for chances in itertools.combinations_with_replacement(kinds, 3))
    assert most == pytest.approx(selection_guess.right_after(epsilon, 4, 3)[-1], abs=1e-12)


@pytest.mark.parametrize(("epsilon", "rounds"), [(1.0, 10), (0.15, 20)])
def test_crafted_models_tell_more_than_the_bound_of_counted_choices(epsilon, rounds):
    """Two of four models are right for each secret, in three pairings that take turns: a choice is one bit, and Bayes guesses best."""
    right, draws = 1 / (1 + math.exp(-epsilon)), [(rounds + 2 - pairing) // 3 for pairing in range(3)]
    bits = [[stats.binom.pmf(np.arange(n + 1), n, p) for p in (right, 1 - right)] for n in draws]
    chances = [np.einsum("i,j,k", bits[0][a], bits[1][b], bits[2][a ^ b]) for a in (0, 1) for b in (0, 1)]
    assert np.max(chances, axis=0).sum() / 4 > selection_guess.right_after(epsilon, 4, rounds)[-1] + 0.005


def named_by_the_mechanism(counts: list[int], eta: float, repetitions: int, rounds: int) -> np.ndarray:
    """(repetitions, rounds) choices of the client's own mechanism, one stream each as tasks have them."""
    streams = [stream(bytes([r % 251]) * 16 + r.to_bytes(4, "big"), "selection") for r in range(repetitions)]
    return np.array([[exponential_mechanism(counts, eta, rng) for _ in range(rounds)] for rng in streams])


def measured(choices: np.ndarray) -> np.ndarray:
    votes = np.stack([selection_guess.votes_after(row, 4) for row in choices])
    return selection_guess.credit(votes, np.zeros(choices.shape, np.int64)).mean(axis=0)


def test_the_attack_on_the_real_mechanism_agrees_with_theory_and_tells_another_epsilon():
    repetitions, rounds = 5000, 10
    margin = math.sqrt(math.log(2 * rounds / FALSE_ALARM) / (2 * repetitions))  # Hoeffding, over all rounds
    theory = np.array(selection_guess.right_after(1.0, 4, rounds))
    one_record = measured(named_by_the_mechanism([101, 100, 100, 100], 1.0, repetitions, rounds))
    assert np.abs(one_record - theory).max() < margin
    two_records = measured(named_by_the_mechanism([102, 100, 100, 100], 1.0, repetitions, rounds))
    assert np.abs(two_records - theory).max() > 2 * margin  # the test would notice a mechanism of twice the epsilon
    assert np.abs(two_records - np.array(selection_guess.right_after(2.0, 4, rounds))).max() < margin


def test_what_is_predicted_from_scores_agrees_with_theory():
    scores = np.array([[5.0, 4.0, 4.0, 4.0]] * 10)
    found = selection_guess.predicted(scores, 1.0, np.zeros(10, np.int64), np.random.default_rng(0))
    margin = math.sqrt(math.log(20 / FALSE_ALARM) / (2 * selection_guess.REPETITIONS))
    assert np.abs(found - np.array(selection_guess.right_after(1.0, 4, 10))).max() < margin


def test_votes_credit_and_posterior():
    votes = selection_guess.votes_after([2, 0, 2, 1], 3)
    assert votes.tolist() == [[0, 0, 1], [1, 0, 1], [1, 0, 2], [1, 1, 2]]
    assert selection_guess.credit(votes, np.array([2, 2, 2, 0])).tolist() == [1.0, 0.5, 1.0, 0.0]
    belief = selection_guess.posterior(votes, 1.0)
    assert belief.sum(axis=1) == pytest.approx(np.ones(4))
    assert belief[3] == pytest.approx(np.array([1, 1, math.e]) / (2 + math.e))  # Bayes, each choice e times as likely if true


@pytest.fixture(scope="module")
def recorded(finished_run, tmp_path_factory) -> Path:
    """The finished run of r-dpcfl, in a folder of its own: the attack writes into it."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    shutil.copytree(finished_run, folder)
    return folder


@pytest.fixture(scope="module")
def raw_run(tmp_path_factory) -> Path:
    """Four rounds of rc-dpfl, r-dpcfl's twin whose clients send their choices as they are: in the last two."""
    out = tmp_path_factory.mktemp("raw")
    config = write_config(out / "c", algorithm={"name": "rc-dpfl", "clusters": 4}, rounds=4)
    done = dpcfl("run", config, "--out", out)
    assert done.returncode == 0, done.stderr + done.stdout
    return only_run(out)


def test_a_recorded_run_of_private_choices(recorded):
    recording = recorded_choices.read_choices(recorded)
    slot = next(s for s in recording.job.algorithm.plan(recording.job.protocol.roster[0]) if isinstance(s, SelectionSlot))
    assert recording.etas == [slot.eta] * 8 == pytest.approx([0.15] * 8)
    assert [history.client for history in recording.histories] == list(range(8))
    found = selections.curves(recording, recorded_choices.true_scores(recording))
    assert found.clients == [8]
    # Tens of records between the best model and the next, at .15 each: one choice is all it takes, as its bound allows ...
    assert found.measured[0] >= 7 / 8
    assert found.predicted[0] > 0.9
    assert found.at_most == pytest.approx([1.0])
    # ... while what one record decides stays hidden.
    assert found.one_record[0] == pytest.approx(math.exp(0.15) / (math.exp(0.15) + 3))


def test_faint_choices_of_the_same_run_are_guessed_as_predicted_and_below_the_bound(recorded):
    """The recorded models and the clients' real scores under an eta 200 times smaller, drawn by the real mechanism."""
    recording = recorded_choices.read_choices(recorded)
    eta, rounds, repetitions = 0.15 / 200, 8, 300
    seen, predicted = [], []
    for client, scores in enumerate(recorded_choices.true_scores(recording)):
        counts = [int(count) for count in scores[0]]
        best = counts.index(max(counts))
        choices = named_by_the_mechanism(counts, eta, repetitions, rounds)
        votes = np.stack([selection_guess.votes_after(row, 4) for row in choices])
        seen.append(selection_guess.credit(votes, np.full(choices.shape, best)).mean(axis=0))
        rng = np.random.default_rng(client)
        predicted.append(selection_guess.predicted(np.repeat(scores, rounds, axis=0), eta, np.full(rounds, best), rng))
    margin = math.sqrt(math.log(4 * rounds / FALSE_ALARM) / (2 * 8 * repetitions)) + 0.02  # of both sides, clients together
    assert np.abs(np.mean(seen, axis=0) - np.mean(predicted, axis=0)).max() < margin
    bound = np.array(selection_guess.right_after(eta * recording.job.protocol.roster[0].records, 4, rounds))
    assert (np.mean(seen, axis=0) < bound + margin).all()
    assert np.mean(seen, axis=0)[0] < 0.6 < 1.0  # against certainty in the test above


def test_positive_control_raw_choices_give_the_cluster_at_once(raw_run):
    recording = recorded_choices.read_choices(raw_run)
    assert recording.etas == []
    found = selections.curves(recording, recorded_choices.true_scores(recording))
    assert found.measured == [1.0, 1.0]
    assert found.agreement == [1.0, 1.0]  # the first choice of each client already gives the true clusters, all of them


def test_clients_that_chose_more_often_than_others_are_counted(raw_run, monkeypatch):
    recording = recorded_choices.read_choices(raw_run)
    first, *others = recording.histories
    once = [replace(each, rounds=each.rounds[:1], choices=each.choices[:1], models=each.models[:1]) for each in others]
    monkeypatch.setattr(selections, "read_choices", lambda folder: replace(recording, histories=[first, *once]))
    assert "of 100% after 2 (1 of 8 clients chose so often)" in selections.attack(raw_run).headline


@pytest.mark.slow
def test_the_command_writes_a_result_beside_another_run(recorded, raw_run):
    done = dpcfl("attack", "selections", recorded, "--against", raw_run)
    assert done.returncode == 0, done.stderr
    assert "one record" in done.stdout
    assert "rc-dpfl" in done.stdout
    written = json.loads((recorded / "attacks" / "selections.json").read_text())
    measured = written["facts"]["measured"][0]
    assert measured >= 7 / 8
    assert written["rows"][0][:2] == ["1", f"{measured:.3f}"]
    assert len({len(row) for row in [written["columns"], *written["rows"]]}) == 1
    assert {trace["name"].split(",")[0] for trace in written["figure"]["data"]} >= {"measured", "theory", "chance"}
    assert written["facts"]["against"]["measured"] == [1.0, 1.0]
    assert len(written["facts"]["clients_seen"]) == 8


def test_the_page_names_the_epsilons_of_clients_with_unequal_records(tmp_path):
    """The bound is a mean over clients: that of the fewest records alone would be too small a claim for the others."""
    data = {"dataset": "digits", "clients": [1, 1], "sizes": [40, 200], "test_per_client": 20}
    model, algorithm = {"name": "linear"}, {"name": "dp-ifca", "clusters": 2}
    config = write_config(tmp_path / "c", data=data, model=model, algorithm=algorithm, rounds=2)
    done = dpcfl("run", config, "--out", tmp_path, timeout=400)
    assert done.returncode == 0, done.stderr + done.stdout
    found = selections.attack(only_run(tmp_path))
    eta = found.facts["eta"]
    bounds = [selection_guess.right_after(eta * records, 2, 1)[0] for records in (40, 200)]
    assert found.facts["at_most"] == pytest.approx([np.mean(bounds)])
    said = f"that of epsilon {40 * eta:.4g} to {200 * eta:.4g} per choice: {np.mean(bounds):.2f} after one"
    assert any(said in text for text in found.sentences), found.sentences
    assert any("means over the clients" in text for text in found.sentences)


def test_the_bounds_are_those_of_each_clients_own_epsilon(tmp_path):
    """The first client has the larger epsilon, the last one the smaller: no single eta bounds both."""
    data = {"dataset": "digits", "clients": [1, 1], "train_per_client": 40, "test_per_client": 20}
    model, algorithm = {"name": "linear"}, {"name": "dp-ifca", "clusters": 2, "selection": {"rounds_fraction": 0.5}}
    privacy = {"epsilon": 0.1, "delta": 1e-4, "epsilon_by_client": {"0": 2}}
    config = write_config(tmp_path / "c", data=data, model=model, algorithm=algorithm, privacy=privacy, rounds=4)
    done = dpcfl("run", config, "--out", tmp_path, timeout=400)
    assert done.returncode == 0, done.stderr + done.stdout
    recording = recorded_choices.read_choices(only_run(tmp_path))
    planned = [
        next(slot.eta for slot in recording.job.algorithm.plan(entry) if isinstance(slot, SelectionSlot))
        for entry in recording.job.protocol.roster
    ]
    assert recording.etas == planned
    assert planned[0] > 10 * planned[1]
    found = selections.attack(only_run(tmp_path))
    for name, each in (("at_most", 40), ("one_record", 1)):
        bounds = [selection_guess.right_after(eta * each, 2, 2) for eta in planned]
        assert found.facts[name] == pytest.approx(np.mean(bounds, axis=0))
    largest = selection_guess.right_after(planned[0], 2, 2)[-1]
    said = f"with probability at most {largest:.2f} after 2 choices, by counting them: a server that crafts the models may do better."
    assert any(said in text for text in found.sentences), found.sentences


def test_what_holds_no_choices_says_so(recorded, tmp_path):
    with pytest.raises(ConfigError, match="not a run folder"):
        recorded_choices.read_choices(tmp_path)
    shutil.copytree(recorded, tmp_path / "run")
    (tmp_path / "run" / "transcript.msgpack").unlink()
    with pytest.raises(ConfigError, match=r"though its output\.transcript is 'full': it was removed, or"):
        recorded_choices.read_choices(tmp_path / "run")
    (tmp_path / "run" / "transcript.msgpack").touch()
    with pytest.raises(ConfigError, match="no choice of a cluster"):
        recorded_choices.read_choices(tmp_path / "run")
