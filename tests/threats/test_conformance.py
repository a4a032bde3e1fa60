"""`dpcfl conformance` accepts training functions that keep their claim, and finds one mistake in each of the others.

The kit and all functions have fixed seeds here, so that each verdict is repeatable; the false-alarm rate of one report is 8e-7.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import yaml
from cli_cases import call
from conftest import ROOT
from scipy.special import log_ndtr

from dpcfl_net.attacks.conformance import accounting, canary, chances, clipping, kit, noise, page, vectors
from dpcfl_net.attacks.conformance.claim import Claim, read_claim
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.launch.cli import steps
from dpcfl_net.privacy.accounting.accountant import epsilon
from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian

FOREIGN = ROOT / "tests/support/foreign_training.py"
EXAMPLES = ROOT / "docs/examples/conformance"
CLAIM = {
    "epsilon": 6.0, "delta": 1e-5, "sampling": "poisson", "rate": 0.1, "records": 200, "steps": 60, "noise_multiplier": 1.0,
    "clip": 2.0, "learning_rate": 0.5, "accountant": "pld",
}  # fmt: skip


def report_of(name: str, **changes: object) -> kit.Report:
    claim = Claim.model_validate({**CLAIM, **changes})
    return kit.run(f"{FOREIGN}:{name}", claim, kit.Options(seed=1), lambda line: None)


def verdicts(report: kit.Report) -> dict[str, str]:
    return {check.name: check.verdict for check in report.checks}


def refused(report: kit.Report) -> set[str]:
    return {name for name, verdict in verdicts(report).items() if verdict != "pass"}


@pytest.mark.parametrize("name", ["sound", "noisy_only", "end_only", "much_noise", "end_only_much_noise"])
def test_a_function_that_keeps_its_claim_passes_every_check(name):
    report = report_of(name)
    assert refused(report) == set(), page.text(report)
    assert report.exit_code == 0
    assert sum(check.false_alarm for check in report.checks) < 1e-6


@pytest.mark.parametrize(
    ("name", "failing", "words"),
    [
        ("missing_clip", {"clipping", "audit"}, "moved a release by 10,000 clip norms"),
        ("noisy_missing_clip", {"clipping", "audit"}, "further than a clip norm each"),
        ("coordinate_clip", {"clipping"}, "spread-out gradients"),
        ("small_coordinate_clip", {"clipping", "sampling"}, "spread-out gradients"),
        ("fixed_batches", {"sampling"}, "Batches have a fixed size"),
        ("end_only_fixed", {"sampling"}, "Batches have a fixed size"),
        ("dense_batches", {"sampling"}, "(29|30).* records on average, not 20"),
        ("one_batch", {"sampling", "audit"}, "batches repeat"),
        ("sliced_batches", {"sampling"}, "not drawn record by record"),
        ("little_noise", {"noise", "audit"}, r"0\.(69|70)\d of the claimed 0\.05"),
        ("laplace_noise", {"noise"}, "not normal"),
        ("fixed_seed", {"noise"}, "fixed seed"),
        ("known_batches", {"sampling"}, "Two runs have the same batches"),
        ("tensor_clip", {"clipping"}, r"moved a release by 1\.41\d clip norms"),
        ("noisy_tensor_clip", {"clipping"}, "spread-out gradients"),
        ("bare_bias", {"noise"}, "not every coordinate gets its noise"),
        ("end_only_bare_bias", {"noise"}, "not every coordinate gets its noise"),
        ("bare_first", {"noise"}, "not every coordinate gets its noise"),
        ("bare_step", {"noise"}, "not every step gets its noise"),
        ("cut_noise", {"noise"}, r"No noise lies beyond 3\.00 deviations"),
    ],
)
def test_one_mistake_fails_its_own_check(name, failing, words):
    report = report_of(name)
    failed = {check.name for check in report.checks if check.verdict == "fail"}
    assert failed == failing, page.text(report)
    assert re.search(words, " ".join(check.sentence for check in report.checks))
    assert report.exit_code == 3


@pytest.mark.parametrize("name", ["shared_noise", "stuck_noise"])
def test_batches_are_not_judged_through_noise_that_can_be_subtracted(name):
    found = verdicts(report_of(name))
    assert found["noise"] == "fail"
    assert found["sampling"] != "fail"


def test_shuffled_batches_keep_a_claim_of_shuffled_batches_only():
    claims = {"sampling": "shuffle", "epsilon": 20.0}
    assert verdicts(report_of("shuffled_batches", **claims))["sampling"] == "pass"
    assert verdicts(report_of("fixed_batches", **claims))["sampling"] == "fail"
    assert verdicts(report_of("end_only_shuffled", **claims))["sampling"] == "pass"
    assert verdicts(report_of("end_only_fixed", **claims))["sampling"] == "fail"
    assert verdicts(report_of("shuffled_batches"))["sampling"] == "fail"


def test_allocated_batches_keep_a_claim_of_random_allocation_only():
    claims = {"sampling": "allocation", "epsilon": 20.0}
    assert refused(report_of("allocated_batches", **claims)) == set()
    for other in ("sound", "fixed_batches", "shuffled_batches", "allocated_once_batches"):
        assert verdicts(report_of(other, **claims))["sampling"] == "fail", other
    assert verdicts(report_of("end_only_allocated", **claims))["sampling"] == "undecided"
    assert verdicts(report_of("allocated_batches"))["sampling"] == "fail"


def test_the_accounting_compares_with_what_is_provable():
    provable = epsilon([SampledGaussian(1.0, 0.1, 60)], 1e-5)
    for claimed, verdict in ((provable, "pass"), (0.995 * provable, "fail"), (0.9995 * provable, "undecided")):
        (check, *_) = report_of("sound", epsilon=claimed).checks
        assert (check.name, check.verdict) == ("accounting", verdict)


def test_a_claim_up_to_two_percent_below_what_is_provable_is_undecided():
    """Below a bound that shuffling could lower, so that the true epsilon is not known."""
    shuffled = {**CLAIM, "sampling": "shuffle"}
    provable = accounting.provable(Claim.model_validate(shuffled), 60, "zero-out")
    for share, verdict in ((0.981, "undecided"), (0.979, "fail")):
        check = accounting.check(Claim.model_validate({**shuffled, "epsilon": share * provable}))
        assert check.verdict == verdict
        assert "the true value may be as small as" in check.sentence


@pytest.mark.parametrize("sampling", ["shuffle", "allocation"])
@pytest.mark.parametrize(("adjacency", "distance"), [("zero-out", 1), ("replace-one", 2)])
def test_the_least_epsilon_of_batches_of_an_epoch_is_that_of_the_sum_of_all_steps(sampling, adjacency, distance):
    """A record is in the sum once for each of 6 complete epochs; the seventh may have passed it over. 65 steps add noise."""
    claim = Claim.model_validate({**CLAIM, "sampling": sampling, "adjacency": adjacency, "steps": 65, "epsilon": 0.1})
    (least,) = [finding.value for finding in accounting.check(claim).findings if finding.what == "lower bound on epsilon"]
    mu = 6 * distance / 65**0.5
    delta = np.exp(log_ndtr(mu / 2 - least / mu)) - np.exp(least + log_ndtr(-mu / 2 - least / mu))  # Balle and Wang 2018
    assert delta == pytest.approx(1e-5, rel=1e-3)


def test_the_least_epsilon_of_a_fixed_batch_is_that_of_a_record_among_its_opposites():
    """One step, a share q of the records: (1 - q) N(0, z^2) + q N(2, z^2) against N(0, z^2), in clip norms."""
    claim = Claim.model_validate({**CLAIM, "sampling": "fixed", "adjacency": "replace-one", "steps": 1, "epsilon": 0.1})
    (least,) = [finding.value for finding in accounting.check(claim).findings if finding.what == "lower bound on epsilon"]

    def delta(at):
        edge = 1 + np.log((np.exp(at) - 0.9) / 0.1) / 2  # the first density is exp(at) times the second here
        beyond, moved = np.exp(log_ndtr(-edge)), np.exp(log_ndtr(2 - edge))
        return 0.9 * beyond + 0.1 * moved - np.exp(at) * beyond

    assert delta(least) >= 1e-5 > delta(1.02 * least)


def test_a_release_that_ignores_the_records_is_undecided():
    report = report_of("deaf")
    assert refused(report) == {"clipping", "sampling", "audit"}
    assert (report.verdict, report.exit_code) == ("undecided", 4)


def test_too_few_calls_leave_the_sampling_undecided():
    claim = Claim.model_validate({**CLAIM, "noise_multiplier": 1.0})
    report = kit.run(f"{FOREIGN}:end_only_fixed", claim, kit.Options(most_calls=6, seed=1), lambda line: None)
    assert verdicts(report)["sampling"] == "undecided"
    assert "too few" in report.checks[2].sentence
    assert report.calls <= 6


@pytest.mark.parametrize("sampling", ["shuffle", "allocation"])
def test_an_epoch_that_was_begun_counts_as_a_whole(sampling):
    claim = Claim.model_validate({**CLAIM, "sampling": sampling})
    spent = [accounting.provable(claim, steps, "zero-out") for steps in (claim.epoch, claim.epoch + 1, 2 * claim.epoch)]
    assert spent[0] < spent[1] == spent[2]


def test_accounting_of_fixed_batches_needs_the_proof_for_fixed_batches():
    poisson, fixed = (report_of("fixed_batches", sampling=sampling).checks for sampling in ("poisson", "fixed"))
    assert [checks[0].verdict for checks in (poisson, fixed)] == ["pass", "fail"]
    assert [checks[2].verdict for checks in (poisson, fixed)] == ["fail", "pass"]


def test_the_audit_covers_replacement():
    found = report_of("sound", adjacency="replace-one", epsilon=7.92).checks[4]
    assert found.verdict == "pass"
    zero_out = report_of("sound").checks[4]
    assert zero_out.number is not None
    assert found.number is not None
    assert 7.92 > found.number > zero_out.number > 1


def test_an_audit_that_refutes_the_noise_does_not_say_that_it_refutes_a_larger_epsilon():
    found = report_of("little_noise", epsilon=60.0).checks[4]
    assert found.verdict == "fail"
    assert found.number is not None
    assert found.number < 60
    assert "more than the claimed batches and noise, for which epsilon 5.573 is provable: broken by trade-off" in found.sentence
    assert "60" not in found.sentence.split("(")[0]


def test_the_largest_of_several_bounds_of_the_audit_has_the_stated_confidence(monkeypatch):
    asked = []
    real = canary.judge
    monkeypatch.setattr(canary, "judge", lambda *given: asked.append(given[-1]) or real(*given))
    found = report_of("sound").checks[4]
    assert re.search(r"at least \d\.\d+ at 95% confidence by (mu-GDP|tail|guesses) ", found.sentence)
    assert asked == [pytest.approx(0.05 / 3)]


def test_an_audit_without_a_broken_test_says_why_its_bound_is_above_the_claim(monkeypatch):
    monkeypatch.setattr(canary, "LEVEL", 1e-300)
    found = report_of("missing_clip").checks[4]
    assert found.verdict == "pass"
    assert found.number is not None
    assert found.number > CLAIM["epsilon"]
    assert found.sentence.endswith("no test refutes it at a false-alarm rate of 1e-300: use more canaries.")
    assert [finding.broken for finding in found.findings] == [False]


@pytest.fixture
def claim_file(tmp_path) -> Path:
    path = tmp_path / "claim.yaml"
    path.write_text(yaml.safe_dump(CLAIM))
    return path


def test_the_command_prints_a_table_or_json_and_writes_a_page(capsys, tmp_path, claim_file):
    done = call(
        capsys, "conformance", f"{FOREIGN}:missing_clip", claim_file, "--quick", "--seed", 1, "--page", tmp_path / "page.html"
    )
    assert done.code == 3
    assert "THE CLAIM DOES NOT HOLD: clipping, audit." in done.out
    assert re.search(r"\d+ calls of 60 steps", done.out)
    assert "THE CLAIM DOES NOT HOLD: clipping, audit." in (tmp_path / "page.html").read_text()
    claim_file.write_text(
        yaml.safe_dump({**{key: CLAIM[key] for key in CLAIM if key != "learning_rate"}, "release": "updates"})
    )
    done = call(capsys, "conformance", f"{FOREIGN}:updates", claim_file, "--json", "--seed", 3)
    again = call(capsys, "conformance", f"{FOREIGN}:updates", claim_file, "--json", "--seed", 3)
    report = json.loads(done.out)
    assert (done.code, report["verdict"]) == (0, "pass")
    assert [check["name"] for check in report["checks"]] == ["accounting", "clipping", "sampling", "noise", "audit"]
    assert report["checks"] == json.loads(again.out)["checks"]
    assert "Whether runs without a seed have fresh noise was not tested" in report["checks"][3]["sentence"]
    assert "a foreign program may print" in done.err


def test_without_a_seed_the_same_function_fails_for_its_fixed_seed(capsys, claim_file):
    claim_file.write_text(
        yaml.safe_dump({**{key: CLAIM[key] for key in CLAIM if key != "learning_rate"}, "release": "updates"})
    )
    done = call(capsys, "conformance", f"{FOREIGN}:updates", claim_file)
    assert (done.code, "fixed seed" in done.out) == (3, True)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("wrong_shape", "returned weight (3, 4) for 200 columns and 60 steps"),
        ("hidden_part", "complex numbers are released in two parts"),
        ("raises", "raised RuntimeError: no such layer (foreign_training.py, line"),
        ("nothing", "must return a dict of tensors by name, got an empty one"),
        ("not_finite", "error: FUNCTION is "),
        ("needs_more", "unlike labels"),
        ("missing", "has no 'missing'"),
    ],
)
def test_an_adapter_that_cannot_be_used_is_a_sentence(capsys, claim_file, function, words):
    done = call(capsys, "conformance", f"{FOREIGN}:{function}", claim_file)
    assert done.code == 2
    assert words in done.err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rate": 1.5}, "rate is 1.5: must be less than or equal to 1"),
        ({"noise": 1}, "unknown key 'noise'"),
        ({"steps": None}, "steps is null"),
        ({"learning_rate": None}, "learning_rate is missing"),
        ({"sampling": "fixed", "rate": 0.0333}, "must be a whole batch size"),
        ({"sampling": "sometimes"}, "sampling is 'sometimes': must be 'poisson', 'fixed', 'shuffle', 'allocation' or 'full'"),
        ({"sampling": 1}, "sampling is 1: must be 'poisson', 'fixed'"),
        ({"accountant": 3}, "accountant is 3: must be text"),
        ({"sampling": "allocation", "rate": 0.3}, "with `allocation` it must be 1 / the batches of an epoch, such as 0.333333"),
        ({"clip": "one"}, "clip is 'one': must be a valid number"),
        ({"release": "updates"}, "learning_rate is 0.5: `release: updates` takes none"),
        ({"rate": 1.0}, "rate is 1 with `sampling: poisson`: must be 1 with `full`, and only there"),
        ({"sampling": "full"}, "rate is 0.1 with `sampling: full`: must be 1 with `full`, and only there"),
        ({"sampling": "shuffle", "rate": 0.0333}, "must be a whole batch size"),
        ({"sampling": "shuffle", "rate": 0.15}, "with `shuffle` an epoch must be a whole number of batches"),
        ({"rate": 0.004}, "rate is 0.004: rate * records is 0.8, must be at least 1"),
        ({"nois_multiplier": 1.0}, "unknown key 'nois_multiplier'; did you mean 'noise_multiplier'?"),
        ({"colour": 1}, "unknown key 'colour': must be one of epsilon, delta, adjacency"),
    ],
)
def test_a_bad_claim_names_field_and_value(tmp_path, change, words):
    path = tmp_path / "claim.yaml"
    path.write_text(yaml.safe_dump({**CLAIM, **change}))
    with pytest.raises(ConfigError) as error:
        read_claim(path)
    assert words in str(error.value)


def test_a_claim_that_is_no_mapping_is_refused(tmp_path):
    path = tmp_path / "claim.yaml"
    path.write_text("- epsilon\n")
    with pytest.raises(ConfigError, match=r"claim\.yaml must hold keys and values, such as epsilon: 3, got \['epsilon'\]"):
        read_claim(path)


@pytest.mark.parametrize(
    ("change", "batch", "epoch"),
    [
        ({"sampling": "fixed", "rate": 0.005}, 1, 200),
        ({"rate": 0.005}, 1, 200),
        ({"rate": 0.3}, 60, 3),  # only batches that share an epoch must fill it
        ({"sampling": "fixed", "rate": 0.3}, 60, 3),
        ({"sampling": "shuffle"}, 20, 10),
        ({"sampling": "allocation"}, 20, 10),
        ({"sampling": "full", "rate": 1, "clip": 2}, 200, 1),  # whole numbers where a fraction is allowed
    ],
)
def test_a_claim_has_the_batches_and_epochs_of_its_rate(tmp_path, change, batch, epoch):
    path = tmp_path / "claim.yaml"
    path.write_text(yaml.safe_dump({**CLAIM, **change}))
    found = read_claim(path)
    assert (found.batch, found.epoch) == (batch, epoch)


def test_a_release_moves_by_the_clip_norm_times_learning_rate_over_divisor():
    updates = {"release": "updates", "learning_rate": None}
    for change, moved in (({}, 2 * 0.5 / 20), ({"divisor": 4.0}, 2 * 0.5 / 4), (updates, 2 / 20)):
        assert Claim.model_validate({**CLAIM, **change}).unit_of_release == pytest.approx(moved)


def test_a_file_without_a_function_is_refused_with_the_form_of_the_argument(capsys, tmp_path):
    (tmp_path / "claim.yaml").write_text(yaml.safe_dump(CLAIM))
    done = call(capsys, "conformance", "missing_clip.py", tmp_path / "claim.yaml")
    assert done.code == 2
    assert done.err == "error: FUNCTION is 'missing_clip.py': add the function to the file, as path/to/file.py:function\n"


@pytest.mark.parametrize("arguments", [(), ("x:y", "claim.yaml", "--vectors", "v.json"), ("--accounting", "v.json", "--quick")])
def test_arguments_that_do_not_belong_together_are_refused(capsys, arguments):
    done = call(capsys, "conformance", *arguments)
    assert done.code == 2
    assert "give" in done.err or "are for" in done.err


def test_a_function_without_its_claim_is_refused(capsys):
    done = call(capsys, "conformance", "x:y")
    assert (done.code, done.err) == (
        2,
        "error: FUNCTION given: give FUNCTION and CLAIM, or --accounting FILE, or --vectors FILE\n",
    )


def test_answers_of_another_accountant_are_judged_by_bounds(capsys, tmp_path):
    vector = next(each for each in vectors.reference() if each.name == "one Gaussian")
    document = vectors.document([vector])
    (entry,) = document["vectors"]
    assert 4.37 < entry["epsilon_lower"] < 4.3771 < entry["epsilon_upper"] < 4.38  # Balle and Wang 2018
    path = tmp_path / "vectors.json"
    for answer, code, words in ((4.3, 3, "too small"), (4.377, 0, "tight"), (6.0, 0, "1.37 times"), (None, 2, "fill in")):
        path.write_text(json.dumps({**document, "vectors": [{**entry, "epsilon": answer}]}))
        done = call(capsys, "conformance", "--accounting", path)
        assert done.code == code
        assert words in done.out + done.err
    path.write_text(json.dumps({**document, "vectors": [{**entry, "delta": 2, "epsilon": 1}]}))
    done = call(capsys, "conformance", "--accounting", path)
    assert (done.code, "delta must lie strictly between 0 and 1, got 2" in done.err) == (2, True)


def test_vectors_are_computed_below_a_clock_and_told_as_one_json_document(capsys, monkeypatch, tmp_path):
    vector = next(each for each in vectors.reference() if each.name == "one Gaussian")
    monkeypatch.setattr(vectors, "reference", lambda: [vector])
    shown: list[bool] = []

    @contextmanager
    def computing(what: str) -> Iterator[None]:
        shown.append(True)
        yield
        shown.pop()

    def bounds(self: vectors.Vector) -> tuple[float, float]:
        assert shown  # this is what takes the time
        return 1.0, 2.0

    monkeypatch.setattr(steps, "computing", computing)
    monkeypatch.setattr(vectors.Vector, "bounds", bounds)
    done = call(capsys, "conformance", "--vectors", tmp_path / "vectors.json", "--json")
    assert (done.code, json.loads(done.out)) == (0, {"file": str(tmp_path / "vectors.json"), "vectors": 1})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "failing"),
    [("opacus_poisson", set()), ("opacus_fixed_batch", {"sampling"}), ("missing_clip", {"clipping", "audit"})],
)
def test_the_documented_programs_have_the_documented_verdicts(name, failing):
    report = kit.run(f"{EXAMPLES}/{name}.py:train", read_claim(EXAMPLES / "claim.yaml"), kit.Options(), lambda line: None)
    assert refused(report) == failing, page.text(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sampling"),
    [("sound", "poisson"), ("fixed_batches", "fixed"), ("shuffled_batches", "shuffle"), ("allocated_batches", "allocation")],
)
def test_each_limit_is_broken_no_more_often_than_stated(monkeypatch, name, sampling):
    """At a level of 0.02, 60 sound runs break one test more than 12 times with probability below 2e-9."""
    for module in (chances, clipping, noise, canary):
        monkeypatch.setattr(module, "LEVEL", 0.02)
    claim, broken = Claim.model_validate({**CLAIM, "sampling": sampling, "epsilon": 1e6}), Counter()
    monkeypatch.setattr(np.random, "default_rng", continued(np.random.default_rng(7)))
    for _ in range(60):
        report = kit.run(f"{FOREIGN}:{name}", claim, kit.Options(), lambda line: None)
        broken.update(finding.what for check in report.checks for finding in check.findings if finding.broken)
    assert max(broken.values()) <= 12, broken
    assert len(broken) > 3  # the level is in use


def continued(source: np.random.Generator) -> Callable[..., np.random.Generator]:
    """Generators with seeds from one source, for any seed that is asked for."""
    make = np.random.default_rng
    return lambda seed=None: make(source.integers(2**31))


@pytest.mark.slow
def test_all_reference_vectors_have_close_bounds(capsys, tmp_path):
    done = call(capsys, "conformance", "--vectors", tmp_path / "vectors.json")
    assert done.code == 0
    entries = json.loads((tmp_path / "vectors.json").read_text())["vectors"]
    assert len(entries) == 2 * len(vectors.CASES)
    for entry in entries:
        assert 0.995 * entry["epsilon_upper"] < entry["epsilon_lower"] < entry["epsilon_upper"], entry
