"""Drop-outs, overflow, time and colluders in secure sums: what a round loses, and that epsilon does not."""

from __future__ import annotations

import contextlib
import math
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import zmq
from sum_play import added, hosts_closed, hosts_of, sum_job, sums_of, truth  # noqa: F401 - a fixture

from dpcfl_net.algorithms import secure_clusters
from dpcfl_net.attacks.audit.bounds import Errors, by_gdp
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.types import Answer, Task
from dpcfl_net.federation import secure_claim, virtual
from dpcfl_net.federation.client import Client
from dpcfl_net.federation.client_host import ClientHost
from dpcfl_net.federation.in_process import InProcessFederation
from dpcfl_net.federation.release_check import client_endpoint_arguments
from dpcfl_net.federation.secure.job_terms import terms_of
from dpcfl_net.federation.secure.terms import Terms
from dpcfl_net.federation.virtual_clock import VirtualClock, VirtualNetwork, trips
from dpcfl_net.privacy.accounting.accountant import epsilon
from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian
from dpcfl_net.privacy.secure_sum import LARGEST_WORD, SumCode
from dpcfl_net.runtime import worker
from dpcfl_net.runtime.client_hosts import make_host
from dpcfl_net.runtime.specs import WorkerSpec
from dpcfl_net.transport.endpoint import ClientEvent, Link, ServerEndpoint
from dpcfl_net.transport.keys import COORDINATOR, read_pair
from dpcfl_net.transport.links.schedule import Schedule

FALSE_ALARM = 1e-7


class Absent:
    """A client that does not answer one kind of task in one round."""

    def __init__(self, host, round: int, kind: str) -> None:
        self.host, self.round, self.kind = host, round, kind

    def answer(self, task) -> Answer:
        gone = (task.round, task.kind) == (self.round, self.kind)
        return Answer("refused", code="gone") if gone else self.host.answer(task)


def run_rounds(job, hosts, rounds: int, fed=None):
    """States after each round, the first one before any."""
    fed = fed or InProcessFederation(job.protocol, hosts, quorum=0.25)
    states = [job.algorithm.start(fed)]
    for t in range(1, rounds + 1):
        fed.round = t
        states.append(job.algorithm.round(states[-1], t, fed))
    return states


@pytest.mark.scenario(24)
def test_too_many_drop_outs_abort_the_sum_and_the_run_goes_on(tmp_path, evidence, monkeypatch):
    words, job = truth(monkeypatch), sum_job(tmp_path, 4)
    said = []
    for kind in ("secure_keys", "secure_shares", "masked_update", "secure_survivors", "secure_unmask"):
        hosts = hosts_of(job, tmp_path, kind)
        for client in (0, 3):
            hosts[client] = Absent(hosts[client], 1, kind)
        start, aborted, after = run_rounds(job, hosts, 2)
        said.append(aborted.diagnostics["secure sum"])
        assert "needs 3" in said[-1] or "too few valid shares" in said[-1]
        assert np.array_equal(start.models, aborted.models)
        assert after.diagnostics == {"secure sum": "ok", "survivors": 4}
        assert not np.array_equal(after.models, aborted.models)
    one = hosts_of(job, tmp_path, "one")
    one[3] = Absent(one[3], 1, "masked_update")
    assert run_rounds(job, one, 1)[-1].diagnostics == {"secure sum": "ok", "survivors": 3}
    evidence.got(f"2 of 4 gone at any of the 5 stages: aborted ({said[2]!r}), model unchanged, the next round whole")
    for name in ("survivors_needed", "share_threshold", "witnesses_needed"):
        monkeypatch.setattr(Terms, name, property(lambda self: 2))
    words.clear()
    sums = sums_of(job, hosts_of(job, tmp_path, "low"))
    ask = sums.ask
    sums.ask = lambda t, kind, tasks: ask(t, kind, {c: task for c, task in tasks.items() if c in (1, 2)})
    played = sums.play(1)
    assert np.array_equal(played.total, added(words[1, client] for client in (1, 2)))
    code = job.algorithm.secure_code(4)
    stated = code.noise_multiplier * code.sensitivity
    assert math.sqrt(2) * code.share_deviation < 0.82 * stated
    evidence.control("with a threshold of 2 the sum of 2 is opened: its noise is .82 of what epsilon counts")


