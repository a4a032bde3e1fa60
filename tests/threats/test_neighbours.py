"""Answers of a client on data that differ in one record: the same tasks get answers of one form, and only noisy values differ."""

from __future__ import annotations

import math
import warnings
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import SMALL
from secure_runs import CLIENT, SAMPLE, charged, key_of, make
from simulate import simulate

from dpcfl_net.algorithms.rr_cluster import RRCluster
from dpcfl_net.core.tensors import DTYPES, finite, unpack
from dpcfl_net.core.types import Answer, Task
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.federation import client_host
from dpcfl_net.federation.capabilities import client_steps
from dpcfl_net.federation.client_host import ClientHost
from dpcfl_net.federation.in_process import InProcessFederation
from dpcfl_net.federation.message_encoding import MessageEncoding
from dpcfl_net.federation.release_check import release_check
from dpcfl_net.privacy.randomness import stream
from dpcfl_net.privacy.slots import DPSGDSlot
from dpcfl_net.runtime import client_hosts
from dpcfl_net.runtime.one_process import federation
from dpcfl_net.transport.keys import client_key, make_keys

RECORDS, ROUNDS, WHO = 24, 5, 1
DATA = {"dataset": "digits", "clients": [2, 2], "train_per_client": RECORDS, "test_per_client": 10}
HELD = {"data": {**DATA, "train_per_client": RECORDS + 6, "validation": 0.2}}
UNEVEN = {"data": {**{key: value for key, value in DATA.items() if key != "train_per_client"}, "sizes": [9, 12, 30, 70]}}
TRUSTED = {"unit": "client", "trust": "trusted-server", "delta": 1e-2}
REPLACED = {**TRUSTED, "adjacency": "replace-one"}
RR = {"name": "rr-cluster", "clusters": 2, "min_cluster_size": 2, "sampling_rate": 1.0}
CASES = {  # case: algorithm, privacy, and other changes
    "global": ({"name": "global"}, {}, {}),
    "allocation": ({"name": "global"}, {"accountant": "pld"}, {"local": {"batch_size": 8, "lr": 0.5, "sampling": "allocation"}}),
    "full batches": ({"name": "global"}, {}, {"local": {"batch_size": RECORDS, "lr": 0.5}}),
    "constant pace": ({"name": "global"}, {}, {"local": {"batch_size": 8, "lr": 0.5, "pace": "constant"}}),
    "epsilon by client": ({"name": "global", "weights": "noise"}, {"epsilon_by_client": {"1": 2.0}}, {}),
    "asynchronous": ({"name": "global", "asynchronous": {"buffer": 2}}, {}, {}),
    "compressed": (
        {"name": "global"}, {}, {"communication": {"up": {"form": "top-k", "fraction": 0.1, "error_feedback": True}}},
    ),
    "int8": ({"name": "robust-hdp"}, {}, {"communication": {"up": {"form": "int8"}, "down": "bfloat16"}}),
    "uneven": ({"name": "robust-hdp"}, {}, UNEVEN),
    "dp-ifca": ({"name": "dp-ifca", "clusters": 3}, {}, {}),
    "r-dpcfl": ({"name": "r-dpcfl", "clusters": 2}, {}, {}),
    "dpmm-cfl": ({"name": "dpmm-cfl"}, {}, {}),
    "feddp-kmeans": ({"name": "feddp-kmeans", "clusters": 2, "centres": 3}, {}, {}),
    "more centres than records": ({"name": "feddp-kmeans", "clusters": 2, "centres": RECORDS + 1}, {}, {}),
    "em-fdro": ({"name": "em-fdro", "clients_per_round": 2}, {}, HELD),
    "em-fdro, clients": (
        {"name": "em-fdro", "clients_per_round": 2}, {"unit": "client", "adjacency": "replace-one", "delta": 1e-2, "accountant": "pld"}, HELD,
    ),
    "mr-mtl": ({"name": "mr-mtl", "lam": 0.2}, {}, {}),
    "local": ({"name": "local"}, {}, {}),
    "dp-fedper": ({"name": "dp-fedper", "sampling_rate": 1.0}, TRUSTED, {"model": {"name": "digits-cnn"}}),
    "dp-fedavg, asynchronous": ({"name": "dp-fedavg", "asynchronous": {"buffer": 2}}, TRUSTED, {}),
    "dp-fedavg, int8": (
        {"name": "dp-fedavg", "sampling_rate": 1.0}, TRUSTED,
        {"data": {**DATA, "train_per_client": 16}, "local": {"batch_size": 16, "lr": 1.0}, "communication": {"up": "int8"}},
    ),
    "rr-cluster": (RR, REPLACED, {}),
    "rr-cluster, fesem": ({**RR, "base": "fesem", "guarantee": "expected"}, TRUSTED, {}),
    "rr-cluster, fedcam": ({**RR, "base": "fedcam", "guarantee": "expected"}, TRUSTED, {}),
    "randomised response": ({**RR, "labels": "randomised-response", "labels_every": 2, "labels_epsilon": 0.5}, REPLACED, {}),
    "exponential labels": ({**RR, "labels": "exponential", "labels_every": 2, "labels_epsilon": 0.5}, REPLACED, {}),
}  # fmt: skip
SECURE = {
    "records": ({"name": "global"}, SAMPLE),
    "both": ({"name": "r-dpcfl", "clusters": 1, "secure_from": 3}, SAMPLE),
    "secret coins": ({"name": "dp-fedavg", "sampling_rate": 0.5}, CLIENT),
    "clusters": ({"name": "rr-cluster", "base": "fesem", "guarantee": "expected", "clusters": 2, "min_cluster_size": 2,
                  "sampling_rate": 0.5}, CLIENT),
}  # fmt: skip


