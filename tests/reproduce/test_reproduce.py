"""Figures computed again: the frame, the accountant's slopes, and first rounds that are those of a real run."""

from __future__ import annotations

import csv
import json
import math

import numpy as np
import pytest
from conftest import ROOT, SMALL, dpcfl
from simulate import simulate
from sklearn.mixture import GaussianMixture

from dpcfl_net.clustering import mixture
from dpcfl_net.clustering.gram import centred_gram, coordinates
from dpcfl_net.core.errors import ConfigError, RunFailed
from dpcfl_net.data.partition import open_set, plan_slices
from dpcfl_net.experiment.build import make_job
from dpcfl_net.experiment.config import resolve
from dpcfl_net.launch.cli import reproduce
from dpcfl_net.privacy.randomness import derive
from dpcfl_net.reproduce import (
    lone_clients,
    m_unknown,
    r_dpcfl_batches,
    r_dpcfl_centres,
    r_dpcfl_clusters,
    r_dpcfl_iterations,
    r_dpcfl_noise,
    rules,
)
from dpcfl_net.reproduce.base import Reproduction, ReproductionResult, find, registry
from dpcfl_net.reproduce.claims import Cause, Claim, Comparison, Exact, judge
from dpcfl_net.reproduce.first_rounds import GradientBank, configuration, keys, noise_of_run
from dpcfl_net.reproduce.plots import lines, points, slope
from dpcfl_net.reproduce.r_dpcfl_noise import TrainingSchedule, noise_multiplier, update_variance
from dpcfl_net.results.tables import Table
from dpcfl_net.transport.keys import make_keys


class Example(Reproduction):
    """Three claims: one holds, one does not, and one has one seed."""

    name = "example/fig1"
    paper = "A paper, Figure 1"
    title = "An example"

    def compute(self, context):
        context.say("computing")
        claims = [
            Claim("up", "1 to 2", Exact(True), Cause("unused")),
            Claim("down", "1 to 2", Exact(False), Cause("it goes up")),
            Claim("much", "2.0", [Comparison({0: 2.0}, 0.5)]),
        ]
        figure = lines("one", "One line", {"a": [(1, 1), (2, 2)]}, "x", "y")
        table = Table("A table", ["a"], [["42"]])
        return ReproductionResult([{"a": 1}, {"a": 2, "b": None}], claims, [figure], [table], ["A note."])


@pytest.fixture
def example(monkeypatch):
    monkeypatch.setattr(reproduce, "find", {Example.name: Example}.__getitem__)
    return Example.name


def test_a_figure_leaves_rows_claims_and_a_page(example, tmp_path, capsys):
    reproduce.reproduce([example], "laptop", tmp_path)
    folder = tmp_path / "example-fig1-laptop"
    assert list(csv.DictReader((folder / "data.csv").open())) == [{"a": "1", "b": ""}, {"a": "2", "b": ""}]
    document = json.loads((folder / "claims.json").read_text())
    assert (document["name"], document["scale"], document["notes"]) == ("example/fig1", "laptop", ["A note."])
    assert [claim["verdict"] for claim in document["claims"]] == ["holds", "does not hold", "undecided"]
    assert document["claims"][2]["comparisons"][0]["values"] == {"0": 2.0}
    page = (folder / "report.html").read_text()
    assert all(words in page for words in ("An example", "A paper, Figure 1", "it goes up", "One line", "42", "A note."))
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "computing"
    assert said[-3:] == [
        "claim: up; measured: 1 to 2; verdict: holds (exact)",
        "claim: down; measured: 1 to 2; verdict: does not hold (exact); cause: a guess: it goes up",
        "claim: much; measured: 2.0; verdict: undecided (2 points, margin 0.5, 1 seed)",
    ]


