"""Figures of personal models: of clients that join late, are lost, report late, and after a restart of the observer."""

from __future__ import annotations

import contextlib
import math
import threading
from contextlib import closing, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import SMALL

import dpcfl_net
from dpcfl_net.core import runlog
from dpcfl_net.core.clock import AwakeClock
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.types import Answer
from dpcfl_net.data.partition import open_client
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.experiment.job_files import client_slice
from dpcfl_net.federation.in_process import InProcessFederation
from dpcfl_net.runtime import evaluation
from dpcfl_net.runtime import observer as observer_module
from dpcfl_net.runtime import worker as worker_module
from dpcfl_net.runtime.client_hosts import make_host
from dpcfl_net.runtime.kept_figures import FIGURES, MOST_KEPT, KeptFigures
from dpcfl_net.runtime.observer import Observer
from dpcfl_net.runtime.specs import ObserverSpec
from dpcfl_net.runtime.worker import Worker
from dpcfl_net.training.dpsgd import Evaluator
from dpcfl_net.training.models import initial, skeleton
from dpcfl_net.transport.client_events import ClientEvent
from dpcfl_net.transport.identities import make_identities
from dpcfl_net.transport.keys import make_keys
from dpcfl_net.transport.observer_notes import Models, Personal, Span

DATA = {"dataset": "digits", "clients": [2, 2], "train_per_client": 100, "test_per_client": 20}
CHANGES = {"data": DATA, "model": {"name": "linear"}, "rounds": 6, "algorithm": {"name": "mr-mtl"}}

FEDPER = {"model": {"name": "digits-cnn"}, "algorithm": {"name": "dp-fedper", "sampling_rate": 0.5}}
DRAWN = {
    **FEDPER,
    "privacy": {"unit": "client", "trust": "trusted-server", "epsilon": 8.0, "delta": 1e-2},
}
COINS = {
    **FEDPER, "data": {**DATA, "clients": [4], "shift": "none"}, "local": {"batch_size": 32, "lr": 0.5, "deadline_s": 0.2},
    "privacy": {"unit": "client", "trust": "secure-aggregation", "epsilon": 10, "delta": 0.1, "noise": "seeded", "noise_seed": "5eed" * 16},
}  # fmt: skip


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder, 4)
    make_identities(folder, range(4))
    return folder


@pytest.fixture
def job_of(keys):
    return lambda **changes: make_job(config.resolve({**SMALL, **CHANGES, **changes}), keys)


@contextlib.contextmanager
def observing(job, folder):
    spec = ObserverSpec(folder, "", "", folder, folder, None, 1)
    with closing(Observer(spec, job)) as observer:
        yield observer


def report(observer, t, accuracies):
    for client, accuracy in accuracies.items():
        observer.take(Personal(client, t, accuracy, 1 - accuracy))


def published(observer, job, t, clients=()):
    named = None if clients is None else list(clients)
    observer.take(Models(t, [None] * 4, np.zeros((1, job.protocol.model.parameters), np.float32), clients=named))


def silent(observer, t, clients):
    """Reports of clients that have no personal model yet."""
    for client in clients:
        observer.take(Personal(client, t, None, None))


def written_lines(folder):
    return [line for line in runlog.read(RunFolder(folder).metrics) if "accuracy_by_client" in line]


def written(folder):
    return {line["round"]: line["accuracy_by_client"] for line in written_lines(folder)}


@pytest.fixture
def impatient(monkeypatch):
    """An observer that gives rounds up as soon as two later ones are finished."""
    monkeypatch.setattr(evaluation, "GIVEN_UP_S", 0.0)


def test_reports_of_clients_that_connect_after_two_later_rounds_count_in_their_rounds(job_of, tmp_path):
    """Rounds take milliseconds, and a client that starts again may reach the observer after the coordinator has."""
    job = job_of()
    with observing(job, tmp_path) as observer:
        for t in (2, 3, 4):
            published(observer, job, t)
        for client in range(4):
            for t in (2, 3, 4):
                report(observer, t, {client: t / 10})
        assert written(tmp_path) == {t: [t / 10] * 4 for t in (2, 3, 4)}


