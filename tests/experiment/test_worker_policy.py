"""What a worker refuses although the operator signed it: conditions that make no theorem, and promises not worth the name."""

from __future__ import annotations

import sys

import pytest
from conftest import SMALL, dpcfl

from dpcfl_net.core.errors import Refused
from dpcfl_net.core.types import Policy
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.experiment.calibration import calibrated
from dpcfl_net.experiment.job_files import Job, write_job
from dpcfl_net.runtime.client_hosts import make_host
from dpcfl_net.runtime.specs import WorkerTerms
from dpcfl_net.transport.keys import make_keys

DATA = {"dataset": "digits", "clients": [20], "shift": "none", "train_per_client": 60, "test_per_client": 20}
TRUSTED = {"epsilon": 8, "delta": 1e-2, "unit": "client", "trust": "trusted-server", "adjacency": "replace-one"}
RR = {"name": "rr-cluster", "clusters": 2, "min_cluster_size": 2, "sampling_rate": 0.5}


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder, 20)
    return folder


def job_of(keys, algorithm, privacy, **changes):
    document = {**SMALL, "data": DATA, "model": {"name": "linear"}, "local": {"batch_size": 20}, **changes}
    return make_job(config.resolve({**document, "algorithm": algorithm, "privacy": privacy}), keys)


def forged(job, options=None, **privacy):
    """The job with another option or promise, its noise solved for that: what an operator signs who goes around the configuration."""
    protocol = job.protocol.model_copy(
        update={
            "options": {**job.protocol.options, **(options or {})},
            "privacy": job.protocol.privacy.model_copy(update=privacy),
        }
    )
    return Job(calibrated(protocol), job.experiment)


def refusal(job, tmp_path, policy=None):
    with pytest.raises(Refused) as error:
        make_host(job, 0, tmp_path / "ledgers", terms=WorkerTerms(policy) if policy else WorkerTerms())
    assert not (tmp_path / "ledgers").exists()
    return error.value.code, error.value.reason


@pytest.mark.parametrize(
    ("algorithm", "options", "privacy", "said"),
    [
        (RR, {}, {"adjacency": "zero-out"}, "guarantee is 'labels-first': needs privacy.adjacency replace-one"),
        (
            {**RR, "guarantee": "expected"},
            {"sampling": "fixed"},
            {"adjacency": "replace-one"},
            "guarantee is 'expected': needs Poisson",
        ),
        ({**RR, "guarantee": "expected"}, {"sampling": "fixed", "base": "fesem"}, {"adjacency": "replace-one"}, "keep a state"),
        (RR, {"base": "fesem"}, {}, "clients that keep a state reveal earlier samples"),
        (RR, {"clusters": 4, "min_cluster_size": 8}, {}, "4 clusters of that size need 32 clients a round"),
    ],
)
def test_conditions_that_make_no_theorem_are_refused_whoever_signed_them(keys, tmp_path, algorithm, options, privacy, said):
    """Each of these passes the accountant with a finite number that holds for nothing."""
    base = {**TRUSTED, "adjacency": "zero-out"} if algorithm.get("guarantee") == "expected" else TRUSTED
    sound = job_of(keys, algorithm, base)
    make_host(sound, 0, tmp_path / "sound", durable=False).close()
    code, reason = refusal(forged(sound, options, **privacy), tmp_path)
    assert code == "claim"
    assert said in reason


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"privacy": {"adjacency": "replace-one"}}, "epsilon 8.7"),
        pytest.param({"privacy": {"accountant": "rdp"}}, "epsilon 5.8", marks=pytest.mark.slow),
        ({"privacy": {"delta": 1e-4}}, "epsilon 6.2"),
        ({"local": {"pace": "constant"}}, "epsilon 5.005"),  # a part of delta is reserved
        ({"roster": {"noise_multiplier": 1e-6}}, "epsilon inf"),
    ],
)
def test_noise_for_another_promise_is_refused_whoever_signed_it(keys, tmp_path, change, said):
    sound = job_of(keys, {"name": "global"}, {"epsilon": 5, "delta": 1e-3})
    protocol, ((part, fields),) = sound.protocol, change.items()
    old = getattr(protocol, part)
    new = [entry.model_copy(update=fields) for entry in old] if part == "roster" else old.model_copy(update=fields)
    code, reason = refusal(Job(protocol.model_copy(update={part: new}), sound.experiment), tmp_path)
    assert (code, f"the signed plan costs client 0 {said}" in reason, "promises 5" in reason) == ("claim", True, True), reason