@pytest.mark.scenario(25)
def test_overflow_is_refused_at_the_start_and_costs_utility_only(tmp_path, evidence, monkeypatch):
    with pytest.raises(ConfigError, match="does not fit into 32 bits"):
        sum_job(
            tmp_path / "large", 4, algorithm={"name": "secure_algorithm:SecureMean", "largest": 1e9},
            privacy={"unit": "sample", "delta": 1e-2}, local={"batch_size": 16, "lr": 0.1},
        )  # fmt: skip
    code = SumCode(d=3, participants=50, honest=34, noise_multiplier=0.5, clip=1.0)
    vectors, keys = np.zeros((50, 3)), [bytes([client]) * 32 for client in range(50)]
    vectors[:, 0] = 1.0  # the worst case: all of norm clip, in one direction
    exact = sum(code.encode(v).astype(np.int64) + code.noise_share(key) for v, key in zip(vectors, keys, strict=True))
    found = added(code.to_words(code.encode(v), key) for v, key in zip(vectors, keys, strict=True))
    assert np.array_equal(found.view(np.int32), exact)
    assert 0.9 * LARGEST_WORD < exact[0] < LARGEST_WORD
    evidence.got(
        "a job that does not fit is refused when it is made (does not fit into 32 bits); the worst case of 50 clients fits"
    )
    larger = SumCode(d=3, participants=50, honest=34, noise_multiplier=0.5, clip=1.0)
    monkeypatch.setitem(larger.__dict__, "scale", 2 * code.scale)
    exact = sum(larger.encode(v).astype(np.int64) + larger.noise_share(key) for v, key in zip(vectors, keys, strict=True))
    found = added(larger.to_words(larger.encode(v), key) for v, key in zip(vectors, keys, strict=True))
    assert larger.decode(found)[0] < 0 < exact[0]
    assert np.array_equal(found, exact.astype(np.uint32))  # a function of the noisy sum: privacy is unharmed
    evidence.control("with twice the scale the sum of 50 positive numbers is negative, and still a function of the noisy sum")


def answer_times(job, hosts, monkeypatch) -> tuple[np.ndarray, np.ndarray]:
    """(rounds, 5, clients) seconds from request to answer, and (rounds, clients) whether the client trained.

    Training takes half a second, and a stage longer at a client that was in a sum before, whose ledger holds a state.
    """
    clients, rounds = len(hosts), job.protocol.rounds
    trained, sgd = list[bool](), Client.sgd
    monkeypatch.setattr(Client, "sgd", lambda self, *args, **how: (trained.append(True), sgd(self, *args, **how))[1])
    coins, before = list[bool](), set[int]()

    class Timed(virtual.VirtualFederation):
        def _answer(self, client, task):
            count, answer = len(trained), super()._answer(client, task)
            into = len(trained) > count
            if task.kind == "masked_update":
                coins.append(into)
                before.update([client] if into else [])
                taken = 0.5 if into else 0.01
            else:
                taken = 0.05 if client in before else 0.01
            self._answers[client] = (self._answers[client][0], taken)
            return answer

    fed = Timed(job.protocol, hosts, VirtualClock(VirtualNetwork(dict.fromkeys(hosts, Schedule()))))
    lines = []
    fed.on_message = lines.append
    run_rounds(job, hosts, rounds, fed)
    asked, answered = (
        np.array([line["time"] for line in lines if line["kind"] == kind]).reshape(rounds, 5, clients)
        for kind in ("TASK", "RESULT")
    )
    return answered - asked, np.array(coins).reshape(rounds, clients)


MASKED_STEP = 2  # of the five steps of a sum
STAGES = [0, 1, 3, 4]


def coins_before(coins: np.ndarray) -> np.ndarray:
    """(rounds, clients): whether the client was in a sum of an earlier round."""
    return np.vstack([np.zeros_like(coins[:1]), np.logical_or.accumulate(coins, axis=0)[:-1]])