def test_a_round_with_a_lost_client_is_given_up_after_two_rounds_and_ten_seconds(job_of, tmp_path, monkeypatch):
    job, clock = job_of(), [0.0]
    monkeypatch.setattr(AwakeClock, "now", lambda self: clock[0])
    with observing(job, tmp_path) as observer:
        for t in (1, 2, 3):
            report(observer, t, dict.fromkeys((0, 1, 2), t / 10))
            published(observer, job, t)
        for seconds, rounds in ((9.9, []), (10.0, [1]), (60.0, [1])):
            clock[0] = seconds
            report(observer, 4, {0: 0.4})
            assert list(written(tmp_path)) == rounds


def test_a_report_does_not_look_at_all_clients():
    """With 16,000 clients whose schedule has them in some rounds, the reports of one round took a minute."""
    looks: list[int] = []
    roster = [SimpleNamespace(id=client, is_there=lambda t, client=client: not looks.append(client)) for client in range(200)]
    protocol = SimpleNamespace(
        privacy=SimpleNamespace(central=False, secure=False), has_schedule=True, rounds=2, roster=roster,
        client=roster.__getitem__,
    )  # fmt: skip
    figures = evaluation.PersonalFigures(SimpleNamespace(protocol=protocol), len(roster), AwakeClock().now)
    done = [t for t in (1, 2) for client in range(len(roster)) for t, _ in figures.take(Personal(client, t, 0.5, 0.5))]
    assert done == [1, 2]
    assert len(looks) == 4 * len(roster)  # in each round once for the round, and once for each report


def test_a_server_that_names_the_clients_of_a_round_again_replaces_them(job_of, tmp_path):
    job = job_of(**DRAWN)
    with observing(job, tmp_path) as observer:
        published(observer, job, 1, clients=[0, 1, 2])
        report(observer, 1, {0: 0.1, 1: 0.1})
        assert not written(tmp_path)
        published(observer, job, 1, clients=[0, 1])
        assert list(written(tmp_path)) == [1]


def test_a_lost_client_keeps_its_figures_and_the_others_go_on(job_of, tmp_path, impatient):
    job = job_of()
    with observing(job, tmp_path) as observer:
        report(observer, 1, {0: 0.1, 1: 0.1, 2: 0.1, 3: 0.1})
        for t in range(2, 7):
            report(observer, t, dict.fromkeys((0, 1, 2), t / 10))
            published(observer, job, t)
        assert sorted(written(tmp_path)) == [1, 2, 3, 4]  # client 3 may still report the others
        observer.evaluate_last_round()
    assert written(tmp_path) == {t: [t / 10] * 3 + [0.1] for t in range(1, 7)}
    (warning,) = runlog.read(RunFolder(tmp_path).warnings)
    assert warning["text"].startswith("no accuracy after the last round was reported by client 3: the final one is that of an")


@pytest.mark.parametrize(("reported", "named"), [(1, "1, 2 and 1 more"), (2, "2, 3")])
def test_many_clients_without_a_report_are_counted(job_of, tmp_path, monkeypatch, reported, named):
    monkeypatch.setattr(observer_module, "MOST_NAMED", 2)
    with observing(job_of(), tmp_path) as observer:
        report(observer, 5, dict.fromkeys(range(4), 0.5))
        report(observer, 6, dict.fromkeys(range(reported), 0.6))
        observer.evaluate_last_round()
    (warning,) = runlog.read(RunFolder(tmp_path).warnings)
    assert f"was reported by clients {named}: the final one" in warning["text"]


def test_a_hostile_server_does_not_end_the_observer(job_of, tmp_path):
    """It sends models, assignments or clients of another job; the figures of its next round are written."""
    for k, changes in enumerate(
        ({"algorithm": {"name": "dp-ifca", "clusters": 2}}, {"algorithm": {"name": "km-cdpfl", "clusters": 2}})
    ):
        job, folder = job_of(**changes), tmp_path / str(k)
        most, p = job.algorithm.capabilities.published_models, job.protocol.model.parameters
        models, none = np.zeros((most, p), np.float32), np.zeros((0, p), np.float32)
        with observing(job, folder) as observer:
            observer.take(Models(1, [0] * 9, models))
            observer.take(Models(1, [], models))
            observer.take(Models(1, [None] * 4, none))
            observer.take(Models(1, [None] * 4, models, clients=[4], labels={"as sent": [0]}))
            assert not written(folder)
            observer.take(Models(1, [0] * 4, models))
        assert list(written(folder)) == [1]