def test_too_little_noise_of_a_trusted_server_is_refused_whoever_signed_it(keys, tmp_path):
    sound = job_of(keys, {"name": "dp-fedavg", "sampling_rate": 0.5}, TRUSTED)
    noise = 0.9 * sound.protocol.curator_noise_multiplier
    job = Job(sound.protocol.model_copy(update={"curator_noise_multiplier": noise}), sound.experiment)
    code, reason = refusal(job, tmp_path)
    assert (code, "the signed plan costs client 0 epsilon 9." in reason, "promises 8" in reason) == ("claim", True, True), (
        reason
    )


@pytest.mark.parametrize(("script", "ended"), [("exit 1", "exit code 1"), ("kill -9 $$", "signal 9")])
def test_a_claim_that_the_accountant_cannot_check_is_refused(keys, tmp_path, monkeypatch, script, ended):
    job = job_of(keys, {"name": "global"}, {"epsilon": 5, "delta": 1e-3})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # of a host that has not computed it before
    accountant = tmp_path / "accountant"
    accountant.write_text(f"#!/bin/sh\n{script}\n")
    accountant.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(accountant))
    said = f"the accountant could not check the plan: its process ended by {ended} without a message"
    assert refusal(job, tmp_path) == ("claim", said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"unit": "client"}, "global does not protect a client under untrusted-server, as the job says it does"),
        ({"trust": "trusted-server"}, "global does not protect a sample under trusted-server, as the job says it does"),
    ],
)
def test_a_promise_that_is_none_of_the_algorithms_is_refused_whoever_signed_it(keys, tmp_path, change, said):
    sound = job_of(keys, {"name": "global"}, {"epsilon": 5, "delta": 1e-3})
    privacy = sound.protocol.privacy.model_copy(update=change)
    job = Job(sound.protocol.model_copy(update={"privacy": privacy}), sound.experiment)
    assert refusal(job, tmp_path, Policy(max_delta=0.9)) == ("claim", said)


def test_a_pull_that_overshoots_is_refused_whoever_signed_it(keys, tmp_path):
    sound = job_of(keys, {"name": "mr-mtl"}, {"epsilon": 5, "delta": 1e-3})
    assert refusal(forged(sound, {"lam": 1e6}), tmp_path)[0] == "claim"


@pytest.mark.parametrize("name", ["ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"])
def test_arithmetic_shorter_than_float32_is_refused(keys, tmp_path, monkeypatch, name):
    job = job_of(keys, {"name": "global"}, {"epsilon": 5, "delta": 1e-3})
    monkeypatch.setenv(name, "bf16")
    code, reason = refusal(job, tmp_path)
    assert code == "precision"
    assert f"{name} is 'bf16'" in reason
    monkeypatch.setenv(name, "STRICT")
    make_host(job, 0, tmp_path / "strict").close()


