"""Models of clusters that the server infers after training: models are compared by the assignment with which they were sent."""

from __future__ import annotations

import json

import pytest
from conftest import SMALL

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.results.split_models import Given, rounds_not_compared, split_models
from dpcfl_net.transport.keys import make_keys
from dpcfl_net.transport.messages import Header

DATA = {"dataset": "digits", "clients": [2, 2], "train_per_client": 200, "test_per_client": 40}
ASSIGNED = {1: [0, 1, 2, 3], 2: [0, 1, 0, 1], 3: [0, 1, 0, 2]}  # by dpmm-cfl, after each round
SENT = {1: "aaaa", 2: "abcd", 3: "efef"}  # models that each client was given: by the assignment of the round before


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder, 4)
    return folder


def protocol_of(keys, algorithm):
    document = {**SMALL, "data": DATA, "model": {"name": "linear"}, "rounds": 3, "algorithm": algorithm}
    document["privacy"] = {**SMALL["privacy"], "accountant": "rdp"}  # calibrates faster
    return make_job(config.resolve(document), keys).protocol


@pytest.fixture(scope="module")
def protocol(keys):
    return protocol_of(keys, {"name": "dpmm-cfl"})


def task_of(client, number, task, model):
    return client, Header(2, "", "", "", 0, f"{number}{client}{model}", "TASK", round=number, task=task, blake3=model)


def problems(protocol, folder, sent, rounds=(1, 2, 3)):
    lines = [{"view": "server", "round": t, "assignment": ASSIGNED[t], "clusters": 4} for t in rounds]
    (folder / "clusters.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tasks = [
        task_of(client, t, "first" if t == 1 else "train", model)
        for t, models in sent.items()
        for client, model in enumerate(models)
    ]
    return split_models(Given(tasks, tasks, []), protocol, folder / "clusters.jsonl")


def test_models_of_the_clusters_before_a_round_are_no_split(protocol, tmp_path):
    assert problems(protocol, tmp_path, SENT) == []


@pytest.mark.parametrize("cluster", [{"a": 1}, [1], "0", 0.0, True])
def test_an_assignment_to_something_else_than_a_cluster_is_damage(protocol, tmp_path, monkeypatch, cluster):
    """The server writes the file: `dpcfl verify` ended in a traceback, where it was to compare the models."""
    monkeypatch.setitem(ASSIGNED, 2, [*ASSIGNED[2][:-1], cluster])
    with pytest.raises(ConfigError, match=r"is damaged: round 2 assigns a client to .*, must be a number or null"):
        problems(protocol, tmp_path, SENT)


def test_models_of_clusters_chosen_in_the_round_are_no_split(protocol, tmp_path):
    assert problems(protocol, tmp_path, {**SENT, 2: "abab", 3: "efeg"}) == []


@pytest.mark.parametrize("sent", ["efge", "efgf"])
def test_models_that_no_assignment_explains_are_a_split(protocol, tmp_path, sent):
    found = problems(protocol, tmp_path, {**SENT, 3: sent})
    assert found == ["round 3 train: clients 0 and 2 of cluster 0 were given different models"]


def test_without_the_assignment_before_only_the_number_of_models_is_checked(protocol, tmp_path):
    assert problems(protocol, tmp_path, {3: "efge"}, rounds=[1, 3]) == []


@pytest.mark.parametrize(
    ("rounds", "unknown"), [((1, 2, 3), []), ((1, 2), []), ((1, 3), [2, 3]), ((1,), [2, 3]), ((2, 3), [1, 2]), ((), [1, 2, 3])]
)
def test_rounds_whose_assignments_the_server_did_not_write_are_named(protocol, tmp_path, rounds, unknown):
    """`dpcfl verify` said that their models are the same for each cluster; the newest round may be in progress."""
    sent = {1: "aabb", 2: "aabb", 3: "efef"}
    tasks = [task_of(client, t, "train", model) for t, models in sent.items() for client, model in enumerate(models)]
    problems(protocol, tmp_path, {}, rounds)
    found, clusters = Given(tasks, tasks, []), tmp_path / "clusters.jsonl"
    assert rounds_not_compared(found, protocol, clusters) == unknown
    same = Given([task_of(client, t, "train", "a") for client in range(4) for t in (1, 2, 3)], [], [])
    assert rounds_not_compared(same, protocol, clusters) == []


def test_a_client_with_two_models_in_one_round_is_a_split(protocol, tmp_path):
    tasks = [task_of(3, 1, "first", model) for model in "ab"]
    assert split_models(Given(tasks, tasks, []), protocol, tmp_path / "clusters.jsonl") == [
        "round 1 first: client 3 was given 2 models"
    ]


def test_more_models_than_the_job_has_are_a_split_without_any_assignment(keys, tmp_path):
    """Tasks of one kind carry all models, and are equal; those of the other carry one of two."""
    protocol = protocol_of(keys, {"name": "r-dpcfl", "clusters": 2})

    def found(task, models):
        tasks = [task_of(client, 2, task, model) for client, model in enumerate(models)]
        return split_models(Given(tasks, [], []), protocol, tmp_path / "clusters.jsonl")

    assert (found("select_and_train", "aaaa"), found("train", "abab")) == ([], [])
    assert found("select_and_train", "aaba") == [
        "round 2 select_and_train: 2 different models where the job has 1, clients 0 and 2 among them"
    ]
    assert found("train", "aabc") == ["round 2 train: 3 different models where the job has 2, clients 0 and 2 among them"]


def test_a_record_of_the_server_that_is_no_message_is_a_problem(protocol, tmp_path):
    assert split_models(Given([], [], [7]), protocol, tmp_path / "clusters.jsonl") == [
        "record 7 of the transcript is no message of this protocol"
    ]


def test_models_of_the_first_round_are_compared_by_the_assignment_after_it(keys, tmp_path):
    protocol = protocol_of(keys, {"name": "r-dpcfl", "clusters": 2})
    line = {"view": "server", "round": 1, "assignment": [0, 0, 1, 1], "clusters": 2}
    (tmp_path / "clusters.jsonl").write_text(json.dumps(line) + "\n")
    for models, split in (("aabb", []), ("abbb", ["round 1 train: clients 0 and 1 of cluster 0 were given different models"])):
        tasks = [task_of(client, 1, "train", model) for client, model in enumerate(models)]
        assert split_models(Given(tasks, tasks, []), protocol, tmp_path / "clusters.jsonl") == split