@pytest.mark.scenario(39)
def test_answer_times_and_drop_outs_do_not_follow_the_secret_coin(tmp_path, evidence, monkeypatch):
    """A server that closes a round early would lose exactly the clients that train; later stages tell who trained before."""
    local = {"batch_size": 16, "lr": 0.1, "deadline_s": 1.0}
    job = sum_job(tmp_path, 8, local=local)
    assert job.protocol.privacy.secure_aggregation.stage_deadline_s == 0.2
    seconds, coins = answer_times(job, hosts_of(job, tmp_path), monkeypatch)
    assert 4 <= coins.sum() <= 28
    assert 4 <= coins_before(coins).sum() <= 28
    assert np.allclose(seconds[:, MASKED_STEP], 1.0, rtol=0, atol=1e-5)  # of times since the epoch
    assert np.allclose(seconds[:, STAGES], 0.2, rtol=0, atol=1e-5)
    answered = []
    for task, taken, left in [
        ("masked_update", 0.01, -math.inf), ("masked_update", 0.5, -math.inf), ("secure_keys", 0.01, -math.inf),
        ("secure_unmask", 0.05, -math.inf), ("masked_update", 0.9, 100.8), ("masked_update", 2.5, -math.inf),
    ]:  # fmt: skip
        clock = SimpleNamespace(now=100.0 + taken)  # the real worker's wait, on a clock that only its sleep moves
        fake = SimpleNamespace(
            monotonic=lambda clock=clock: clock.now, sleep=lambda s, clock=clock: setattr(clock, "now", clock.now + s)
        )
        with monkeypatch.context() as patch:
            patch.setattr(worker, "time", fake)
            event = SimpleNamespace(task=task, arrived=100.0)
            own = SimpleNamespace(job=job, _left=left)
            worker.Worker._wait_for_the_deadline(own, event)
        answered.append(clock.now)
        assert own._left == pytest.approx(clock.now)  # from which the next one counts, if it has waited for this one
    assert answered == pytest.approx([101.0, 101.0, 100.2, 100.2, 101.8, 103.0])
    evidence.got(
        f"all {seconds.size} answers of 4 rounds leave at their deadline, in (trained) or out: any time limit loses all or none"
    )
    with monkeypatch.context() as patch:
        patch.setattr(virtual, "trips", lambda start, work, network, deadline_s: trips(start, work, network))
        again, same = answer_times(job, hosts_of(job, tmp_path, "unpaced"), monkeypatch)
    assert np.array_equal(same, coins)
    assert np.array_equal(again[:, MASKED_STEP] > 0.25, coins)
    assert np.array_equal(again[:, 0] > 0.03, coins_before(coins))
    evidence.control(
        "without the wait, a limit of .25 s drops exactly the clients whose coin says in: all 32 coins are read, and a round's "
        "first stage tells who was in before"
    )


def test_the_size_of_a_report_does_not_tell_whether_another_client_has_used_the_core(tmp_path):
    """Clients that share a core compute in turn: one whose secret coin is in makes the next one wait."""

    able = SimpleNamespace(capabilities=SimpleNamespace(personal=False))
    without_personal = SimpleNamespace(answer=lambda task: Answer("release"), algorithm=able)

    def reported(job, waited_s):
        told = []
        fake = SimpleNamespace(
            job=job, spec=SimpleNamespace(client=0), host=without_personal, _answers=[],
            _wake=SimpleNamespace(wake=lambda: None), _wait_for_the_deadline=lambda event: None, _span=(100 + waited_s, 101.0),
            _report=lambda spans: told.append([what for what, *_ in spans]), _kept_turn=None,
        )  # fmt: skip
        event = ClientEvent("task", "0" * 32, 1, "masked_update", {}, begun=99.9, arrived=100.0)
        worker.Worker._answer(fake, event, SimpleNamespace())
        return told

    job = sum_job(tmp_path, 8)
    assert reported(job, 1e-4) == reported(job, 0.5) == [["receive", "wait", "train"]]