def test_a_model_for_other_data_is_refused_whoever_signed_it(keys, tmp_path):
    """With fewer classes than the data set, a task would fail if and only if a record with the last label is in a batch."""
    sound = job_of(keys, {"name": "global"}, {"epsilon": 5, "delta": 1e-3})
    model = sound.protocol.model
    narrow = {"classes": 9, "parameters": model.parameters // 10 * 9, "layout": [(n, [9, *s[1:]]) for n, s in model.layout]}
    for change in (narrow, {"input_shape": [64]}, {"task": "regression"}):
        job = Job(sound.protocol.model_copy(update={"model": model.model_copy(update=change)}), sound.experiment)
        code, reason = refusal(job, tmp_path)
        assert code == "model"
        assert "the data set here is for classification, records of [1, 8, 8], 10 classes" in reason


@pytest.mark.parametrize(
    ("privacy", "policy", "said"),
    [
        ({"delta": 0.5}, None, "delta is 0.5, this worker serves at most 1 / 60, one over the records"),
        ({"delta": 0.02}, None, "1 / 60"),
        ({"epsilon": 1e4}, None, "epsilon is 10000, this worker serves at most 100"),
        ({}, Policy(max_epsilon=4.9), "epsilon is 5, this worker serves at most 4.9"),
        ({}, Policy(max_delta=1e-6), "delta is 0.001, this worker serves at most 1e-06"),
    ],
)
def test_a_worker_has_a_policy_of_its_own(keys, tmp_path, privacy, policy, said):
    job = job_of(keys, {"name": "global"}, {"epsilon": 5, "delta": 1e-3, **privacy})
    code, reason = refusal(job, tmp_path, policy)
    assert (code, said in reason) == ("policy", True), reason
    open_terms = WorkerTerms(Policy(max_epsilon=1e5, max_delta=0.9))
    make_host(job, 0, tmp_path / "open", terms=open_terms, durable=False).close()


def test_two_workers_of_one_process_have_policies_of_their_own(keys, tmp_path):
    job = job_of(keys, {"name": "global"}, {"epsilon": 5, "delta": 1e-3})
    make_host(job, 0, tmp_path / "usual", durable=False).close()
    assert refusal(job, tmp_path, Policy(max_epsilon=1))[0] == "policy"
    exact = WorkerTerms(Policy(max_epsilon=5, max_delta=1e-3))  # it serves at most these
    make_host(job, 0, tmp_path / "exact", terms=exact, durable=False).close()


def test_delta_of_whole_clients_is_held_to_their_number(keys, tmp_path):
    job = job_of(keys, {"name": "dp-fedavg", "sampling_rate": 0.5}, {**TRUSTED, "delta": 0.06})
    assert "1 / 20, one over the clients" in refusal(job, tmp_path)[1]
    make_host(forged(job, delta=0.05), 0, tmp_path / "open", durable=False).close()


def test_a_job_without_a_promise_is_served_only_where_no_number_was_asked_for(keys, tmp_path):
    """Its epsilon is only the target of the calibration."""
    job = job_of(keys, {"name": "f-cdpfl", "clusters": 2}, {"epsilon": 200, "delta": 1e-3})
    make_host(job, 0, tmp_path / "usual", durable=False).close()
    assert "no finite epsilon (cluster index unprotected" in refusal(job, tmp_path, Policy(max_epsilon=50))[1]


@pytest.mark.parametrize(
    ("algorithm", "privacy", "said"),
    [
        ({"name": "dp-fedavg", "sampling_rate": 0.5}, TRUSTED, "privacy.trust is 'trusted-server', and the server gets raw updates"),
        ({"name": "f-cdpfl", "clusters": 2}, {"epsilon": 5, "delta": 1e-3}, "cluster index unprotected"),
    ],
)  # fmt: skip
def test_a_worker_may_serve_only_jobs_that_protect_it_against_the_server(keys, tmp_path, algorithm, privacy, said):
    """A limit on epsilon accepts a job whose epsilon holds for those who see what a trusted server publishes."""
    job, own = job_of(keys, algorithm, {**privacy, "delta": 1e-3}), Policy(protected_only=True)
    code, reason = refusal(job, tmp_path, own)
    assert (code, said in reason) == ("policy", True), reason
    sound = job_of(keys, {"name": "global"}, {"epsilon": 5, "delta": 1e-3})
    make_host(sound, 0, tmp_path / "sound", terms=WorkerTerms(own), durable=False).close()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--max-epsilon", 2], "the job's epsilon is 8, this worker serves at most 2 (max_epsilon)"),
        (["--protected-only"], "the server gets raw updates"),
    ],
)
def test_the_command_line_takes_the_policy(keys, tmp_path, option, said):
    job = job_of(keys, {"name": "dp-fedavg", "sampling_rate": 0.5}, TRUSTED)
    write_job(job, tmp_path / "job", keys)
    done = dpcfl(
        "worker", tmp_path / "job", "--client", 0, "--connect", "tcp://127.0.0.1:1", "--keys", keys,
        "--operator-key", tmp_path / "job/operator.pub", "--ledgers", tmp_path / "ledgers", *option,
    )  # fmt: skip
    assert done.returncode == 3
    assert said in done.stderr