def test_times_of_a_round_that_the_job_does_not_have_are_dropped(job_of, tmp_path):
    """A timeline shows the last rounds: one client would hide the others by times of round 1,000,000."""
    job = job_of()
    with observing(job, tmp_path) as observer:
        for t in (0, 6, 7, 10**6):
            observer.take(Span("client 1", "train", t, 1.0, 2.0))
    assert [line["round"] for line in runlog.read(RunFolder(tmp_path).spans)] == [6]


def test_figures_that_all_clients_have_reported_come_without_a_warning(job_of, tmp_path):
    job = job_of()
    with observing(job, tmp_path) as observer:
        for t in (5, 6):
            report(observer, t, dict.fromkeys(range(4), t / 10))
            published(observer, job, t)
        observer.evaluate_last_round()
    with observing(job, tmp_path) as observer:  # started again, without the reports of the one before
        observer.evaluate_last_round()
    assert not RunFolder(tmp_path).warnings.exists()


def test_a_report_that_comes_late_counts_in_its_round_and_not_over_newer_ones(job_of, tmp_path, impatient):
    job = job_of()
    with observing(job, tmp_path) as observer:
        report(observer, 1, {0: 0.1, 1: 0.1, 2: 0.1})
        report(observer, 2, {0: 0.2, 1: 0.2, 2: 0.2, 3: 0.2})
        report(observer, 1, {3: 0.1})
        for t in (3, 5):
            report(observer, t, dict.fromkeys((0, 1, 2), t / 10))
            published(observer, job, t)
        report(observer, 3, {3: 0.3})  # given up two rounds ago
        report(observer, 5, {3: 0.5})
    assert written(tmp_path) == {1: [0.1] * 4, 2: [0.2] * 4, 3: [0.3] * 3 + [0.2], 5: [0.5] * 4}


def test_an_observer_that_starts_again_keeps_the_figures_of_lost_clients(job_of, tmp_path):
    job = job_of()
    with observing(job, tmp_path) as observer:
        report(observer, 1, {0: 0.1, 1: 0.1, 2: 0.1, 3: 0.1})
    with observing(job, tmp_path) as observer:
        report(observer, 6, {0: 0.6, 1: 0.6, 2: 0.6})
        observer.evaluate_last_round()
    assert written(tmp_path) == {1: [0.1] * 4, 6: [0.6] * 3 + [0.1]}


def test_an_observer_that_starts_again_knows_who_was_drawn_in_a_secret_sample(job_of, tmp_path):
    job = job_of(**DRAWN)
    with observing(job, tmp_path) as observer:
        published(observer, job, 1, [1, 3])
        report(observer, 1, {1: 0.25, 3: 0.75})
    RunFolder(tmp_path).metrics.open("a").write('{"view":"observer","round":1,"f_acc":0.1,"f_loss":0.1}\n')
    with observing(job, tmp_path) as observer:
        published(observer, job, 2, [3])
        report(observer, 2, {3: 0.875})
    figures = written_lines(tmp_path)
    assert [line["reported"] for line in figures] == [[1, 3], [1, 3]]
    assert [line["accuracy_by_client"][1] for line in figures] == [0.25, 0.25]
    assert [line["accuracy_by_client"][3] for line in figures] == [0.75, 0.875]


def test_a_server_that_starts_again_does_not_end_a_round_before_its_reports(job_of, tmp_path):
    """It does not know whom it drew; workers that start again report their personal models."""
    job = job_of(**DRAWN)
    with observing(job, tmp_path) as observer:
        published(observer, job, 1, [1, 3])
        report(observer, 1, {1: 0.25, 3: 0.75})
    with observing(job, tmp_path) as observer:  # all processes were killed; figures of rounds 2 and 3 were on their way
        published(observer, job, 3, None)
        assert sorted(written(tmp_path)) == [1]
        report(observer, 3, {3: 0.875})
        report(observer, 2, {0: 0.5})
        report(observer, 1, {1: 0.25})
        published(observer, job, 4, [])
        published(observer, job, 5, [])
        published(observer, job, 6, None)
        observer.evaluate_last_round()
    figures = written(tmp_path)
    assert sorted(figures) == [1, 4, 5, 6]  # of round 3 reports may be missing
    for t in (4, 5, 6):
        assert (figures[t][0], figures[t][1], figures[t][3]) == (0.5, 0.25, 0.875)


