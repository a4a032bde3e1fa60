"""The privacy statement names what leaves clients and a trusted server, and nothing else."""

from __future__ import annotations

import pytest
from conftest import SMALL
from secure_runs import CLIENT, SAMPLE, make

from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.experiment.statement import privacy_statement
from dpcfl_net.report.lead import privacy_facts
from dpcfl_net.results.privacy_statement import statement as privacy_statement_text
from dpcfl_net.transport.keys import make_keys

TRUSTED = {"epsilon": 8, "delta": 1e-2, "unit": "client", "trust": "trusted-server"}
RR = {"name": "rr-cluster", "sampling_rate": 0.5, "clusters": 2, "min_cluster_size": 2}
SUMS, COUNTS = "noisy sums of clipped updates", "noisy counts of the clients of each cluster"
UPDATE, LABELLED = "the raw update of every sampled client", "the raw update and cluster label of every sampled client"
OF_SAMPLE = "labels of the sampled clients {}, in random order"
SCORES = "the raw {} by which all clients choose a cluster, whenever labels are released"
OF_ALL = "labels of all clients by {}"


def said(folder, algorithm, privacy, clients=(8,), **more):
    """The statement of a job with noise from the operating system."""
    data = {"dataset": "digits", "clients": list(clients), "train_per_client": 50, "test_per_client": 20, **more}
    document = {
        **SMALL, "rounds": 8, "data": data, "privacy": privacy, "algorithm": algorithm, "model": {"name": "digits-cnn"},
        "local": {"batch_size": 20, "lr": 0.2, "clip": 1.0},
    }  # fmt: skip
    make_keys(folder, sum(clients))
    return privacy_statement(make_job(config.resolve(document), folder).protocol, None)


@pytest.mark.parametrize(
    ("algorithm", "adjacency", "published", "received"),
    [
        ({"name": "dp-fedavg", "sampling_rate": 0.5}, "zero-out", [SUMS], [UPDATE]),
        ({"name": "dp-fedper", "sampling_rate": 0.5}, "zero-out", [SUMS], [UPDATE]),
        (RR, "replace-one", [SUMS, OF_SAMPLE.format("with noise")], [LABELLED]),
        (
            {**RR, "labels": "randomised-response"},
            "replace-one",
            [SUMS, OF_SAMPLE.format("by randomised response")],
            [LABELLED],
        ),
        ({**RR, "guarantee": "expected"}, "zero-out", [SUMS, COUNTS], [LABELLED]),
        (
            {**RR, "labels": "randomised-response", "labels_every": 2},
            "replace-one",
            [SUMS, OF_ALL.format("randomised response")],
            [UPDATE, SCORES.format("losses")],
        ),
        (
            {**RR, "guarantee": "expected", "labels": "exponential", "labels_every": 2, "base": "fesem"},
            "zero-out",
            [SUMS, COUNTS, OF_ALL.format("the exponential mechanism")],
            [LABELLED, SCORES.format("distances of models")],
        ),
    ],
)
def test_a_trusted_server_is_said_to_receive_and_to_publish_what_it_does(tmp_path, algorithm, adjacency, published, received):
    statement = said(tmp_path, algorithm, {**TRUSTED, "adjacency": adjacency})
    assert statement["covered"] == [f"the server's publications of each round: {'; '.join(published)}"]
    assert statement["not_covered"][0] == f"the server: it is trusted and receives {'; '.join(received)}"


FEDAVG = {"name": "dp-fedavg", "sampling_rate": 0.5}


@pytest.mark.parametrize(
    ("algorithm", "adjacency", "sampling"),
    [
        ({**FEDAVG, "sampling": "fixed"}, "replace-one", "fixed"),
        (FEDAVG, "zero-out", "poisson"),
        ({**FEDAVG, "sampling_rate": 1.0}, "zero-out", None),
    ],
)
def test_the_facts_except_other_clients_exactly_where_one_alone_learns_more(tmp_path, algorithm, adjacency, sampling):
    """In a sample of fixed size a client that knows its own place knows something of the others' places."""
    statement = said(tmp_path, algorithm, {**TRUSTED, "adjacency": adjacency})
    assert statement.get("client_sampling") == sampling
    listed = any("each other client: it knows if it was sampled itself" in line for line in statement["not_covered"])
    against = dict(privacy_facts(statement))["Against"]
    assert against.startswith("everybody who sees only what the server publishes")
    assert ("not another client, which knows if it was sampled itself" in against) is listed is (sampling == "fixed")


def test_validation_records_are_said_to_be_protected_where_there_are_some(tmp_path):
    def units(folder, algorithm, **data):
        folder.mkdir()
        statement = said(folder, algorithm, {"epsilon": 5, "delta": 1e-4}, **data)
        facts = dict(privacy_facts(statement)) | dict(privacy_statement_text(statement).facts)
        return facts["Protects"], facts["Unit"]

    em = units(tmp_path / "em", {"name": "em-fdro", "clients_per_round": 2}, validation=0.2)
    assert em == ("one training or validation record of a client", "sample: one training or validation record of one client")
    none = units(tmp_path / "global", {"name": "global"})
    assert none == ("one training record of a client", "sample: one training record of one client")


def test_with_public_clusters_no_label_is_sent(tmp_path):
    oracle = {**RR, "base": "oracle", "min_cluster_size": 0}
    statement = said(tmp_path, oracle, {**TRUSTED, "adjacency": "replace-one"}, clients=(4, 4))
    assert statement["covered"] == [f"the server's publications of each round: {SUMS}"]
    assert statement["not_covered"][0] == f"the server: it is trusted and receives {UPDATE}"


def test_a_client_of_local_training_sends_no_update(tmp_path):
    statement = said(tmp_path, {"name": "local"}, {"epsilon": 5, "delta": 1e-4})
    assert statement["covered"] == ["personal models, which stay with their clients: no client sends a model or an update"]


@pytest.mark.parametrize(
    ("algorithm", "terms", "single"),
    [
        ({"name": "global"}, SAMPLE, []),
        ({"name": "dp-fedavg", "sampling_rate": 0.5}, CLIENT, []),
        ({"name": "dp-ifca", "clusters": 2}, SAMPLE, ["model updates", "cluster selections"]),
    ],
)
def test_updates_of_single_clients_are_named_beside_secure_sums_only_where_some_are_sent(tmp_path, algorithm, terms, single):
    secret = {key: value for key, value in terms.items() if not key.startswith("noise")}
    sums, *others = privacy_statement(make(tmp_path, algorithm, secret).protocol, None)["covered"]
    assert sums.startswith("what the server receives in a secure sum")
    assert others == single


def test_without_labels_the_observers_clusters_come_from_losses_alone(tmp_path):
    secret = {key: value for key, value in CLIENT.items() if not key.startswith("noise")}
    rr = {**RR, "guarantee": "expected"}
    masked = privacy_statement(make(tmp_path / "masked", rr, secret).protocol, None)["not_covered"]
    (tmp_path / "raw").mkdir()
    raw = said(tmp_path / "raw", rr, {**TRUSTED, "adjacency": "zero-out"})["not_covered"]
    clusters = ["".join(line for line in lines if line.startswith("clusters of clients")) for lines in (masked, raw)]
    assert clusters[0].endswith("they come from the loss on the clients' training records, without noise")
    assert "from the labels or losses that clients send" in clusters[1]