def gone(x, y):
    """A record that every mechanism leaves out: nothing that is computed from it is finite."""
    return torch.full_like(x, torch.nan), y


def huge(x, y):
    return 1e30 * (1 + x), (y + 1) % 10


def infinite(x, y):
    """A record of finite numbers that overflow when they are scaled."""
    return torch.full_like(x, torch.inf), y


def sentinel(x, y):
    """A record with the largest float32 number, as for a value that is missing, and one that int8 rounds to zero beside it."""
    changed = torch.zeros_like(x)
    changed.view(-1)[:2] = torch.finfo(torch.float32).max * torch.tensor([1.0, 0.00386])
    return changed, torch.full_like(y, 3)


class Changed:
    """A client's records, of which those that are changed are replaced."""

    def __init__(self, records, change, of_all):
        self._records, self._change, self._of_all = records, change, of_all

    def __len__(self):
        return len(self._records)

    def __getattr__(self, name):
        return getattr(self._records, name)

    def batch(self, rows, size):
        x, y = self._records.batch(rows, size)
        for place in range(len(rows)) if self._of_all else np.flatnonzero(np.asarray(rows) == 0):
            x[place], y[place] = self._change(x[place], y[place])
        return x, y


@pytest.fixture
def with_change(monkeypatch):
    """Changes one record of client WHO, or all of them where the whole client is protected."""
    opened = client_hosts.client_records

    def apply(change, of_all):
        def changed(job, client, root, part):
            records = opened(job, client, root, part)
            return records if change is None or client != WHO else Changed(records, change, of_all)

        monkeypatch.setattr(client_hosts, "client_records", changed)

    return apply


def job_for(folder, case):
    algorithm, privacy, changes = CASES[case]
    document = {
        **SMALL, "data": DATA, "model": {"name": "linear"}, "rounds": ROUNDS, "local": {"batch_size": 8, "lr": 0.5},
        "output": {}, "algorithm": algorithm, **changes,
        "privacy": {**SMALL["privacy"], "accountant": "rdp", **privacy},
    }  # fmt: skip
    make_keys(folder / "keys", 4)
    return make_job(config.resolve(document), folder / "keys")


def tasks_for(host, size):
    """A task of each kind in the client's plan, with random models whose numbers have the given size."""
    planned = {slot.name for slot in host.algorithm.plan(host.protocol.client(WHO))}
    rng, encoding = np.random.default_rng(1), MessageEncoding(host.algorithm)
    steps = [step for step in client_steps(host.algorithm).values() if set(step.charges) <= planned]
    for t, step in enumerate(sorted(steps, key=lambda step: step.kind), 1):
        for repeated in range(2 if len(steps) == 1 else 1):  # the second one meets the state that the first one left
            tensors = {}
            for name, one in encoding.task_template(step).items():
                shape = [side if isinstance(side, int) else side[1] for side in one.shape]
                values = (size * rng.standard_normal(shape)).astype(np.float32)
                tensors[name] = (
                    (values.view(np.uint32) >> 16).astype("<u2") if one.dtype == "b2" else values.astype(DTYPES[one.dtype])
                )
            yield Task(t + repeated, step.kind, tensors)


def form(answer):
    """What a server sees of an answer but for the values of its tensors; and whether they can be sent at all."""
    tensors = unpack(answer.release) if answer.release else {}
    rows = [(name, array.dtype, array.shape, finite(array)) for name, array in sorted(tensors.items())]
    return answer.status, answer.code, answer.reason, len(answer.release), rows


def files(folder):
    """Size of each file of a ledger, and the lines that it charged."""
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    return sizes, (folder / "ledger.jsonl").read_text()