@contextlib.contextmanager
def served(job, folder, ledgers: str, patch, kind: type[worker.Worker], before_training: Callable[[], object]):
    """A server, real workers in threads, their tasks for masked vectors, and the clients that have begun to train so far."""
    trained, sgd = set[int](), Client.sgd

    def slow(self, *args, **how):
        trained.add(int(threading.current_thread().name))
        before_training()
        return sgd(self, *args, **how)

    patch.setattr(Client, "sgd", slow)
    protocol, hosts = job.protocol, hosts_of(job, folder, ledgers)
    server = ServerEndpoint(
        "tcp://127.0.0.1:*", Link.of(protocol, read_pair(folder / "keys", COORDINATOR, protocol.coordinator_key)),
        **client_endpoint_arguments(job.algorithm, protocol.clients),
    )  # fmt: skip
    with zmq.Context() as context, contextlib.closing(server):
        spec = WorkerSpec(folder, 0, server.address, None, folder / "keys", "", folder / ledgers)
        specs = {client: replace(spec, client=client) for client in hosts}
        workers = [
            kind(specs[client], job, host, context, nullcontext, worker.own_keys(specs[client], job))
            for client, host in hosts.items()
        ]
        threads = [threading.Thread(target=each.serve, name=str(client)) for client, each in enumerate(workers)]
        sums = sums_of(job, hosts)
        begun = sums.begin(1)
        for stage, asked, take in (
            ("secure_keys", begun.keys_tasks, begun.add_keys), ("secure_shares", begun.shares_tasks, begun.add_boxes)
        ):  # fmt: skip
            for client, heard in sums.ask(1, stage, asked()).items():
                assert take(client, heard.tensors)
        tasks = sums.masked_tasks(begun, 1)
        try:
            for thread in threads:
                thread.start()
            while len(server.ready) < len(hosts):
                server.poll(0.02)
            yield server, workers, threads, tasks, trained
        finally:
            for each in workers:
                each.stop()
            for thread in threads:
                thread.join()


def times_of_queued_tasks(job, folder, ledgers: str, kind: type[worker.Worker]) -> tuple[dict, set[int]]:
    """Seconds until each client's masked vector arrives if the server asks for what is refused just before, and who trained.

    They tell nothing if the machine has paused for half a second: then all is done again, at most twice.
    """
    for attempt in range(3):
        with (
            pytest.MonkeyPatch.context() as patch,
            served(job, folder, f"{ledgers} {attempt}", patch, kind, lambda: time.sleep(2.6)) as (
                server,
                workers,
                _,
                tasks,
                trained,
            ),
        ):
            for client, task in tasks.items():
                server.send_task(client, job.protocol.rounds + 1, "masked_update", task)
            refused = looked = time.monotonic()
            seconds, pause, asked = {}, 0.0, False
            while len(seconds) < len(workers):
                if not asked and looked >= refused + 1.2:
                    asked = True
                    for client, task in tasks.items():
                        server.send_task(client, 1, "masked_update", task)
                for event in server.poll(0.02):
                    if event.kind == "result" and event.status == "release":
                        seconds[event.client] = time.monotonic() - refused
                looked, before = time.monotonic(), looked
                pause = max(pause, looked - before)
        if pause < 0.5:
            break
    return seconds, trained


@pytest.mark.slow
@pytest.mark.scenario(39)
def test_a_task_before_another_does_not_shorten_its_deadline(tmp_path, evidence):
    """A refused task keeps a client busy for a whole deadline. The next one has waited for so long, and begins just before its own."""

    class Forgetful(worker.Worker):
        _left = property(lambda self: -math.inf, lambda self, left: None)

    job = sum_job(tmp_path, 8, local={"batch_size": 16, "lr": 0.1, "deadline_s": 4.0})
    seconds, trained = times_of_queued_tasks(job, tmp_path, "ledgers", worker.Worker)
    assert 0 < len(trained) < len(seconds)
    assert all(7.9 < found < 11.9 for found in seconds.values()), seconds  # 8, with 1.4 s for the rest
    evidence.got("all answers leave a deadline after that to the task before, in (trained) or out")
    again, same = times_of_queued_tasks(job, tmp_path, "again", Forgetful)
    assert same == trained
    assert {client for client, found in again.items() if found > 7.9} == trained, again  # 5.2 s or 9.2 s
    evidence.control(
        "counted from the arrival of its task, an answer is late exactly if the client trained: all coins are read"
    )


def seconds_until_stopped_clients_leave(
    job, folder, ledgers: str, patch, kind: type[worker.Worker], training_s: float
) -> tuple[dict, set[int]]:
    """Seconds from the task until each client has left that is told to stop while all work on it, and who trained."""
    at_work, answer = set[int](), kind._answer
    patch.setattr(kind, "_answer", lambda self, *given: (at_work.add(self.spec.client), answer(self, *given)))
    with served(job, folder, ledgers, patch, kind, lambda: time.sleep(training_s)) as (
        server,
        workers,
        threads,
        tasks,
        trained,
    ):
        for client, task in tasks.items():
            server.send_task(client, 1, "masked_update", task)
        sent, left = time.monotonic(), {}
        while len(at_work) < len(threads):
            server.poll(0.02)
        for each in workers:
            each.stop()
        while len(left) < len(threads):
            server.poll(0.02)
            gone = {client for client in tasks if not threads[client].is_alive()} - left.keys()
            left |= dict.fromkeys(gone, time.monotonic() - sent)
    return left, trained