def test_clients_that_no_coin_has_drawn_use_the_servers_model_in_each_round(job_of, tmp_path):
    """Secure sums with secret coins: rounds end at once, and a restart of the observer changes no figure."""
    job = job_of(**COINS)
    for folder, observers in ((tmp_path / "whole", 1), (tmp_path / "parts", 3)):
        rounds = iter((1, 2, 3))
        for _ in range(observers):
            with observing(job, folder) as observer:
                for t in rounds if observers == 1 else [next(rounds)]:
                    report(observer, t, dict.fromkeys(range(t), (t + 1) / 8))
                    silent(observer, t, range(t, 4))
                    observer.take(Models(t, [0] * 4, trained(job, t)[None]))
                    assert max(written(folder)) == t
    whole, parts = ([{**line, "time": 0} for line in written_lines(tmp_path / name)] for name in ("whole", "parts"))
    assert whole == parts
    assert [line["reported"] for line in whole] == [[0], [0, 1], [0, 1, 2]]
    for line in whole:
        assert line["accuracy_by_client"][3] == accuracy_of(job, trained(job, line["round"]), 3)
    assert len({line["accuracy_by_client"][3] for line in whole}) > 1


def test_a_client_evaluates_as_many_records_whether_its_coin_has_drawn_it_or_not(job_of, keys, tmp_path, monkeypatch):
    """It does so between two answers of a secure sum: the time of the second would tell who has a personal model."""
    job = job_of(**COINS)
    hosts = {c: make_host(job, c, tmp_path, durable=False, key_folder=keys) for c in job.protocol.clients}
    fed = InProcessFederation(job.protocol, hosts)
    fed.round = 1
    job.algorithm.round(job.algorithm.start(fed), 1, fed)
    work, figures, evaluate = [], {}, Evaluator.accuracy_and_loss
    counted = lambda self, theta, data: (work.append(len(data)), evaluate(self, theta, data))[1]  # noqa: E731
    monkeypatch.setattr(Evaluator, "accuracy_and_loss", counted)
    for client, host in hosts.items():
        worker = SimpleNamespace(
            host=host, job=job, spec=SimpleNamespace(client=client, data_root=None), _turn=nullcontext, _figures=KeptFigures(host.folder),
        )  # fmt: skip
        figures[client] = Worker._evaluated(worker, 1)
    drawn = [client for client, host in hosts.items() if host.personal_model() is not None]
    assert 0 < len(drawn) < len(hosts)
    assert [client for client in hosts if figures[client] != (None, None)] == drawn
    assert work == [20] * len(hosts)


@pytest.mark.parametrize(("deadline_s", "last"), [(None, (3, 0.75, 1.0)), (1.0, (3, None, None))])
def test_a_client_that_starts_again_reports_the_figures_of_models_that_it_has_trained_further(tmp_path, deadline_s, last):
    """Those of rounds before the last one are gone with the models; a killed observer may not have written them."""
    kept = KeptFigures(tmp_path)
    for t, figures in ((2, (0.5, None)), (1, (0.25, 1.5)), (3, (None, None))):
        kept.add(t, *figures)
    told = []
    worker = SimpleNamespace(
        host=SimpleNamespace(
            algorithm=SimpleNamespace(capabilities=SimpleNamespace(personal=True)),
            gate=SimpleNamespace(answered_round=lambda: 3),
        ),
        _figures=KeptFigures(tmp_path), _link=lambda: SimpleNamespace(personal=lambda *figure: told.append(figure)),
        _evaluated=lambda t: (0.75, 1.0), job=SimpleNamespace(protocol=SimpleNamespace(local=SimpleNamespace(deadline_s=deadline_s))),
    )  # fmt: skip
    Worker._report_personal_again(worker)
    assert told == [(1, 0.25, 1.5), (2, 0.5, None), last]  # with a deadline nothing is evaluated at the start


