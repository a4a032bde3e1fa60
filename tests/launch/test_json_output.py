"""`--json`: one document on stdout and nothing else, with documented keys; NaN and infinity are null."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cli_cases import call
from conftest import write_config

from dpcfl_net.launch.cli.json_output import messages_to_stderr, print_json
from dpcfl_net.launch.sweeps import Sweep

TINY = {
    "data": {"dataset": "digits", "clients": [1, 1], "train_per_client": 100, "test_per_client": 20},
    "rounds": 2, "algorithm": "global", "runtime": {"federation": "in-process"}, "output": {},
}  # fmt: skip


def document(capsys, *arguments, code: int = 0):
    """The only line on stdout, as JSON."""
    done = call(capsys, *arguments, "--json")
    assert done.code == code, done.err
    (line,) = done.out.splitlines()
    return json.loads(line, parse_constant=pytest.fail)


def test_values_without_json_become_null_numbers_or_text(capsys):
    print_json({"a": float("inf"), "b": [float("nan"), np.float32("nan")], "c": (1, np.int64(2)), "d": Path("x")})
    assert capsys.readouterr().out == '{"a": null, "b": [null, null], "c": [1, 2], "d": "x"}\n'


@pytest.mark.parametrize(
    ("wanted", "quiet", "out", "err"), [(True, False, "", "said\n"), (False, False, "said\n", ""), (True, True, "", "")]
)
def test_messages_leave_stdout_to_the_document(capsys, wanted, quiet, out, err):
    with messages_to_stderr(wanted, quiet) as stdout:
        print("said")
        print("document", file=stdout)
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == (out + "document\n", err)


def test_a_run_is_verified_and_inspected(capsys, by_network):
    verified = document(capsys, "verify", by_network.path)
    assert verified["holds"] is True
    assert {"check", "holds", "detail"} == set(verified["checks"][0])
    seen = document(capsys, "inspect", by_network.path, "--round", 1, "--client", 0, "--limit", 1)
    assert (seen["trust"], seen["cut"]) == ("untrusted-server", False)
    assert [message["round"] for message in seen["messages"]] == [1]
    assert seen["left_out"] > 0
    assert set(seen["messages"][0]) == {
        "number", "time", "direction", "client", "round", "kind", "task", "bytes", "tensors", "code", "late",
    }  # fmt: skip


def test_runs_are_compared_and_exported(capsys, by_network, tmp_path):
    compared = document(capsys, "compare", by_network.path)
    (one,) = compared["runs"]
    assert one["accuracy_mean"] == by_network.final["accuracy_mean"]
    assert one["epsilon"] is None  # seeded noise has no guarantee
    assert set(compared) == {"runs", "rows", "leads", "privacy", "alerts", "not_comparable"}
    assert compared["leads"] == []  # one run
    done = call(capsys, "compare", by_network.path, "--json", "--format", "csv")
    assert (done.code, "--json and --format csv" in done.err) == (2, True)
    files = document(capsys, "export", by_network.path, "--out", tmp_path / "out")["files"]
    assert files
    assert all(Path(file).exists() for file in files)


def test_lists_of_configurations_checks_and_figures(capsys):
    assert {"name": "quickstart"}.items() <= next(
        one for one in document(capsys, "configs") if one["name"] == "quickstart"
    ).items()
    found = document(capsys, "doctor", "--clients", 2)
    assert {"subject", "verdict", "found", "fix"} == set(found["checks"][0])
    assert (found["workers"], found["able"]) == (2, True)
    assert {"name", "title", "paper"} == set(document(capsys, "reproduce", "--list")[0])
    placed = document(capsys, "launch", "quickstart", "--dry-run")
    assert placed["hosts"][0]["clients"] == list(range(8))


def test_a_job_prints_its_plan_and_its_cost_and_account_finds_its_noise(capsys, tmp_path):
    private = {"epsilon": 5, "delta": 1e-4}
    job = document(capsys, "job", write_config(tmp_path / "c", **TINY, privacy=private), "--out", tmp_path / "job")
    assert job["cost"]["steps"] == 2 * 2 * 4  # clients, rounds, batches of 32 of 100
    assert job["cost"]["wall_s"] > 0
    assert [(tmp_path / "job" / name).exists() for name in job["files"]] == [True, True, True]
    (slot,) = job["plan"]
    numbers = ["--records", 100, "--batch", 32, "--epochs", 1, "--rounds", 2]
    found = document(capsys, "account", "--epsilon", 5, "--delta", 1e-4, *numbers)
    assert (slot["rate"], slot["steps"] * slot["count"]) == (found["sampling_rate"], found["steps"])
    assert (job["epsilon"], job["unprotected"]) == (5, [])
    assert job["noise_multipliers"] == [pytest.approx(found["noise_multiplier"], abs=1e-5)]
    assert found["epsilon_zero_out"] <= 5 < found["epsilon_replace_one"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"privacy": {"epsilon": 5, "delta": 1e-4, "noise": "seeded"}}, "noise is seeded"),
        (
            {"algorithm": {"name": "f-cdpfl", "clusters": 2}, "privacy": {"epsilon": 5, "delta": 1e-4}},
            "cluster index unprotected",
        ),
    ],
)
def test_the_plan_of_a_job_without_a_guarantee_names_no_finite_epsilon(capsys, tmp_path, change, reason):
    path = write_config(tmp_path / "c", **TINY | change)
    job = document(capsys, "job", path, "--out", tmp_path / "job")
    assert job["epsilon"] is None
    assert job["unprotected"][0].startswith(reason)
    assert f"privacy: epsilon inf ({reason}" in call(capsys, "run", path, "--dry-run").out


def test_a_job_of_unequal_clients_says_whose_plan_it_prints(capsys, tmp_path):
    data = {"dataset": "digits", "clients": [6], "shift": "none", "test_per_client": 20, "sizes": [100, 80, 40, 200, 50, 64]}
    path = write_config(tmp_path / "c", **TINY | {"data": data}, privacy={"epsilon": 5, "delta": 1e-4})
    job = document(capsys, "job", path, "--out", tmp_path / "job")
    (slot,) = job["plan"]
    assert job["records_per_client"] == [40, 200]
    assert slot["rate"] == pytest.approx(32 / 40)
    printed = call(capsys, "run", path, "--dry-run").out
    assert "clients have 40 to 200 records" in printed
    assert "the plan above is that of a client with 40\n" in printed
    low, high = job["noise_multipliers"][0], job["noise_multipliers"][-1]
    assert f"noise multiplier {low} to {high}, depending on a client's records and epsilon\n" in printed


def test_a_sweep_prints_its_cells_and_the_comparison(capsys, tmp_path):
    path = write_config(tmp_path / "c", **TINY)
    planned = document(capsys, "sweep", path, "algorithm=global", "--dry-run", "--out", tmp_path)
    assert planned["cells"] == [{"values": {"algorithm.name": "global"}, "cached": False}]
    ended = document(capsys, "sweep", path, "algorithm=global", "--out", tmp_path, "--quiet")
    (cell,) = ended["cells"]
    assert (cell["state"], cell["cached"], cell["error"]) == ("finished", False, None)
    assert ended["comparison"]["runs"][0]["accuracy_mean"] == cell["final"]["accuracy_mean"]
    assert document(capsys, "sweep", path, "algorithm=global", "--dry-run", "--out", tmp_path)["cells"][0]["cached"] is True


def test_jobs_of_a_sweep_on_slurm_and_its_collection(capsys, tmp_path):
    path = write_config(tmp_path / "c", **TINY)
    sweep = ["sweep", path, "seed=0,1", "--out", tmp_path]
    planned = document(capsys, *sweep, "--on", "slurm", "--dry-run")
    assert [cell["cached"] for cell in planned["cells"]] == [False, False]
    assert (len(planned["scripts"]), planned["jobs"]) == (1, [])
    Sweep.of(path, ["seed=0,1"], tmp_path).write(["waiting"] * 2)
    found = document(capsys, *sweep, "--collect", code=130)
    assert [cell["state"] for cell in found["cells"]] == ["waiting", "waiting"]
    assert found["comparison"] is None


def test_a_run_is_watched_once(capsys, by_network):
    found = document(capsys, "watch", by_network.path, "--once")
    assert (found["state"], found["round"], found["folder"]) == ("finished", found["rounds"], str(by_network.path))
    assert {"name", "clients", "accuracy", "change"} == set(found["clusters"][0])
    done = call(capsys, "watch", by_network.path, "--json")
    assert (done.code, "--json belongs to --once" in done.err) == (2, True)


def test_an_error_leaves_stdout_empty(capsys, tmp_path):
    done = call(capsys, "verify", tmp_path / "nowhere", "--json")
    assert (done.code, done.out) == (2, "")
    assert "not a run folder" in done.err