@pytest.mark.scenario(39)
def test_a_client_that_is_told_to_stop_during_a_task_leaves_at_its_deadline(tmp_path, evidence, monkeypatch):
    """A server may tell the launcher to stop a client and to start it again: the time of its return would tell who trained."""

    class Hasty(worker.Worker):
        def _before_storing(self, state) -> None: ...

        def _wait_for_the_deadline(self, event) -> None:
            while not self._stop and time.monotonic() < event.arrived + self.job.protocol.local.deadline_s:
                time.sleep(0.05)

    job = sum_job(tmp_path, 8, local={"batch_size": 16, "lr": 0.1, "deadline_s": 6.0})
    with monkeypatch.context() as patch:
        left, trained = seconds_until_stopped_clients_leave(job, tmp_path, "ledgers", patch, worker.Worker, 2.0)
    assert 0 < len(trained) < len(left)
    assert all(5.9 < found < 11.9 for found in left.values()), (trained, left)  # a busy machine may pause for 4 s
    evidence.got("all clients leave at their deadline, in (trained) or out, and come back after it")
    with monkeypatch.context() as patch:
        again, same = seconds_until_stopped_clients_leave(job, tmp_path, "again", patch, Hasty, 6.0)
    assert same == trained
    assert {client for client, found in again.items() if found > 5.9} == trained, again
    evidence.control("without the wait, clients that do not train leave at once: all coins are read from who comes back first")


def answers_after_a_crash(job, folder, ledgers: str, patch) -> tuple[dict, dict, set[int]]:
    """End all clients when some train and the others wait for the deadline, start them again, and return what they say, and who trained.

    The server asks for signatures of the survivors; or it plays the next round, and asks for the masked vectors after it.
    """
    ended, writing, waiting, end_s = threading.Event(), set[str](), set[str](), job.protocol.local.deadline_s

    def wait(moment: float) -> None:
        """Wait for a deadline until the processes end, and not at all for its last quarter."""
        name, left = threading.current_thread().name, (moment - time.monotonic()) / end_s
        (waiting if left > 0.9 else writing if left > 0.7 else set()).add(name)
        if left > 0.9:
            ended.wait()

    patch.setattr(worker, "_sleep_until", wait)
    with served(job, folder, ledgers, patch, worker.Worker, ended.wait) as (server, _, _, tasks, trained):
        try:
            for client, task in tasks.items():
                server.send_task(client, 1, "masked_update", task)
            while len(trained) + len(waiting) < len(tasks):
                server.poll(0.02)
            assert waiting <= writing  # of a result nothing is written before the last quarter
            for name in ("signing", "later"):  # what the disk holds if all processes end now
                shutil.copytree(folder / ledgers, folder / f"{ledgers} {name}")
        finally:
            ended.set()
    codes = []
    for name in ("signing", "later"):
        hosts = hosts_of(job, folder, f"{ledgers} {name}")
        if name == "later":
            group = np.array(sorted(hosts), np.int64)
            assert {host.answer(Task(2, "secure_keys", {"group": group})).status for host in hosts.values()} == {"release"}
        survivors = np.ones(len(hosts), np.uint8)
        asked = {"signing": dict.fromkeys(hosts, Task(1, "secure_survivors", {"survivors": survivors})),
                 "later": {client: Task(1, "masked_update", task) for client, task in tasks.items()}}[name]  # fmt: skip
        answers = {client: host.answer(asked[client]) for client, host in hosts.items()}
        codes.append({client: answer.code or answer.status for client, answer in answers.items()})
    return codes[0], codes[1], trained


@pytest.mark.scenario(39)
def test_a_client_that_ends_before_its_deadline_comes_back_as_if_it_had_not_trained_yet(tmp_path, evidence, monkeypatch):
    """A server may end the process, or the run, when only those have computed an answer whose coin leaves them out."""
    job = sum_job(tmp_path, 8, local={"batch_size": 16, "lr": 0.1, "deadline_s": 1000.0})
    with monkeypatch.context() as patch:
        signing, later, trained = answers_after_a_crash(job, tmp_path, "ledgers", patch)
    assert 0 < len(trained) < len(signing)
    assert set(signing.values()) == {"secure-stage"}, (trained, signing)
    assert set(later.values()) == {"lost"}, (trained, later)
    evidence.got("all clients give equal answers after a crash right before the deadline, in (trained) or out")
    with monkeypatch.context() as patch:
        patch.setattr(ClientHost, "before_final", property(lambda self: None, lambda self, wait: None), raising=False)
        signing, later, same = answers_after_a_crash(job, tmp_path, "again", patch)
    assert same == trained
    assert {client for client, code in later.items() if code == "lost"} == trained, later
    assert {client for client, code in signing.items() if code == "secure-stage"} >= trained
    assert "release" in signing.values()
    evidence.control("if a result is final once it is written, those that trained have lost it: all coins are read")


