"""A coordinator's federation against workers of every kind: honest, hostile, silent; over real sockets."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
import pytest
from conftest import SMALL

from dpcfl_net.algorithms.base import algorithm_of
from dpcfl_net.core.errors import RunFailed
from dpcfl_net.core.tensors import pack, read_only
from dpcfl_net.core.types import Answer
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.federation import aggregation
from dpcfl_net.federation.asynchronous import Participation
from dpcfl_net.federation.base import Results
from dpcfl_net.federation.call_limits import CallLimits
from dpcfl_net.federation.capabilities import client_steps
from dpcfl_net.federation.in_process import InProcessFederation
from dpcfl_net.federation.message_encoding import MessageEncoding
from dpcfl_net.federation.network import NetworkFederation
from dpcfl_net.federation.network_asynchronous import AsynchronousNetworkFederation
from dpcfl_net.federation.release_check import client_endpoint_arguments
from dpcfl_net.transport import keys
from dpcfl_net.transport.endpoint import ClientEndpoint, Link, ServerEndpoint, ServerEvent
from dpcfl_net.transport.keys import COORDINATOR, client_key, make_keys

REFUSED = Answer("refused", code="quota", reason="no train is left")


def made(folder, clients=4, **changes):
    document = {**SMALL, "data": {"dataset": "digits", "clients": [2, 2]}, "algorithm": {"name": "global"}, "rounds": 2}
    make_keys(folder, clients)
    return make_job(config.resolve({**document, **changes}), folder), folder


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return made(tmp_path_factory.mktemp("federation"))


@pytest.fixture(scope="module")
def int8_job(tmp_path_factory):
    return made(tmp_path_factory.mktemp("int8"), communication={"down": "bfloat16", "up": "int8"})


@pytest.fixture(scope="module")
def top_k_job(tmp_path_factory):
    return made(tmp_path_factory.mktemp("top-k"), communication={"up": "topk:0.01"})


class Actor(threading.Thread):
    """A scripted worker: answers every task with the update (or tensors, or status) that `answer(model)` returns; None: not at all."""

    def __init__(self, job, folder, client, address, answer):
        super().__init__(daemon=True)
        self.job, self.folder, self.client, self.address, self.answer = job, folder, client, address, answer
        self.stop = threading.Event()
        self.errors: list[str] = []
        self.start()

    def run(self):
        protocol, algorithm = self.job.protocol, algorithm_of(self.job.protocol)
        name, steps, encoding = client_key(self.client), client_steps(algorithm), MessageEncoding(algorithm)
        entry = protocol.client(self.client)
        self.endpoint = endpoint = ClientEndpoint(
            self.address, Link.of(protocol, keys.read_pair(self.folder, name, entry.public_key), protocol.coordinator_key),
            client=self.client, task_template=lambda task: encoding.task_template(steps[task]),
        )  # fmt: skip
        with contextlib.closing(endpoint):
            while not self.stop.is_set():
                for event in endpoint.poll(0.1):
                    if event.kind == "task":
                        endpoint.heartbeat("computing")
                        if isinstance(said := self.answer(event.tensors["model"]), str):
                            endpoint.send_result(event.id, said)
                        elif said is not None:
                            endpoint.send_result(event.id, "release", said if isinstance(said, dict) else {"update": said})
                    elif event.kind == "error":
                        self.errors.append(event.code)


@contextlib.contextmanager
def federation(job, folder, answers, join_s=20, listeners=None, kind=NetworkFederation, **options):
    """A network federation over the given scripted workers."""
    protocol, algorithm = job.protocol, algorithm_of(job.protocol)
    endpoint = ServerEndpoint(
        "tcp://127.0.0.1:*", Link.of(protocol, keys.read_pair(folder, COORDINATOR, protocol.coordinator_key)),
        **client_endpoint_arguments(algorithm, protocol.clients),
    )  # fmt: skip
    actors = [Actor(job, folder, client, endpoint.address, answer) for client, answer in answers.items()]
    fed = kind(protocol, endpoint, CallLimits(join_timeout_s=join_s, **options), **(listeners or {}))
    fed.round = 1
    try:
        fed.join()
        yield fed, algorithm, actors
    finally:
        for actor in actors:
            actor.stop.set()
            actor.join()
        endpoint.close(abort=True)


def shifted(by):
    return lambda model: model + np.float32(by)


def test_results_come_in_client_order_whatever_the_order_of_arrival(job):
    def late(seconds, by):
        def answer(model):
            time.sleep(seconds)
            return model + np.float32(by)

        return answer

    answers = {0: late(0.4, 0.0), 1: late(0.2, 0.1), 2: late(0.3, 0.2), 3: late(0.0, 0.3)}
    theta = np.zeros(job[0].protocol.model.parameters, np.float32)
    with federation(*job, answers) as (fed, algorithm, _):
        results = fed.call(algorithm.train, common={"model": theta})
        assert list(results) == [0, 1, 2, 3]
        assert [float(u[0]) for u in results.column("update").values()] == [float(np.float32(x)) for x in (0.0, 0.1, 0.2, 0.3)]
        own = {2: {"model": theta + np.float32(0.1)}, 0: {"model": theta + np.float32(0.4)}}
        results = fed.call(algorithm.train, each=own)
        assert [(c, round(float(r["update"][0]), 3)) for c, r in results.items()] == [(0, 0.4), (2, 0.3)]


@pytest.mark.parametrize(
    ("what", "bad", "code"),
    [
        ("nan", lambda m: np.full_like(m, np.nan), "finite"),
        ("huge", lambda m: np.full_like(m, 1e6), "norm"),
        ("shape", lambda m: np.zeros(7, np.float32), "template"),
        ("dtype", lambda m: np.zeros(m.shape, np.int64), "template"),
    ],
)
def test_a_hostile_update_is_quarantined_and_the_round_goes_on(job, what, bad, code):
    theta = np.zeros(job[0].protocol.model.parameters, np.float32)
    answers = {0: shifted(0), 1: bad, 2: shifted(0), 3: shifted(0)}
    with federation(*job, answers, quorum=0.7, timeout_s=20) as (fed, algorithm, actors):
        started = time.monotonic()
        results = fed.call(algorithm.train, common={"model": theta})
        assert (list(results), results.missing) == ([0, 2, 3], [1])
        assert time.monotonic() - started < 10  # it was refused, not waited for
        assert any(code in found for found in fed.endpoint.failures), fed.endpoint.failures
        # Control: the same client with an honest answer takes part in the next round.
        actors[1].answer = shifted(0)
        fed.round = 2
        assert list(fed.call(algorithm.train, common={"model": theta})) == [0, 1, 2, 3]


def test_a_failure_below_the_quorum_tells_why_clients_gave_no_release(job):
    theta, protocol = np.zeros(job[0].protocol.model.parameters, np.float32), job[0].protocol
    hostile = lambda model: np.full_like(model, np.nan)  # noqa: E731
    with (
        federation(*job, {0: shifted(0), 1: hostile, 2: hostile, 3: shifted(0)}, timeout_s=20) as (fed, algorithm, _),
        pytest.raises(RunFailed, match=r"2 of 4 clients answered, the quorum is 4 .*; client 1 and 1 more: .*finite"),
    ):
        fed.call(algorithm.train, common={"model": theta})

    class Refusing:
        def answer(self, task):
            return REFUSED

    fed = InProcessFederation(protocol, dict.fromkeys(range(4), Refusing()))
    with pytest.raises(RunFailed, match=r"0 of 4 clients answered, .*; client 0 and 3 more: refused quota: no train is left$"):
        fed.call(algorithm_of(protocol).train, common={"model": theta})


def test_a_quorum_is_a_decimal_fraction_of_the_asked_clients(tmp_path):
    class Scripted:
        def __init__(self, answers):
            self.answers = answers

        def answer(self, task):
            return Answer("release", pack({"update": np.zeros(6090, np.float32)})) if self.answers else REFUSED

    protocol = made(tmp_path, clients=25, data={"dataset": "digits", "clients": [13, 12]})[0].protocol
    call = lambda fed: fed.call(algorithm_of(protocol).train, common={"model": np.zeros(6090, np.float32)})  # noqa: E731
    seven, six = ({client: Scripted(client < count) for client in range(25)} for count in (7, 6))
    assert len(call(InProcessFederation(protocol, seven, quorum=0.28))) == 7
    with pytest.raises(RunFailed, match="6 of 25 clients answered, the quorum is 7"):
        call(InProcessFederation(protocol, six, quorum=0.28))


@pytest.mark.parametrize("quorum", [2, -0.1, np.nan, "1", True])
def test_the_quorum_of_a_call_is_a_fraction(job, quorum):
    fed = InProcessFederation(job[0].protocol, {})
    with pytest.raises(
        RunFailed, match=f"round 0: quorum is {quorum!r}: must be a number from 0 to 1, or None for that of the run"
    ):
        fed.call(algorithm_of(job[0].protocol).train, common={}, quorum=quorum)


def test_a_failure_below_the_quorum_of_a_call_does_not_blame_that_of_the_run(job):
    class Refusing:
        def answer(self, task):
            return REFUSED

    theta = np.zeros(job[0].protocol.model.parameters, np.float32)
    fed = InProcessFederation(job[0].protocol, dict.fromkeys(range(4), Refusing()), quorum=0.25)
    with pytest.raises(
        RunFailed, match=r"the quorum is 3 \(global sets 0.75 for this call; with a lower one the run continues"
    ):
        fed.call(algorithm_of(job[0].protocol).train, common={"model": theta}, quorum=0.75)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_raw_release_that_is_not_finite_is_missing_in_one_process_as_over_the_network(job, bad):
    class Raw:
        def __init__(self, value):
            self.value = value

        def answer(self, task):
            return Answer("release", pack({"update": np.full(6090, self.value, np.float32)}))

    protocol, theta = job[0].protocol, np.zeros(6090, np.float32)
    hosts = dict(enumerate(map(Raw, (1.0, bad, 2.0, 3.0))))
    results = InProcessFederation(protocol, hosts, quorum=0.75).call(algorithm_of(protocol).train, common={"model": theta})
    assert (list(results), results.missing) == ([0, 2, 3], [1])
    with pytest.raises(RunFailed, match=r"3 of 4 clients answered, .*; client 1: non-finite: tensor update holds"):
        InProcessFederation(protocol, hosts).call(algorithm_of(protocol).train, common={"model": theta})


def int8(level, scale, blocks=6, size=6090):
    def answer(model):
        levels, scales = np.zeros(size, np.int8), np.zeros(blocks, np.float32)
        levels[0], scales[0] = level, scale
        return {"update": levels, "update.scale": scales}

    return answer


def top_k(indices, value=0.0, count=61):
    def answer(model):
        listed = np.arange(count, dtype="<i4")
        listed[: len(indices)] = indices
        values = np.zeros(count, np.float32)
        values[0] = value
        return {"update": values, "update.index": listed}

    return answer


INT8 = [
    ("level", int8(-128, 1e-6), "encoding"),
    ("negative scale", int8(1, -1e-6), "encoding"),
    ("infinite number", int8(127, 3e38), "encoding"),
    ("scale NaN", int8(0, np.nan), "non-finite"),
    ("norm", int8(127, 1e5), "norm"),
    ("too many scales", int8(0, 0.0, blocks=7), "template"),
    ("too many levels", int8(0, 0.0, size=6091), "template"),
    ("float32", lambda model: np.zeros(6090, np.float32), "template"),
]
TOP_K = [
    ("repeated index", top_k([0, 0]), "encoding"),
    ("falling indices", top_k([9, 8]), "encoding"),
    ("negative index", top_k([-1]), "encoding"),
    (
        "index beyond the update",
        lambda model: top_k([])(model) | {"update.index": np.arange(6030, 6091, dtype="<i4")},
        "encoding",
    ),
    ("norm", top_k([], 1e6), "norm"),
    ("NaN", top_k([], np.nan), "non-finite"),
    ("too many values", top_k([], count=62), "template"),
    ("no indices", lambda model: np.zeros(61, np.float32), "template"),
]


@pytest.mark.parametrize(
    ("kind", "what", "bad", "code"), [("int8_job", *case) for case in INT8] + [("top_k_job", *case) for case in TOP_K]
)
def test_a_hostile_compressed_update_is_quarantined(kind, what, bad, code, request):
    job = request.getfixturevalue(kind)
    honest = int8(64, 2.0**-10) if kind == "int8_job" else top_k([], 2.0**-4)
    theta = np.zeros(job[0].protocol.model.parameters, np.float32)
    with federation(*job, {0: honest, 1: bad, 2: honest, 3: honest}, quorum=0.7, timeout_s=20) as (fed, algorithm, actors):
        results = fed.call(algorithm.train, common={"model": theta})
        assert (list(results), results.missing) == ([0, 2, 3], [1])
        assert fed.endpoint.failures[code] == 1, fed.endpoint.failures
        expected = np.zeros(6090, np.float32)
        expected[0] = 2.0**-4
        assert all(np.array_equal(update, expected) for update in results.column("update").values())
        # Control: the same client with an honest answer takes part in the next round.
        actors[1].answer = honest
        fed.round = 2
        assert list(fed.call(algorithm.train, common={"model": theta})) == [0, 1, 2, 3]


def test_a_model_that_float16_cannot_hold_ends_the_run_with_the_setting_s_name(tmp_path):
    job = made(tmp_path, communication={"down": "float16"})
    fed, algorithm = NetworkFederation(job[0].protocol, None), algorithm_of(job[0].protocol)
    theta = np.full(job[0].protocol.model.parameters, 7e4, np.float32)
    with pytest.raises(RunFailed, match=r"communication\.down is 'float16': a model holds 70000: float16 ends at 65504"):
        fed.call(algorithm.train, common={"model": theta})


def test_silent_clients_are_missing_and_the_quorum_decides(job):
    theta = np.zeros(job[0].protocol.model.parameters, np.float32)
    answers = {0: shifted(0), 1: lambda m: None, 2: shifted(0), 3: shifted(0)}
    with federation(*job, answers, quorum=0.75, timeout_s=1.5) as (fed, algorithm, _):
        assert fed.call(algorithm.train, common={"model": theta}).missing == [1]
        fed.quorum = 1.0
        with pytest.raises(RunFailed, match="3 of 4 clients answered"):
            fed.call(algorithm.train, common={"model": theta})


@pytest.mark.parametrize(("there", "named"), [((0, 2), r"\[1, 3\]"), ((0, 1, 2), r"\[3\]")])
def test_absent_clients_are_named(job, there, named):
    with (
        pytest.raises(RunFailed, match=rf"clients {named} did not join"),
        federation(*job, dict.fromkeys(there, shifted(0)), join_s=2),
    ):
        pass


class Echo:
    """An endpoint, and hosts, of clients that answer each task with its model."""

    def __init__(self):
        self.events = []

    def send_task(self, client, number, task, payload):
        sent = np.frombuffer(b"".join(payload.chunks), np.float32)
        self.events.append(ServerEvent("result", client, number, task, status="release", tensors={"update": sent}))

    def poll(self, timeout_s):
        events, self.events = self.events, []
        return events

    def answer(self, task):
        return Answer("release", pack({"update": np.array([read_only(task.tensors["model"])])}))


@pytest.mark.parametrize(
    "kind",
    [
        lambda protocol: AsynchronousNetworkFederation(protocol, Echo()),
        lambda protocol: InProcessFederation(protocol, dict.fromkeys(protocol.clients, Echo())),
    ],
    ids=["network", "in-process"],
)
def test_each_client_gets_its_own_number_of_numpy(job, kind):
    """An element of an array is such a number: each client got that of the first one, and a run in one process ended."""
    protocol, rates = job[0].protocol, np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    each = {client: {"model": rates[client], "twice": 2 * rates[client]} for client in range(4)}
    results = kind(protocol).call(algorithm_of(protocol).train, each=each)
    assert [float(update[0]) for update in results.column("update").values()] == rates.tolist()
    fed = kind(protocol)
    for client, tensors in each.items():
        fed.submit(Participation(client, 1, "train", tensors))
    assert [float(outcome.release["update"][0]) for outcome in fed.gather(4)] == rates.tolist()


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda fed: fed.rng(3), "purpose is 3: must be text"),
        (lambda fed: fed.seed(None), "purpose is None: must be text"),
        (lambda fed: fed.submit(3), "work is of type int: must be a Participation"),
        (lambda fed: fed.submit(Participation(9, 1, "train", {})), "work is for client 9: must be one of 0 to 3"),
    ],
)
def test_wrong_arguments_of_the_server_half_are_named(job, use, words):
    with pytest.raises(RunFailed, match=f"round 0: {words}"):
        use(InProcessFederation(job[0].protocol, {}))


VECTOR = np.ones(3, np.float32)


@pytest.mark.parametrize(
    ("updates", "words"),
    [
        ([VECTOR, VECTOR], "updates are of type list: must map each client to its update"),
        (
            {0: VECTOR, 1: VECTOR[:1]},
            r"client 1 has shape \(1,\) and type float32: must be \(3,\) real numbers",
        ),  # was repeated
        ({0: VECTOR, 1: np.ones(5, np.float32)}, r"client 1 has shape \(5,\)"),
        ({0: VECTOR.astype(complex)}, "client 0 has shape .* and type complex128"),
        ({0: [[1.0], [1.0, 2.0]]}, r"client 0 is of type list: must be an array of shape \(p,\)"),  # was NumPy's message
        ({0: VECTOR, 1: [1.0]}, r"client 1 is of type list: must be an array of shape \(3,\)"),
    ],
)
def test_a_mean_takes_vectors_of_one_shape(updates, words):
    with pytest.raises(ValueError, match=words):
        aggregation.mean(updates)


@pytest.mark.parametrize(
    ("row", "update", "words"),
    [
        (0, VECTOR[:1], r"client 4 has shape \(1,\) and type float32: must be \(3,\) real numbers"),  # was repeated
        (0, [1.0, 2.0, 3.0], "client 4 is of type list"),
        (-1, VECTOR, "row is -1: must be a whole number from 0 to 1, a row of the models"),  # was the last one
        (2, VECTOR, "row is 2: must be a whole number from 0 to 1"),
        (
            np.float32(1),
            VECTOR,
            r"row is np.float32\(1\.0\): must be a whole number from 0 to 1",
        ),  # as in a release; the mean failed later
        (None, VECTOR, "row is None: must be a whole number from 0 to 1"),
    ],
)
def test_means_of_models_take_an_update_of_one_of_them(row, update, words):
    with pytest.raises(ValueError, match=words):
        aggregation.ModelMeans(np.zeros((2, 3), np.float32)).add(row, 4, update)


def test_results_say_who_is_missing():
    results = Results([2, 0, 1], {1: {"x": np.zeros(1)}, 0: {"x": np.ones(1)}})
    assert (list(results), results.missing) == ([0, 1], [2])


def test_a_stream_asks_no_client_beyond_the_window_and_passes_on_in_client_order(job, monkeypatch):
    """Client 0 answers last: with a window of 2, clients 2 and 3 get their task only when its answer has come."""
    monkeypatch.setattr("dpcfl_net.federation.base.window", lambda parameters: 2)
    asked, second = [], threading.Event()

    def respond(client):
        def answer(model):
            asked.append(client)
            if client == 0:
                second.wait(20)
            if client == 1:
                second.set()
            return model + np.float32(client / 16)

        return answer

    passed = []
    with federation(*job, {client: respond(client) for client in range(4)}, timeout_s=20.0) as (fed, algorithm, _):
        theta = np.zeros(job[0].protocol.model.parameters, np.float32)
        take = lambda client, release: passed.append((client, float(release["update"][0])))  # noqa: E731
        assert fed.stream(algorithm.train, take, common={"model": theta}) == [0, 1, 2, 3]
    assert passed == [(client, client / 16) for client in range(4)]
    assert set(asked[:2]) == {0, 1}


def test_a_window_that_waits_for_a_client_past_its_deadline_moves_on_without_it(job, monkeypatch):
    monkeypatch.setattr("dpcfl_net.federation.base.window", lambda parameters: 1)
    answers = {0: lambda model: None} | {client: lambda model: model + np.float32(0.25) for client in (1, 2, 3)}
    with federation(*job, answers, quorum=0.75, timeout_s=1.0) as (fed, algorithm, _):
        theta = np.zeros(job[0].protocol.model.parameters, np.float32)
        assert fed.stream(algorithm.train, lambda client, release: None, common={"model": theta}) == [1, 2, 3]
        assert fed.missing == [0]
