"""Jobs: one canonical form, signatures, what the protocol tells and what it hides, and who refuses a bad one."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter

import pytest
from conftest import SMALL
from hypothesis import given, settings
from hypothesis import strategies as st

from dpcfl_net.core import job_reader
from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.core.frozen import canonical, digest
from dpcfl_net.core.job_differences import differences
from dpcfl_net.core.job_reader import read_protocol, read_signed_protocol
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.signed_settings import LocalTraining
from dpcfl_net.data import cache
from dpcfl_net.experiment import config, job_files
from dpcfl_net.experiment.build import make_job
from dpcfl_net.experiment.cost_prediction import measure_step
from dpcfl_net.experiment.job_files import Experiment
from dpcfl_net.experiment.statement import privacy_statement, replace_one_epsilon
from dpcfl_net.federation.claim import verify_claim
from dpcfl_net.launch.bench import noop_algorithm
from dpcfl_net.results.summary import run_document
from dpcfl_net.runtime.client_hosts import make_host
from dpcfl_net.training.sgd import PlainSGD
from dpcfl_net.transport.endpoint import Link
from dpcfl_net.transport.keys import make_keys, read_pair


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(job, its folder) for an unseeded configuration."""
    folder = tmp_path_factory.mktemp("job")
    document = {**SMALL, "privacy": {"epsilon": 5, "delta": 1e-4}}
    make_keys(folder / "keys", 8)
    job = make_job(config.resolve(document), folder / "keys")
    job_files.write_job(job, folder, folder / "keys")
    return job, folder


def operator(folder):
    return (folder / "operator.pub").read_text().strip()


def test_what_is_written_is_read_again(made):
    job, folder = made
    assert job_files.read_job(folder, operator(folder)) == job


def test_the_host_that_calibrated_a_job_verifies_it_without_computing_again(made, tmp_path, monkeypatch):
    _, folder = made
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    job = make_job(config.resolve({**SMALL, "privacy": {"epsilon": 5, "delta": 1e-4}}), folder / "keys")
    monkeypatch.setattr(sys, "executable", "no-accountant")  # that another host would start
    assert 4.9 < verify_claim(job.algorithm, 0, cache.folder() / "claims") <= 5
    with pytest.raises(FileNotFoundError, match="no-accountant"):
        verify_claim(job.algorithm, 0, tmp_path / "another host")