CANARY = 0  # the client with canaries; 1 is honest, 2 colludes, 3 drops out


def canary_job(folder, colluders: int):
    """One DP-SGD step a round of 6,090 parameters, all records in the batch."""
    return sum_job(
        folder, 4, algorithm={"name": "global"}, model={"name": "digits-cnn"}, local={"batch_size": 50, "lr": 0.1},
        privacy={"unit": "sample", "epsilon": 12, "delta": 1e-3, "secure_aggregation": {"colluders": colluders}},
    )  # fmt: skip


def measured(job, folder, ledgers: str, colluding: tuple[int, ...], words) -> float:
    """Lower bound on epsilon of one round's sum less the colluders' words; each parameter is a canary record of norm clip.

    A fair coin says whether a canary is in the batch of client 0; other clients' gradients are zero.
    """
    words.clear()
    size, clip = job.protocol.model.parameters, job.protocol.local.clip
    bits = np.random.default_rng(5).random((job.protocol.rounds, size)) < 0.5

    def host(client: int):
        left = iter(bits)
        clipped = lambda *_: clip * next(left) if client == CANARY else np.zeros(size)  # noqa: E731
        engine = SimpleNamespace(trainer=SimpleNamespace(clipped_sum=clipped, check_batches=lambda *_: None))
        return make_host(job, client, folder / ledgers, durable=False, key_folder=folder / "keys", engine=lambda: engine)

    sums = sums_of(job, {client: host(client) for client in range(4)})
    ask = sums.ask
    sums.ask = lambda t, kind, tasks: ask(t, kind, {c: task for c, task in tasks.items() if c != 3})
    code, scores = job.algorithm.secure_code(4), []
    for t in range(1, job.protocol.rounds + 1):
        played = sums.play(t)
        assert played.server.survivors == (0, 1, 2), played.aborted
        known = added(words[t, client] for client in colluding)
        scores.append((played.total - known).view(np.int32) - code.scale / 2)
    errors = Errors.of(np.concatenate(scores), bits.reshape(-1))
    return by_gdp(errors, job.protocol.accounted_delta, FALSE_ALARM)


@pytest.mark.scenario(41)
def test_epsilon_holds_for_the_declared_colluders(tmp_path, evidence, monkeypatch):
    """Of four clients three survive; one of them subtracts its share, so that two shares are left: exactly those that count."""
    words, job = truth(monkeypatch), canary_job(tmp_path / "sound", 1)
    assert terms_of(job.protocol, (0, 1, 2, 3)).honest == 2
    z = job.protocol.roster[0].noise_multiplier
    claim = epsilon([SampledGaussian(z, 1.0, 1)], job.protocol.accounted_delta)
    found = measured(job, tmp_path / "sound", "ledgers", (2,), words)
    assert 0.85 * claim < found < claim
    more = measured(job, tmp_path / "sound", "more", (1, 2), words)
    assert more > 1.05 * claim
    with monkeypatch.context() as patch:
        patch.setattr(secure_clusters, "honest_shares", lambda n, privacy: n)
        with pytest.raises(ConfigError, match="honest"):
            canary_job(tmp_path / "refused", 1)
        patch.setattr(secure_claim, "_code_problem", lambda protocol, codes: "")
        counted = canary_job(tmp_path / "all", 1)
        all_shares = measured(counted, tmp_path / "all", "ledgers", (2,), words)
    assert counted.protocol.roster[0].noise_multiplier == pytest.approx(z, rel=1e-6)
    assert all_shares > 1.05 * claim
    evidence.got(f"one round claims epsilon {claim:.2f}; measured at least {found:.2f} with the colluder's share subtracted")
    evidence.control(f"a second colluder: at least {more:.2f}; noise counted of all four clients: at least {all_shares:.2f}")