def answers(job, folder, size):
    """What a server, or a reader of logs, could see of the answers to the tasks, and the values of the releases."""
    seen, values = [], []
    with (
        warnings.catch_warnings(record=True) as warned,
        closing(client_hosts.make_host(job, WHO, folder, durable=False)) as host,
    ):
        warnings.simplefilter("always")
        for task in tasks_for(host, size):
            answer = host.answer(task)
            state = {name: (array.dtype, array.shape) for name, array in host.gate.state().items()}
            seen.append((task.round, task.kind, form(answer), state))
            values.append(answer.release)
    return [*seen, files(folder / client_key(WHO)), [str(one.message) for one in warned]], values


def neighbours(case, folder, with_change, sizes, changes=(gone, huge)):
    """Answers of a case by size of the models and change of the data."""
    job, found = job_for(folder, case), {}
    for size in sizes:
        for change in (None, *changes):
            with_change(change, job.protocol.privacy.unit == "client")
            found[size, change] = answers(job, folder / f"{size:g} {change and change.__name__}", size)
    return found


@pytest.mark.parametrize("case", CASES)
def test_answers_on_neighbouring_data_differ_in_noisy_values_only(case, tmp_path, with_change, caplog):
    with caplog.at_level("DEBUG"):
        found = neighbours(case, tmp_path, with_change, (0.1, 1e25))  # with 1e25 the outputs of most records are not finite
    for size in (0.1, 1e25):
        first, *others = [seen for (used, _), (seen, _) in found.items() if used == size]
        assert {status for _, _, (status, *_), _ in first[:-2]} == {"release"}
        assert all(seen == first for seen in others), (first, others)
    if case != "local":
        assert found[0.1, huge][1] != found[0.1, None][1]  # the record was read
    said = [record.getMessage() for record in caplog.records]
    assert said == said[: len(said) // len(found)] * len(found)


def test_a_record_that_overflows_when_it_is_scaled_leaves_no_line_in_a_log(tmp_path, with_change):
    """NumPy writes its warnings to standard error, which is the worker's log."""
    found = neighbours("feddp-kmeans", tmp_path, with_change, (0.1, 1e25), (infinite,))
    for size in (0.1, 1e25):
        (seen, values), (other, changed) = found[size, None], found[size, infinite]
        assert seen == other
        assert seen[-1] == []  # warnings
        assert values != changed  # the record was read


def deviation(slot, entry, local):
    """Deviation of the noise in a coordinate of what a slot releases, from the event that the accountant counts."""
    z = entry.noise_multiplier
    if isinstance(slot, DPSGDSlot):
        return local.lr * z * local.clip * math.sqrt(slot.steps) / (slot.rate * entry.records)
    bound = {"centres": math.sqrt(2), "lloyd": math.sqrt(2), "update": local.clip}.get(slot.name, 1.0)
    return slot.ratio * z * bound


@pytest.mark.parametrize(
    "case",
    ["global", "allocation", "full batches", "epsilon by client", "dp-ifca", "r-dpcfl", "feddp-kmeans", "em-fdro, clients"],
)
def test_without_its_records_a_client_releases_the_noise_that_epsilon_counts(case, tmp_path, with_change):
    """False alarms below 1e-7."""
    job = job_for(tmp_path, case)
    with_change(gone, True)
    entry, slots = job.protocol.client(WHO), {slot.name: slot for slot in job.algorithm.plan(job.protocol.client(WHO))}
    checked = set()
    with closing(client_hosts.make_host(job, WHO, tmp_path / "ledgers", durable=False)) as host:
        for task in tasks_for(host, 0.0):
            vectors = [array for array in unpack(host.answer(task).release).values() if array.size > 1]
            for vector, name in zip(vectors, client_steps(job.algorithm)[task.kind].charges[-1:], strict=bool(vectors)):
                expected = deviation(slots[name], entry, job.protocol.local)
                assert abs(vector.std() / expected - 1) < 5.4 / math.sqrt(2 * vector.size), (task.kind, vector.std(), expected)
                checked.add(name)
    assert checked == slots.keys() - {"select", "loss"}


def test_a_compressed_raw_update_of_the_largest_numbers_is_accepted(tmp_path, with_change):
    """A server that refuses it shows the records of one client by a missing answer, and no noise hides that."""
    job = job_for(tmp_path, "dp-fedavg, int8")
    check, updates = release_check(job.algorithm), []
    for change in (None, sentinel):
        with_change(change, True)
        with closing(client_hosts.make_host(job, WHO, tmp_path / f"{change}", durable=False)) as host:
            task = next(iter(tasks_for(host, 0.01)))
            release = unpack(host.answer(task).release)
        check(WHO, task.kind, release)
        updates.append(MessageEncoding(job.algorithm).decode_release(client_steps(job.algorithm)[task.kind], release)["update"])
    assert np.abs(updates[0]).max() < 1e3
    assert np.abs(updates[1]).max() > 3.4e38  # the record was read


def test_an_answer_that_cannot_be_sent_is_seen(tmp_path, with_change, monkeypatch):
    """The positive control: without the replacement of raw updates that are not finite, the server would see which data overflow."""
    monkeypatch.setattr(client_host, "_finite", lambda release: release)
    found = neighbours("dp-fedavg, asynchronous", tmp_path, with_change, (0.1,))
    assert found[0.1, gone][0] != found[0.1, None][0]


@pytest.mark.parametrize("case", SECURE)
def test_secure_sums_of_neighbouring_data_differ_in_masked_words_only(case, tmp_path, with_change, monkeypatch):
    algorithm, privacy = SECURE[case]
    job, answered = make(tmp_path, algorithm, privacy), ClientHost.answer
    of_all, found = privacy is CLIENT, []
    for change in (None, gone, huge):
        with_change(change, of_all)
        seen = []

        def answer(host, task, seen=seen):
            given = answered(host, task)
            seen.append((host.client, task.round, task.kind, form(given)))
            return given

        monkeypatch.setattr(ClientHost, "answer", answer)
        simulate(job, tmp_path / f"run {len(found)}", key_folder=tmp_path / "keys")
        found.append((seen, [files(path) for path in sorted((tmp_path / f"run {len(found)}" / "ledgers").iterdir())]))
    assert len(found[0][0]) > 3 * len(job.protocol.roster)
    assert all(other[0] == found[0][0] for other in found[1:])


def with_one_model(job, folder, monkeypatch):
    """What a server that sends one model in place of all to clients of secure sums gets from each: whether its coin says in, its answer."""
    seen, answered = [], InProcessFederation._answer

    def answer(fed, client, task):
        if task.kind != "masked_blocks":
            return answered(fed, client, task)
        in_sum = stream(key_of(job, client, task.round, task.kind), "coin").random() < 0.5
        fewer = Task(task.round, task.kind, {**task.tensors, "models": task.tensors["models"][:1].copy()})
        try:
            seen.append((in_sum, form(found := answered(fed, client, fewer))))
        except ValueError:
            seen.append((in_sum, "the worker ends"))
            found = Answer("lost")
        return found

    with (
        monkeypatch.context() as patch,
        federation(job, folder / "ledgers", key_folder=folder.parent / "keys", quorum=0.0) as fed,
    ):
        patch.setattr(InProcessFederation, "_answer", answer)
        fed.round = 1
        job.algorithm.round(job.algorithm.start(fed), 1, fed)
    return seen


def test_a_server_that_sends_too_few_models_does_not_learn_the_secret_coin(tmp_path, monkeypatch):
    """FedCAM needs two models: clients that their coin had out answered with zeros, and workers of the others ended by an error."""
    algorithm, privacy = SECURE["clusters"]
    job = make(tmp_path, {**algorithm, "base": "fedcam"}, privacy)
    seen = with_one_model(job, tmp_path / "guarded", monkeypatch)
    assert {in_sum for in_sum, _ in seen} == {True, False}
    assert {(found[0], found[1]) for _, found in seen} == {("refused", "template")}
    assert not {kind for client in range(8) for _, kind in charged(tmp_path / "guarded", client)} & {"masked_blocks"}
    declared = RRCluster.capabilities_for
    monkeypatch.setattr(RRCluster, "capabilities_for", lambda *facts: replace(declared(*facts[-2:]), least_models=1))
    seen = with_one_model(job, tmp_path / "careless", monkeypatch)
    assert {(in_sum, found == "the worker ends") for in_sum, found in seen} == {(True, True), (False, False)}


@pytest.mark.parametrize("case", [case for case, (algorithm, *_) in CASES.items() if algorithm["name"] == "rr-cluster"])
def test_too_few_models_are_refused_and_nothing_is_charged(case, tmp_path):
    """The worker of a client that was to score every cluster ended by an error, after the charge."""
    job = job_for(tmp_path, case)
    with closing(client_hosts.make_host(job, WHO, tmp_path / "ledgers", durable=False)) as host:
        tasks = {task.kind: task for task in tasks_for(host, 0.1)}
        for kind in tasks.keys() & {"assign_and_train", "name_cluster"}:
            tasks[kind].tensors["models"] = tasks[kind].tensors["models"][:1].copy()
            answer = host.answer(tasks[kind])
            assert (answer.status, answer.code) == ("refused", "template")
        assert host.gate.spent() == []
