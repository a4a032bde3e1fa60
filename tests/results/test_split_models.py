"""Models of clusters that the server infers after training: models are compared by the assignment with which they were sent."""

from __future__ import annotations

import json

import pytest
from conftest import SMALL

from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.results.split_models import Given, split_models
from dpcfl_net.transport.keys import make_keys
from dpcfl_net.transport.messages import Header

DATA = {"dataset": "digits", "clients": [2, 2], "train_per_client": 200, "test_per_client": 40}
ASSIGNED = {1: [0, 1, 2, 3], 2: [0, 1, 0, 1], 3: [0, 1, 0, 2]}  # by dpmm-cfl, after each round
SENT = {1: "aaaa", 2: "abcd", 3: "efef"}  # models that each client was given: by the assignment of the round before


@pytest.fixture(scope="module")
def protocol(tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys")
    make_keys(keys, 4)
    document = {**SMALL, "data": DATA, "model": {"name": "linear"}, "rounds": 3, "algorithm": {"name": "dpmm-cfl"}}
    return make_job(config.resolve(document), keys).protocol


def problems(protocol, folder, sent, rounds=(1, 2, 3)):
    lines = [{"view": "server", "round": t, "assignment": ASSIGNED[t], "clusters": 4} for t in rounds]
    (folder / "clusters.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tasks = [
        (client, Header(2, "", "", "", 0, f"{t}{client}", "TASK", round=t, task="first" if t == 1 else "train", blake3=model))
        for t, models in sent.items()
        for client, model in enumerate(models)
    ]
    return split_models(Given(tasks, tasks, []), protocol, folder / "clusters.jsonl")


def test_models_of_the_clusters_before_a_round_are_no_split(protocol, tmp_path):
    assert problems(protocol, tmp_path, SENT) == []


def test_models_of_clusters_chosen_in_the_round_are_no_split(protocol, tmp_path):
    assert problems(protocol, tmp_path, {**SENT, 2: "abab", 3: "efeg"}) == []


@pytest.mark.parametrize("sent", ["efge", "efgf"])
def test_models_that_no_assignment_explains_are_a_split(protocol, tmp_path, sent):
    found = problems(protocol, tmp_path, {**SENT, 3: sent})
    assert found == ["round 3 train: clients 0 and 2 of cluster 0 were given different models"]


def test_without_the_assignment_before_only_the_number_of_models_is_checked(protocol, tmp_path):
    assert problems(protocol, tmp_path, {3: "efge"}, rounds=[1, 3]) == []