def test_the_check_of_a_job_executes_no_file_of_the_current_folder(made, tmp_path, monkeypatch):
    """A worker that was started in a folder with a file numpy.py, which may have come with the job, executed it."""
    (tmp_path / "numpy.py").write_text("raise SystemExit('this file was executed')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    job = make_job(config.resolve({**SMALL, "privacy": {"epsilon": 5, "delta": 1e-4}}), made[1] / "keys")
    assert 4.9 < verify_claim(job.algorithm, 0, tmp_path / "cache") <= 5


def test_the_clients_of_a_process_read_the_plans_of_all_clients_once(made, tmp_path, monkeypatch):
    """A thousand clients with different plans took a minute to start: each read the plans of all."""
    data = {"dataset": "digits", "clients": [60], "shift": "none", "train_per_client": 1, "test_per_client": 1}
    document = {**SMALL, "data": data, "local": {"batch_size": 1}, "algorithm": {"name": noop_algorithm.NAME}}
    make_keys(tmp_path / "keys", 60)
    job = make_job(config.resolve({**document, "privacy": {"epsilon": 5, "delta": 1e-4}}), tmp_path / "keys")
    asked, plan = [], noop_algorithm.NoOp.plan
    monkeypatch.setattr(noop_algorithm.NoOp, "plan", lambda self, entry: (asked.append(entry.id), plan(self, entry))[1])
    for client in range(60):
        verify_claim(job.algorithm, client, tmp_path / "claims")
    assert max(Counter(asked).values()) <= 6


def test_a_job_and_a_link_are_described_without_their_secrets(made):
    """A debugger, a notebook and the message of an error show the repr of what they hold."""
    job = make_job(config.resolve({**SMALL, "audit": {"client": 0, "canaries": 8}}), made[1] / "keys")
    assert job.experiment.audit is not None
    pair = read_pair(made[1] / "keys", "coordinator", job.protocol.coordinator_key)
    secrets = [job.experiment.salt, job.experiment.noise_seed, job.experiment.audit.secret, pair[1]]
    text = repr(job) + str(job.experiment) + repr(Link.of(job.protocol, pair))
    assert all(secrets)
    assert [secret for secret in secrets if secret in text] == []


def test_the_protocol_hides_the_experiment(made):
    job, _ = made
    text = canonical(job.protocol).decode()
    for secret in ("true_clusters", "partition", '"digits"', "rotation", '"seed":', job.experiment.salt):
        assert secret not in text
    assert job.protocol.oracle is None


def test_two_jobs_of_one_seed_permute_their_clients_differently(made):
    """Without `seeded` the permutation hangs on fresh randomness: no server can guess it from a small seed."""
    job, folder = made
    document = {**SMALL, "privacy": {"epsilon": 5, "delta": 1e-4}}
    orders = {tuple(make_job(config.resolve(document), folder / "keys").experiment.slices) for _ in range(4)}
    orders.add(tuple(job.experiment.slices))
    assert len(orders) >= 3  # fewer of five draws of 8! have a chance below 3e-13; without freshness there is one


def test_a_seeded_job_repeats_but_for_nothing(made):
    _, folder = made
    jobs = [make_job(config.resolve(SMALL), folder / "keys") for _ in range(2)]
    assert canonical(jobs[0].protocol) == canonical(jobs[1].protocol)
    assert canonical(jobs[0].experiment) == canonical(jobs[1].experiment)


def test_only_the_oracle_sees_true_clusters(made):
    _, folder = made
    job = make_job(config.resolve({**SMALL, "algorithm": {"name": "oracle"}}), folder / "keys")
    assert job.protocol.oracle == job.experiment.true_clusters
    statement = privacy_statement(job.protocol, None)
    assert any("oracle" in line for line in statement["not_covered"])
    assert any("in overlapping windows of a text" in line for line in statement["not_covered"])


@pytest.mark.parametrize(("name", "selections"), [("global", []), ("r-dpcfl", ["cluster selections"])])
def test_the_statement_names_selections_where_clients_make_some(made, name, selections):
    document = {**SMALL, "privacy": {"epsilon": 5, "delta": 1e-4}, "algorithm": {"name": name}}
    protocol = make_job(config.resolve(document), made[1] / "keys").protocol
    assert privacy_statement(protocol, None)["covered"] == ["model updates", *selections]


@pytest.mark.parametrize(("select", "said"), [("argmin", True), ("exponential", False)])
def test_the_statement_says_that_noise_beside_a_raw_choice_counts_for_a_given_choice_only(made, select, said):
    """Updates start from the chosen model: one record that changes the choice changes them beyond their noise."""
    algorithm = {"name": "f-cdpfl", "clusters": 4, "select": select}
    document = {**SMALL, "privacy": {"epsilon": 5, "delta": 1e-4, "accountant": "rdp"}, "algorithm": algorithm}
    protocol = make_job(config.resolve(document), made[1] / "keys").protocol
    lines = [line for line in privacy_statement(protocol, None)["not_covered"] if line.startswith("the other releases")]
    assert [("epsilon 5" in line, "for given outcomes" in line) for line in lines] == [(True, True)] * said


@pytest.mark.parametrize(
    ("algorithm", "clusters"),
    [("global", False), ("local", False), ("r-dpcfl", True), ("km-cdpfl", True), ("dpmm-cfl", True), ("feddp-kmeans", True)],
)
def test_the_statement_says_that_sample_level_noise_does_not_hide_a_cluster(made, algorithm, clusters):
    options = {"clusters": 4} if algorithm in ("r-dpcfl", "km-cdpfl", "feddp-kmeans") else {}
    document = {
        **SMALL,
        "privacy": {"epsilon": 5, "delta": 1e-4, "accountant": "rdp"},
        "algorithm": {"name": algorithm, **options},
    }
    protocol = make_job(config.resolve(document), made[1] / "keys").protocol
    lines = privacy_statement(protocol, None)["not_covered"]
    assert any(line.startswith("the cluster of a client") for line in lines) == clusters


@pytest.mark.parametrize("records", ["test", "validation"])
def test_the_statement_names_the_records_that_the_observer_evaluates(made, tmp_path, records):
    """Validation records are records of clients, and accuracy on them is written without noise."""
    data = {**SMALL["data"], "validation": 0.2, "evaluate": records}
    document = {**SMALL, "privacy": {"epsilon": 5, "delta": 1e-4}, "data": data}
    job = make_job(config.resolve(document), made[1] / "keys")
    job_files.write_job(job, tmp_path, made[1] / "keys")
    found = run_document(tmp_path, job, state="running", wall_s=1.0, processes=1, replace_one=None, devices={})
    (said,) = [line for line in found["privacy"]["not_covered"] if line.startswith("evaluation on")]
    assert said.startswith(f"evaluation on {records}")
    assert ("without noise" in said or "no noise" in said) == (records == "validation")


def test_an_answer_that_is_infinite_is_kept_as_null(made, monkeypatch):
    job, _ = made
    assert replace_one_epsilon(job.protocol) > job.protocol.privacy.epsilon
    monkeypatch.setattr("dpcfl_net.experiment.statement.cached", lambda *_: None)
    assert replace_one_epsilon(job.protocol) is None


def test_a_reformatted_protocol_is_refused(made, tmp_path):
    _, folder = made
    path = tmp_path / "protocol.json"
    path.write_text(json.dumps(json.loads((folder / "protocol.json").read_text()), indent=1))
    with pytest.raises(Refused, match="canonical"):
        read_protocol(path)


def test_a_protocol_that_is_replaced_while_it_is_read_is_refused(made, tmp_path, monkeypatch):
    """The signature was checked on a second read of the file, so that another job could take its place in between."""
    _, folder = made
    shutil.copytree(folder, tmp_path / "job")
    path = tmp_path / "job" / "protocol.json"
    signed, check = path.read_bytes(), job_reader.check_signature
    path.write_bytes(signed.replace(b'"rounds":6', b'"rounds":7'))

    def replaced_before(*arguments):
        path.write_bytes(signed)
        check(*arguments)

    monkeypatch.setattr(job_reader, "check_signature", replaced_before)
    with pytest.raises(Refused, match="operator-signature"):
        read_signed_protocol(path, operator(folder))
    assert read_signed_protocol(path, operator(folder)).rounds == 6


@pytest.mark.parametrize(
    ("noise", "why"),
    [(lambda z: 0.97 * z, r"claim: the signed plan costs"), (lambda z: None, r"claim: .*has no noise multiplier")],
    ids=["too-little", "none"],
)
def test_a_job_that_costs_more_than_it_promises_is_refused_before_data_is_read(made, tmp_path, monkeypatch, noise, why):
    job, _ = made
    roster = [entry.model_copy(update={"noise_multiplier": noise(entry.noise_multiplier)}) for entry in job.protocol.roster]
    cheap = job_files.Job(job.protocol.model_copy(update={"roster": roster}), job.experiment)
    monkeypatch.setattr("dpcfl_net.runtime.client_hosts.client_slice", lambda *_: pytest.fail("data was looked at"))
    with pytest.raises(Refused, match=why):
        make_host(cheap, 0, tmp_path)


def test_targets_that_no_noise_reaches_are_configuration_errors(made):
    _, folder = made
    options = {"name": "r-dpcfl", "clusters": 4, "selection": {"rounds_fraction": 0.5, "budget_fraction": 0.9}}
    with pytest.raises(ConfigError, match=r"privacy\.epsilon"):
        make_job(config.resolve({**SMALL, "algorithm": options}), folder / "keys")


def test_the_time_of_a_step_is_measured_on_a_few_steps_however_many_a_round_has(made, monkeypatch):
    _, folder = made
    document = {
        **SMALL, "algorithm": {"name": "dp-fedavg", "sampling_rate": 1.0}, "local": {"epochs": 5000, "batch_size": 10}, "rounds": 2,
        "data": {**SMALL["data"], "train_per_client": 400},
        "privacy": {"epsilon": 5, "delta": 1e-2, "unit": "client", "trust": "trusted-server"},
    }  # fmt: skip
    job = make_job(config.resolve(document), folder / "keys")
    records = []
    monkeypatch.setattr(PlainSGD, "train", lambda engine, theta, data, order: records.append(len(data) * engine._epochs))
    assert measure_step(job, None, most_steps=8).step_s > 0
    assert set(records) == {80}


def test_differences_are_told_field_by_field(made):
    job, _ = made
    other = job.protocol.model_copy(update={"rounds": 9, "local": LocalTraining(lr=0.25)})
    found = differences(job.protocol, other)
    assert found == ["local.lr: 0.5 here, 0.25 there", "rounds: 6 here, 9 there"]


@given(lr=st.floats(1e-9, 1e6), epochs=st.integers(1, 10**4), name=st.text(max_size=40))
@settings(max_examples=60)
def test_canonical_form_round_trips(made, lr, epochs, name):
    job, folder = made
    part = job.protocol.model_copy(update={"local": LocalTraining(lr=lr, epochs=epochs), "name": name})
    again = Protocol.model_validate_json(canonical(part), context={"roster": folder / "roster.jsonl"})
    assert again == part
    assert digest(again) == digest(part)


def test_experiment_of_another_job_is_refused(made, tmp_path):
    job, folder = made
    other = job_files.Job(job.protocol, Experiment.model_validate({**job.experiment.model_dump(), "seed": 5}))
    job_files.write_job(other, tmp_path, folder / "keys")
    with pytest.raises(Refused, match="experiment-hash"):
        job_files.read_job(tmp_path, operator(folder))


def test_a_signed_job_with_a_noise_seed_and_an_epsilon_is_refused(made, tmp_path):
    """Both parts are signed and belong together: only the worker can notice that the noise of its releases is known to others."""
    job, folder = made
    experiment = job.experiment.model_copy(update={"noise_seed": "5eed" * 16})
    protocol = job.protocol.model_copy(update={"experiment_hash": digest(experiment)})
    job_files.write_job(job_files.Job(protocol, experiment), tmp_path, folder / "keys")
    with pytest.raises(Refused, match="job-invalid: the experiment has a noise seed"):
        job_files.read_job(tmp_path, operator(tmp_path))


def test_the_search_of_noise_says_for_how_many_plans(tmp_path):
    data = {"dataset": "digits", "clients": [3], "shift": "none", "sizes": [40, 50, 60], "test_per_client": 5}
    for sizes, step in (
        ([50] * 3, "noise multiplier for epsilon 5"),
        ([40, 50, 50], "noise multipliers of 2 plans for epsilon 5"),
    ):
        document = {"data": {**data, "sizes": sizes}, "privacy": {"epsilon": 5, "delta": 1e-4, "accountant": "rdp"}}
        make_keys(tmp_path / step, 3)
        steps: list[str] = []
        make_job(config.resolve({**SMALL, **document, "algorithm": {"name": "global"}}), tmp_path / step, steps.append)
        assert steps[-1] == step