def test_every_figure_is_named_described_and_found():
    done = dpcfl("reproduce", "--list")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines() if "/" in line.partition("  ")[2].split(" ")[0]] == sorted(
        registry()
    )
    assert {"r-dpcfl/fig3", "r-dpcfl/fig13", "r-dpcfl/m-unknown"} <= set(registry())
    for name, found in registry().items():
        assert find(name) is found
        assert found.paper
        assert found.title


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["r-dpcfl/fig33"], "did you mean 'r-dpcfl/fig3'?"),
        (["zzz"], "known are"),
        (["r-dpcfl/fig3", "--scale", "huge"], "must be laptop or paper"),
        ([], "--list"),
    ],
)
def test_a_users_mistake_is_a_sentence(arguments, words):
    done = dpcfl("reproduce", *arguments)
    assert done.returncode == ConfigError.exit_code
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_nothing_is_computed_if_one_of_several_names_is_wrong(tmp_path):
    with pytest.raises(ConfigError):
        reproduce.reproduce(["r-dpcfl/fig3", "nothing"], "laptop", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_context_hands_out_finished_runs_and_names_those_that_failed(tmp_path, monkeypatch):
    from dpcfl_net.launch import sweeps
    from dpcfl_net.results import result

    asked = []

    def run_cells(cells, store, say, **options):
        asked.extend((cell.seed, cell.privacy.epsilon, cell.local.lr) for cell in cells)
        states = ["finished"] * 3 + ["finished" if len(asked) == 4 else "failed"]
        return [sweeps.CellOutcome(store / str(k), state, False, 0.0, "burnt") for k, state in enumerate(states)]

    monkeypatch.setattr(sweeps, "run_cells", run_cells)
    monkeypatch.setattr(result, "read_result", lambda folder: folder.name)
    context = reproduce.RunContext("laptop", tmp_path, tmp_path / "store")
    axes = {"seed": [0, 1], "privacy.epsilon": [3, 5.5], "local.lr": [1e-5]}
    config = ROOT / "configs" / "quickstart.yaml"
    assert context.finished([(config, axes)]) == [["0", "1", "2", "3"]]
    assert asked == [(0, 3, 1e-5), (0, 5.5, 1e-5), (1, 3, 1e-5), (1, 5.5, 1e-5)]
    with pytest.raises(RunFailed, match="burnt"):
        context.finished([(config, axes)])


def test_the_slope_of_a_power_law():
    assert slope([(x, 7 * x**-2.5) for x in (1, 2, 8, 30)]) == pytest.approx(-2.5)


def test_the_noise_of_an_update_is_equation_2():
    plan = TrainingSchedule(6600, 6600, 32, 200, 5)
    setting = r_dpcfl_noise.Variance.setting
    assert slope([(b, update_variance(plan, b, 1.0, **setting)) for b in (16, 64, 512)]) == pytest.approx(-3, abs=0.02)
    assert update_variance(plan, 6600, 2.0, **setting) == pytest.approx((5e-4 * 3 * 2 / 6600) ** 2 * 11_181_642)


def test_noise_follows_both_batch_sizes_as_figure_4_says():
    grid = {key: noise_multiplier(plan) for key, plan in r_dpcfl_noise.grid((32, 6600), (32, 128)).items()}
    assert grid[6600, 32] == pytest.approx(1.31036, rel=1e-3)
    later = grid[6600, 128] / grid[6600, 32]
    first = grid[6600, 32] / grid[32, 32]
    assert 1 < first < later < 4  # four times the batch, less than four times the noise


SEEDED = {
    **SMALL,
    "seed": 3,
    "data": {**SMALL["data"], "train_per_client": 120},
    "local": {"batch_size": 32, "lr": 0.2},
    "privacy": {**SMALL["privacy"], "accountant": "rdp"},
}


def test_a_first_round_is_that_of_a_real_run_bit_for_bit(tmp_path, monkeypatch):
    config = resolve(SEEDED)
    make_keys(tmp_path / "keys", 8)
    job = make_job(config, tmp_path / "keys")
    seen = []
    monkeypatch.setattr(
        mixture, "fit", lambda updates, **options: seen.append(updates) or (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        simulate(job, tmp_path / "run")

    first = GradientBank(config).full_batch()
    noise = noise_of_run(config)
    assert {entry.noise_multiplier for entry in job.protocol.roster} == {noise}
    secret = bytes.fromhex(job.experiment.noise_seed)
    client_of = {piece: client for client, piece in enumerate(job.experiment.slices)}
    charges = [derive(secret, "charge", client_of[k], 1, "first_round_update", "first") for k in range(8)]
    mine = first.updates(noise, [derive(charge, "slot", "first") for charge in charges])
    assert first.truth == [job.experiment.true_clusters[client_of[k]] for k in range(8)]
    assert np.array_equal(mine, seen[0][[client_of[k] for k in range(8)]])


def test_the_noise_of_a_first_round_has_the_deviation_that_is_stated():
    first = GradientBank(resolve(SEEDED)).full_batch()
    one, other = (first.updates(3.0, keys(8, "noise", k)) for k in range(2))
    assert (one - other).std() / math.sqrt(2) == pytest.approx(first.deviation(3.0), rel=0.02)
    assert np.array_equal(one, first.updates(3.0, keys(8, "noise", 0)))


def test_a_stochastic_round_at_full_batch_is_the_full_batch():
    kept = GradientBank(resolve(SEEDED))
    first = kept.full_batch()
    assert np.array_equal(kept.stochastic(first.records, 2.0, keys(8, 0)), first.updates(2.0, keys(8, 0)))
    small = kept.stochastic(32, 1e-6, keys(8, 0))
    steps = math.ceil(first.records / 32)
    assert np.linalg.norm(small) == pytest.approx(steps * np.linalg.norm(first.updates(1e-6, keys(8, 0))), rel=0.3)


def test_other_clusters_from_one_bank_are_those_of_their_own_configuration():
    kept = GradientBank(resolve(SEEDED))
    other = resolve({**SEEDED, "data": {**SEEDED["data"], "clients": [5, 4], "shift": "label-flip"}})
    kept.full_batch()
    assert np.array_equal(kept.full_batch([5, 4], "label-flip").sums, GradientBank(other).full_batch().sums)
    assert kept.full_batch([5, 4], "label-flip").truth == [0] * 5 + [1] * 4


def test_the_compared_rule_is_the_one_that_runs_use(monkeypatch):
    monkeypatch.setattr(rules, "MOST", 4)
    kept = GradientBank(resolve(SEEDED))
    told = set()
    for k, (clients, noise) in enumerate([([8], 0.2), ([4, 4], 0.2), ([3, 3, 3], 0.2), ([3, 3, 3], 20.0)]):
        first = kept.full_batch(clients)
        x = first.updates(noise, keys(len(first.truth), k))
        evidence = rules.RoundEvidence.at(x, first.deviation(noise), k)
        options = {"clusters": None, "max_clusters": 4, "seed": k}
        assert rules.known_noise(evidence) == mixture.fit(x, noise_deviation=first.deviation(noise), **options).clusters
        assert rules.largest_fall(evidence) == mixture.fit(x, **options).clusters
        told.add(rules.known_noise(evidence))
    assert len(told) > 1


def test_rules_that_can_tell_find_two_clusters_and_none(monkeypatch):
    small = rules.null(8, 400, 20)
    monkeypatch.setattr(rules, "null", lambda rows, dimension: small)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 400)).astype(np.float32)
    alone = rules.RoundEvidence.at(x, 1.0, 0)
    x[:4] += 3
    apart = rules.RoundEvidence.at(x, 1.0, 0)
    for tell in (rules.known_noise, rules.largest_fall, rules.directions, rules.above_null, rules.gap):
        assert (tell(apart), tell(alone)) == (2, 1), tell.__name__
    assert rules.largest_plain(apart) == 2
    assert 2 <= rules.published(alone) <= 4  # it cannot say that there are none


def test_the_smallest_bic_is_that_of_scikit_learn():
    """64 points in 8 dimensions, in two groups: at the first distance one parameter fewer for each cluster would choose two."""
    told = []
    for distance in (2.66, 2.8, 6.0):
        x = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
        x[:32, 0] += distance
        points = coordinates(centred_gram(x))[:, :8]
        evidence = rules.RoundEvidence(x, points, {}, None, 8, 1.0, 0)
        found = [GaussianMixture(m, covariance_type="spherical", n_init=10, random_state=0).fit(points) for m in (1, 2, 3)]
        bic = [one.bic(points) for one in found]
        assert rules.bayes(evidence) == 1 + int(np.argmin(bic))
        told.append(round(bic[1] - bic[0], 1))
    assert np.log(64) > told[0] > 0 > told[1] > told[2]


@pytest.fixture
def digits(monkeypatch):
    """First-round figures on handwritten digits: seconds instead of minutes. Returns a way to compute one."""

    def setting(scale, seed, *, epsilon=10.0, records=100):
        return configuration("digits", records or 100, seed, epsilon=epsilon)

    for module in (r_dpcfl_batches, r_dpcfl_iterations, r_dpcfl_centres, r_dpcfl_clusters):
        monkeypatch.setattr(module, "setting", setting)
    sizes = [GradientBank(setting("laptop", 0, records=records)).full_batch() for records in (70, 100)]
    monkeypatch.setattr(r_dpcfl_iterations, "rounds_of_two_sizes", lambda scale, seed: sizes)
    monkeypatch.setitem(r_dpcfl_clusters.GROUPS, "laptop", [r_dpcfl_clusters.Group("digits", 100, range(1), (3, 30))])
    monkeypatch.setattr(r_dpcfl_centres.Centres, "prices", lambda self: {5: [(16, 1.5), (32, 2.6)]})
    monkeypatch.setitem(
        m_unknown.PARTS, "laptop", [m_unknown.Setup("digits", 100, range(1), [("rotation", [8]), ("rotation", [4, 4])])]
    )
    monkeypatch.setitem(m_unknown.EPSILONS, "laptop", (5, 50))
    small = rules.null(8, 6090, 5)
    monkeypatch.setattr(rules, "null", lambda rows, dimension: small)

    class Quiet:
        scale, say, asked_seeds = "laptop", staticmethod(lambda line: None), 2
        seeds = staticmethod(lambda usual: usual[:2])

    return lambda name: registry()[name]().compute(Quiet())


def test_picture_figures_have_every_client_and_a_verdict(digits):
    outcome = digits("r-dpcfl/fig5")
    assert len(outcome.rows) == 2 * 2 * 21  # seeds, panels, clients
    assert outcome.claims[0].seeds == 2
    assert len(outcome.figures) == 2
    outcome = digits("r-dpcfl/fig8")
    z = [row["z"] for row in outcome.rows if row["seed"] == 0]
    assert z == sorted(z)
    by_text = {one.claim.text: one for one in outcome.judged()}
    assert by_text["the noise multiplier grows with b>1"].verdict == "holds"
    scatter = by_text["updates scatter further around their clusters as b>1 grows"].claim.comparisons
    assert all(value > 0 for step in scatter for value in step.values.values())


def test_centres_draw_together_and_a_price_above_the_papers_is_said_to_be(digits):
    close, price = digits("r-dpcfl/fig14").claims
    assert all(value >= one.margin for one in close.comparisons for value in one.values.values())
    assert (price.evidence, price.measured) == (Exact(False), "largest ratio 2.600")


@pytest.mark.parametrize("name", ["r-dpcfl/fig5", "r-dpcfl/fig14"])
def test_seeds_draw_batches_of_their_own(digits, monkeypatch, name):
    """Batches of the same sizes would move the updates of all seeds alike, and their interval would be too short."""
    used: list[bytes] = []

    def recorded(self, batch, noise, given):
        used.extend(given)
        return np.zeros((len(given), self.theta.size), np.float32) + np.arange(len(given))[:, None].astype(np.float32)

    monkeypatch.setattr(GradientBank, "stochastic", recorded)
    digits(name)
    assert len(set(used)) == len(used) >= 2 * 21


@pytest.mark.slow
def test_iterations_number_and_recovery_are_computed_in_every_space(digits):
    outcome = digits("r-dpcfl/fig9")
    assert {row.get("space") for row in outcome.rows} == {*r_dpcfl_iterations.SPACES, None}
    assert all(row["iterations"] >= 1 for row in outcome.rows if row["panel"] == "left")
    outcome = digits("r-dpcfl/fig10")
    assert len(outcome.rows) == 2 * 4 * len(r_dpcfl_clusters.WAYS) * len(r_dpcfl_clusters.CANDIDATES)
    outcome = digits("r-dpcfl/fig13")
    assert {row["space"] for row in outcome.rows} == set(mixture.SPACES)
    assert len(outcome.claims) == len(outcome.tables[0].rows) == len(r_dpcfl_clusters.SCORES)


def test_a_threshold_and_a_verdict_on_mss():
    pairs = [(1.0, False), (2.2, False), (2.5, True), (9.0, True)]
    assert r_dpcfl_clusters.threshold(pairs) == (pytest.approx(2.35), 0)
    assert r_dpcfl_clusters.threshold([(1.0, False), (3.0, False)]) == (3.0, 0)  # no MSS means that the clusters were found
    rounds = [(f"seed {k % 2}", mss, right) for k, (mss, right) in enumerate(pairs)]
    (compared,) = r_dpcfl_clusters.above_two("x", rounds, "why").comparisons
    assert compared.values == {"seed 0": 1.0, "seed 1": 0.5}
    assert judge([r_dpcfl_clusters.above_two("x", rounds[:1], "why")])[0].verdict == "not tested"  # nothing above 2


def test_rounds_of_one_seed_share_model_and_records_at_every_size_and_count_as_one_unit():
    small, large = (GradientBank(configuration("digits", records, 0)) for records in (40, 60))
    assert (small.theta == large.theta).all()
    rows = [cluster_rows(configuration("digits", records, 0).data) for records in (40, 60)]
    assert all(few < many for few, many in zip(*rows, strict=True))
    rounds = [{"dataset": "digits", "records": records, "seed": seed} for records in (40, 60) for seed in (0, 1)]
    assert {r_dpcfl_clusters.independent_unit(row) for row in rounds} == {"digits, seed 0", "digits, seed 1"}


def cluster_rows(data):
    """Training rows of each cluster's clients."""
    found = {}
    for piece in plan_slices(data, open_set(data, data.root), seed=7):
        found.setdefault(piece.cluster, set()).update(piece.train_rows.tolist())
    return found.values()


def test_the_study_counts_rules_by_clusters_that_can_be_found(digits):
    outcome = digits("r-dpcfl/m-unknown")
    assert [(row["clients"], row["epsilon"]) for row in outcome.rows] == [("8", 5), ("8", 50), ("4+4", 5), ("4+4", 50)]
    assert all(isinstance(row[rule], int) for row in outcome.rows for rule in rules.RULES)
    alone = outcome.claims[-1]
    assert alone.comparisons[0].values == {"digits, seed 0": 1.0}
    assert alone.measured.startswith("2 of 2")
    assert outcome.tables[0].rows[-1][:2] == ["all", "4"]


@pytest.mark.slow
def test_the_study_of_lone_clients_compares_fits_before_and_after(monkeypatch):
    for name, value in (("DATASET", "digits"), ("RECORDS", {"laptop": 100}), ("EPSILONS", {"laptop": (5, 1e4)})):
        monkeypatch.setattr(lone_clients, name, value)
    setting = lone_clients.LoneSetting
    monkeypatch.setattr(lone_clients, "SETTINGS", (setting("rotation", (1, 4, 4)), setting("rotation", (4, 4), (1,))))

    class Quiet:
        scale, say, asked_seeds = "laptop", staticmethod(lambda line: None), 2
        seeds = staticmethod(lambda usual: range(2))

    outcome = lone_clients.LoneClients().compute(Quiet())
    assert [(row["clients"], row["few"], row["epsilon"]) for row in outcome.rows[:4]] == [
        ("1+4+4", "", 5), ("1+4+4", "", 1e4), ("4+4", "1", 5), ("4+4", "1", 1e4),
    ]  # fmt: skip
    assert {row["seed"] for row in outcome.rows} == {0, 1}
    assert all(row["no_false"] for row in outcome.rows)
    assert [len(table.rows) for table in outcome.tables] == [4, 4]
    (false,) = [claim for claim in outcome.claims if "have company" in claim.text]
    assert false.measured == "8 of 8"


def test_points_and_lines_are_figures_of_the_page():
    figure = points("p", "Points", {"a": [(0, 1)], "b": [(2, 3)]}, "x", "y", equal=True)
    assert [trace["name"] for trace in figure.spec["data"]] == ["a", "b"]
    assert figure.spec["layout"]["yaxis"]["scaleanchor"] == "x"
    assert lines("l", "Lines", {"a": [(1, 1)]}, "x", "y", log_x=True).spec["layout"]["xaxis"]["type"] == "log"