def test_a_client_with_a_deadline_never_waits_for_a_core_after_it(job_of, keys, tmp_path):
    """A server that chose when another client computes would learn from the next answer whether it does: its secret coin."""
    job, seen = job_of(**COINS), []
    host = make_host(job, 1, tmp_path, durable=False, key_folder=keys)
    worker = Worker.__new__(Worker)
    worker.job, worker.host, worker.spec = job, host, SimpleNamespace(client=1, data_root=None)
    worker._kept_turn, worker._span, worker._answers, worker._wake = (
        None,
        None,
        [],
        SimpleNamespace(wake=lambda: seen.append("answer")),
    )
    worker._turn = lambda: (seen.append("turn"), nullcontext())[1]
    worker._wait_for_the_deadline = lambda event: seen.append("deadline")
    worker._report = lambda spans: None
    outbox = SimpleNamespace(personal=lambda *figure: seen.append(figure))
    worker._link = lambda: outbox
    with closing(host):
        for round, task in ((1, "masked_update"), (2, "secure_keys")):
            worker._work(ClientEvent("task", "0" * 32, round, task))
            assert not worker._keeps_turn  # a process of several clients would wait for itself
        assert seen == ["turn", "deadline", "answer", (1, None, None), "deadline", "answer"]
        seen.clear()
        host.gate.answered_round = lambda: 2
        worker._report_personal_again()
    assert seen == [(1, None, None)]


def test_the_figures_of_a_model_whose_task_ends_in_a_crash_are_not_kept(job_of, keys, tmp_path, monkeypatch):
    """With a deadline a model is evaluated before it is stored, and a crash in between loses it."""
    job, told = job_of(**COINS), []
    host = make_host(job, 1, tmp_path, durable=False, key_folder=keys)
    model = np.zeros(job.protocol.model.parameters, np.float32)
    spec = SimpleNamespace(client=1, observer="", goodbye_ends=False, data_root=None)
    worker = Worker(spec, job, host, None, nullcontext, ("", ""))
    worker._outbox = outbox = SimpleNamespace(personal=lambda *figure: told.append(figure))
    monkeypatch.setattr(worker, "_wait_for_the_deadline", lambda event: told.append("deadline"))
    monkeypatch.setattr(worker, "_report", lambda spans: None)
    monkeypatch.setattr(host, "answer", lambda task: (host.before_storing({"model": model}), Answer("release"))[1])
    event = ClientEvent("task", "0" * 32, 1, "masked_update")

    def crash(moment):
        raise Crashed

    with closing(host):
        with monkeypatch.context() as patch:
            patch.setattr(worker_module, "_sleep_until", crash)
            with pytest.raises(Crashed):
                worker._answer(event, outbox)
        assert KeptFigures(host.folder).before(9) == []
        worker._answer(event, outbox)
        assert told == ["deadline", *KeptFigures(host.folder).before(9)]
        assert told[1][1] is not None
        monkeypatch.setattr(host, "answer", lambda task: (host.before_storing({"model": model}), Answer("refused"))[1])
        worker._answer(ClientEvent("task", "0" * 32, 2, "masked_update"), outbox)
    assert told[-1] == (2, None, None)  # of the stored model, which is none


def test_kept_figures_are_bounded_and_a_damaged_file_is_named_and_replaced(tmp_path, caplog):
    kept = KeptFigures(tmp_path)
    for t in range(1, MOST_KEPT + 4):
        kept.add(t, 0.5, 0.5)
    assert [t for t, *_ in KeptFigures(tmp_path).before(100)] == list(range(4, MOST_KEPT + 4))
    for damaged in (
        "[[1, 0.5",
        "[5]",
        "{}x",
        "[[1, 7.0, 0.5]]",
        '[[1, "x", 0.5]]',
        "[[-1, 0.5, 0.5]]",
        "[[1, 0.5, NaN]]",
        "[" * 10**5,
    ):
        (tmp_path / FIGURES).write_text(damaged)
        caplog.clear()
        kept = KeptFigures(tmp_path)
        assert kept.before(100) == []
        assert FIGURES in caplog.text
    kept.add(7, 0.5, 0.5)
    kept.add(7, 0.75, None)  # a client that starts again evaluates its model once more
    assert KeptFigures(tmp_path).before(100) == [(7, 0.75, None)]


class Crashed(Exception):
    """The process ends here."""


