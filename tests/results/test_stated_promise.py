"""`dpcfl verify` compares the privacy statement in run.json with the signed job and the ledgers."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

import dpcfl_net as dpcfl
from dpcfl_net.launch.cli.run import report
from dpcfl_net.results.verify import Check, verify_run

WHAT = "run.json states the promise of the signed job"


def stated(folder: Path) -> Check:
    """The check of the statement; all others hold, or have nothing to check."""
    checks = verify_run(folder)
    assert [check.what for check in checks if check.holds is False and check.what != WHAT] == []
    (found,) = [check for check in checks if check.what == WHAT]
    return found


def changed(run: dpcfl.Run, folder: Path, privacy: dict[str, Any], **more: Any) -> Path:
    """A copy of a run with another statement."""
    shutil.copytree(run.path, folder)
    document = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**document, "privacy": {**document["privacy"], **privacy}, **more}))
    return folder


@pytest.mark.parametrize(
    ("privacy", "said"),
    [
        ({"epsilon": 0.5}, "epsilon: 0.5 here, 5.0 by the job"),
        ({"epsilon": None}, "epsilon: – here, 5.0 by the job"),
        ({"delta": 1e-9}, "delta: 1e-09 here, 0.0001 by the job"),
        ({"unit": "client"}, "unit: client here, sample by the job"),
        ({"adjacency": "replace-one"}, "adjacency: replace-one here, zero-out by the job"),
        ({"trust": "secure-aggregation"}, "trust: secure-aggregation here, untrusted-server by the job"),
        ({"ledger_scope": "dataset"}, "ledger_scope: dataset here, run by the job"),
        ({"noise_multiplier": {"min": 9.0, "max": 9.0}}, "noise_multiplier: "),
        ({"epsilon_by_client": {"min": 1.0, "max": 5.0}}, "epsilon_by_client: "),
        ({"secure_sums": {"colluders": 3}}, "secure_sums.colluders: 3 here, – by the job"),
        ({"secure_sums": {"single_releases": True}}, "secure_sums.single_releases: true here, false by the job"),
        ({"validation_records": True}, "validation_records: true here, false by the job"),
        ({"epsilon_spent": 0.3}, "epsilon_spent: 0.3 here, "),
        ({"epsilon_replace_one": 5.1}, "epsilon_replace_one: 5.1 here, "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_promise_than_that_of_the_job_is_noticed(with_epsilon: dpcfl.Run, tmp_path: Path, privacy, said) -> None:
    """Pages, exports and comparisons showed it, and every check held."""
    folder = changed(with_epsilon, tmp_path / "run", privacy)
    found = stated(folder)
    assert (found.holds, found.detail.startswith(said)) == (False, True), found.detail
    report(folder)
    assert stated(folder).holds is True


def test_the_statement_of_a_run_holds(with_epsilon: dpcfl.Run, by_network: dpcfl.Run, tmp_path: Path) -> None:
    assert stated(with_epsilon.path).holds is True
    assert stated(by_network.path).holds is True, "seeded: no epsilon"
    finite = changed(by_network, tmp_path / "finite", {"epsilon": 5.0})
    assert stated(finite).detail == "epsilon: 5.0 here, – by the job"
    finite = changed(by_network, tmp_path / "replaced", {"epsilon_replace_one": 10.9})
    assert stated(finite).detail == "epsilon_replace_one: 10.9 here, – by job and ledgers"


def test_what_a_run_without_a_guarantee_has_spent_is_not_finite(by_network: dpcfl.Run, tmp_path: Path) -> None:
    """The epsilon of the noisy part alone held, and pages showed it as the epsilon spent."""
    assert json.loads((by_network.path / "run.json").read_text())["privacy"]["epsilon_spent"] is None
    found = stated(changed(by_network, tmp_path / "run", {"epsilon_spent": 5.0}))
    assert (found.holds, found.detail) == (False, "epsilon_spent: 5.0 here, – by job and ledgers")


def test_what_is_spent_before_the_first_release_without_a_guarantee_is_not_finite(tmp_path: Path) -> None:
    """Earlier releases decide if that release comes, as the number of clusters that rc-dpfl finds."""
    document = {
        "name": "early", "rounds": 3, "data": {"dataset": "digits", "clients": [1, 1], "train_per_client": 40},
        "model": "linear", "local": {"batch_size": 20}, "privacy": {"epsilon": 5, "delta": 1e-3}, "algorithm": "rc-dpfl",
    }  # fmt: skip
    run = dpcfl.run(document, tmp_path / "runs", "in-process", callbacks=[lambda metrics: False], progress=False)
    assert [event.unprotected for event in run.events(0)] == [""]
    assert (run.privacy.epsilon, run.privacy.epsilon_spent) == (math.inf, math.inf)
    assert [client.epsilon_spent for client in run.clients()] == [None, None]
    assert [metrics.epsilon_spent for metrics in run.rounds] == [None]
    finite = changed(run, tmp_path / "finite", {"epsilon_spent": 5.0}, state="finished")
    assert stated(finite).detail == "epsilon_spent: 5.0 here, – by job and ledgers"


def test_what_is_not_known_yet_is_no_difference(with_epsilon: dpcfl.Run, tmp_path: Path) -> None:
    """A launcher that was killed leaves it, and clients of a run that goes on charge more than it says."""
    unknown = {"epsilon_spent": None, "epsilon_replace_one": None}
    assert stated(changed(with_epsilon, tmp_path / "unknown", unknown)).holds is True
    assert stated(changed(with_epsilon, tmp_path / "on", {"epsilon_spent": 0.3}, state="interrupted")).holds is True


def test_a_run_without_a_statement_has_nothing_to_compare(with_epsilon: dpcfl.Run, tmp_path: Path) -> None:
    folder = changed(with_epsilon, tmp_path / "run", {})
    (folder / "run.json").unlink()
    assert stated(folder) == Check(WHAT, None, "not checked: there is no run.json")
    (folder / "run.json").write_text("{")
    assert stated(folder).holds is False


def test_a_damaged_configuration_is_a_check_that_fails_also_without_a_transcript(
    with_epsilon: dpcfl.Run, tmp_path: Path
) -> None:
    """It ended the command before any check."""
    assert not (with_epsilon.path / "transcript.msgpack").exists()
    folder = Path(shutil.copytree(with_epsilon.path, tmp_path / "run"))
    whole = {check.what: check.holds for check in verify_run(folder)}
    config = (folder / "config.yaml").read_text()
    other_option, no_name = (config.replace("  name: dp-ifca", line) for line in ("  x: 1\n  name: dp-ifca", "  x: 1"))
    for damage in (config.replace("ledger:", "book:"), "x: [", other_option, no_name, None):
        (folder / "config.yaml").unlink()
        if damage is not None:
            (folder / "config.yaml").write_text(damage)
        found = {check.what: check.holds for check in verify_run(folder)}
        unknown = {
            "config.yaml is the configuration of the signed job": None if damage is None else False,
            "transcript: hash chain whole": None if damage in (other_option, no_name) else False,
        }
        assert (found, {key: whole[key] for key in unknown}) == (
            {**whole, **unknown},
            dict(zip(unknown, (True, None), strict=True)),
        )