def trained(job, t):
    """A model of the server: another one in each round."""
    return np.random.default_rng(t).standard_normal(job.protocol.model.parameters).astype(np.float32)


def test_clusters_of_clients_with_personal_models_are_scored_once_whenever_the_figures_come(job_of, tmp_path):
    job = job_of()
    models = np.zeros((2, job.protocol.model.parameters), np.float32)
    for _ in range(2):  # the second observer hears of round 2 again
        with observing(job, tmp_path) as observer:
            observer.take(Models(1, [None, 0, 1, 1], models))
            report(observer, 2, {0: 0.1, 1: 0.1, 2: 0.1, 3: 0.1})
            observer.take(Models(2, list(job.experiment.true_clusters), models))
    scores = [line for line in runlog.read(RunFolder(tmp_path).clusters) if "assigned" in line]
    assert [(line["round"], line["ari"], line["recovered"]) for line in scores] == [(2, 1.0, True)]


@pytest.mark.parametrize("name", ["local", "mr-mtl"])
def test_a_client_that_joins_late_counts_with_the_initial_model_before(name, tmp_path):
    changes = {**CHANGES, "algorithm": {"name": name}, "availability": {"clients": {2: [[3, None]]}}, "output": {}}
    run = dpcfl_net.run({**SMALL, **changes}, tmp_path, "in-process", progress=False)
    figures = written(run.path)
    assert sorted(figures) == [1, 2, 3, 4, 5, 6]
    assert figures[1][2] == figures[2][2] == accuracy_before_training(run.job, 2)
    assert figures[6][2] != figures[2][2]
    assert figures[6][0] != accuracy_before_training(run.job, 0)


def test_clients_of_one_process_evaluate_their_models_as_clients_of_their_own(tmp_path):
    seeded = {**SMALL["privacy"], "noise": "seeded", "noise_seed": "5eed" * 16}
    changes = {**SMALL, **CHANGES, "rounds": 2, "privacy": seeded}
    together = {**changes, "runtime": {"clients_per_worker": 2}}
    shared = dpcfl_net.run(together, tmp_path / "shared", "network", progress=False)
    alone = dpcfl_net.run(changes, tmp_path / "alone", "in-process", progress=False)
    assert written(shared.path) == written(alone.path)


def accuracy_before_training(job, client):
    m = job.protocol.model
    return accuracy_of(job, initial(m.name, tuple(m.input_shape), m.classes, m.initial_seed), client)


def accuracy_of(job, theta, client):
    settings, piece = client_slice(job, client, None)
    m = job.protocol.model
    evaluator = Evaluator(skeleton(m.name, tuple(m.input_shape), m.classes))
    return evaluator.accuracy_and_loss(theta, open_client(settings, piece, None, "test"))[0]


def test_a_client_that_keeps_its_turn_computes_in_it_again():
    """In a process of several clients it waited for itself for ever, between the check of its model and its first step."""
    lock, worker = threading.Lock(), Worker.__new__(Worker)

    @contextlib.contextmanager
    def turn():
        assert lock.acquire(timeout=1)
        yield
        lock.release()

    worker._turn, worker._keeps_turn, worker._kept_turn = turn, True, None
    worker._at_work, worker._arrived = False, math.inf
    for _ in range(2):
        with worker._computing():
            assert lock.locked()
            assert worker._at_work  # the coordinator counts the timeout from then on
    worker._kept_turn.close()
    assert not lock.locked()


@pytest.mark.parametrize(("dismissed", "goodbye_ends"), [(True, True), (True, False), (False, True)])
def test_keys_of_answers_are_erased_only_after_a_goodbye_that_ends_the_run(dismissed, goodbye_ends):
    """A client that is started on demand, or stopped, may be asked again for the answer that a crashed server has lost."""
    erased = []
    host = SimpleNamespace(gate=SimpleNamespace(end=lambda: erased.append(True)), close=lambda: None)
    worker = Worker(SimpleNamespace(goodbye_ends=goodbye_ends), None, host, None, nullcontext, ("", ""))
    worker._report_personal_again = lambda: None
    worker._talk = lambda: (setattr(worker, "_dismissed", dismissed), worker._tasks.put(None))
    worker.serve()
    assert erased == [True] * (dismissed and goodbye_ends)
