"""Runs with compressed messages: the same bits over the network, in one process and after crashes; bytes, claim and charges."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import numpy as np
import pytest
from conftest import DPCFL, ROOT, SMALL, assert_nothing_left, dpcfl, only_run, write_config
from pydantic import ValidationError
from run_results import job_of, last_models
from simulate import simulate

from dpcfl_net.adversaries.malicious_steps import make
from dpcfl_net.attacks.updates import read_updates
from dpcfl_net.core.frozen import canonical, digest
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.signed_settings import Communication
from dpcfl_net.core.tensors import unpack
from dpcfl_net.core.types import Release, State, Task
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.experiment.cost_estimate import estimate
from dpcfl_net.federation import client_host
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.capabilities import client_steps
from dpcfl_net.federation.message_encoding import MessageEncoding
from dpcfl_net.results.verify import verify_run
from dpcfl_net.runtime.client_hosts import make_host
from dpcfl_net.runtime.one_process import federation
from dpcfl_net.transport import transcript
from dpcfl_net.transport.encodings import from_half, to_half
from dpcfl_net.transport.keys import make_keys

P = 6090  # parameters of digits-cnn
FEEDBACK = {"form": "top-k", "fraction": 0.05, "error_feedback": True}
FORMS = {
    "int8": {"down": "bfloat16", "up": "int8"},
    "top-k": {"down": "float16", "up": "topk:0.05"},
    "feedback": {"up": FEEDBACK},
}
BYTES = {"int8": (2 * P, P + 4 * 6), "top-k": (2 * P, 8 * 305), "feedback": (4 * P, 8 * 305)}  # a model, an update


def made(folder, **changes):
    make_keys(folder / "keys", 8)
    return make_job(config.resolve({**SMALL, **changes}), folder / "keys")


@pytest.fixture(
    scope="module", params=[pytest.param(form, marks=() if form == "feedback" else pytest.mark.slow) for form in FORMS]
)
def run(request, tmp_path_factory):
    """The name of a form, and a finished run of eight workers with it."""
    out = tmp_path_factory.mktemp(request.param)
    data = {**SMALL["data"], "train_per_client": 150}
    done = dpcfl("run", write_config(out / "c", communication=FORMS[request.param], rounds=4, data=data), "--out", out)
    assert done.returncode == 0, done.stderr + done.stdout
    return request.param, only_run(out)


def test_one_process_and_crashes_give_the_bits_of_the_network(run, tmp_path, monkeypatch):
    _, folder = run
    assert simulate(job_of(folder), tmp_path / "whole").models.tobytes() == last_models(folder)
    whole, due = client_host.ClientHost._compute, [(1, 3), (2, 0), (3, 7), (4, 5)]

    def crashing(self, task, charge, state):
        found = whole(self, task, charge, state)
        if due and (task.round, self.client) == due[0]:
            due.pop(0)
            raise KeyboardInterrupt  # after the computation, before the answer and the residual are stored
        return found

    monkeypatch.setattr(client_host.ClientHost, "_compute", crashing)
    while due:
        with pytest.raises(KeyboardInterrupt):
            simulate(job_of(folder), tmp_path / "crashed")
    assert simulate(job_of(folder), tmp_path / "crashed").models.tobytes() == last_models(folder)


def test_the_bytes_on_the_wire_are_those_of_the_template(run):
    name, folder = run
    model, update = BYTES[name]
    sizes: dict[tuple[str, str], set[int]] = {}
    for _, header, _ in transcript.messages(folder / "transcript.msgpack"):
        if header.kind in ("TASK", "RESULT"):
            sizes.setdefault((header.kind, header.task), set()).add(header.size)
    assert sizes["TASK", "train"] == sizes["TASK", "first_round_update"] == {model}
    assert sizes["RESULT", "train"] == {update}
    assert sizes["RESULT", "first_round_update"] == {4 * P}  # in full: the clusters are found in it
    assert sizes["RESULT", "select_and_train"] == {update + 8}
    assert estimate(job_of(folder).protocol)["bytes_up"] == 8 * (3 * update + 4 * P)


def test_every_check_of_verify_holds_and_attacks_read_the_decoded_updates(run):
    name, folder = run
    assert all(check.holds for check in verify_run(folder))
    updates = read_updates(folder, job_of(folder), 4)
    assert sorted(updates) == list(range(8))
    kept = {np.count_nonzero(update.change) for each in updates.values() for update in each if update.round > 1}
    assert kept == {305} if name != "int8" else min(kept) > 5000
    if name == "int8":
        model = updates[0][-1].model
        assert np.array_equal(from_half(to_half(model, "bfloat16")), model)  # what the client trained from


@pytest.mark.slow
def test_kill_of_all_processes_then_resume_gives_the_same_bits(tmp_path):
    settings = write_config(tmp_path / "c", communication=FORMS["feedback"], rounds=6)
    killed = subprocess.Popen(
        [*DPCFL, "run", str(settings), "--out", str(tmp_path / "runs")],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not [*tmp_path.glob("runs/*/checkpoints/round_00003")]:
        assert time.monotonic() < deadline
        assert killed.poll() is None
        time.sleep(0.002)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    folder = only_run(tmp_path / "runs")
    assert_nothing_left(folder)
    assert dpcfl("run", "--resume", folder).returncode == 0
    assert last_models(folder) == simulate(job_of(folder), tmp_path / "whole").models.tobytes()


def test_a_task_that_comes_again_gets_the_same_bytes_and_moves_no_residual(tmp_path):
    job = made(tmp_path, communication=FORMS["feedback"], algorithm={"name": "global"})
    first, second = (Task(t, "train", {"model": np.full(P, t / 100, np.float32)}) for t in (1, 2))
    host = make_host(job, 0, tmp_path / "ledger")
    answer = host.answer(first)
    state = host.gate.state()
    (name,) = state
    assert host.answer(first).release == answer.release
    assert np.array_equal(host.gate.state()[name], state[name])
    later = host.answer(second)
    host.close()
    again = make_host(job, 0, tmp_path / "ledger")  # another process
    assert again.answer(first).release == answer.release
    assert again.answer(second).release == later.release
    assert len(again.gate.spent()) == 2
    again.close()


@pytest.mark.parametrize("down", ["float16", "bfloat16"])
def test_a_model_in_another_form_or_not_finite_is_refused_and_costs_nothing(tmp_path, down):
    job = made(tmp_path, communication={"down": down}, algorithm={"name": "global"})
    host, step = make_host(job, 0, tmp_path / "ledger"), client_steps(job.algorithm)["train"]
    bad = {"nan": "non-finite", "infinite": "non-finite", "longer": "template", "whole": "template", "extra": "template"}
    for weights, code in bad.items():
        answer = host.answer(Task(1, "train", make(step, job.algorithm, weights, 1, 0)))
        assert (answer.status, answer.code) == ("refused", code)
    assert host.answer(Task(1, "train", {"model": np.zeros(P, np.float32)})).code == "template"
    assert host.gate.spent() == []
    assert host.answer(Task(1, "train", make(step, job.algorithm, "honest", 1, 0))).status == "release"
    host.close()


def test_feedback_sends_later_what_it_left_out_and_nothing_else(tmp_path):
    """Sent and residual together are the releases of a client without compression, to rounding: no record is read again."""
    encoded, plain = (
        make_host(made(tmp_path / name, communication=form, algorithm={"name": "global"}), 0, tmp_path / name / "ledger")
        for name, form in (("a", FORMS["feedback"]), ("b", {}))
    )
    step = client_steps(encoded.algorithm)["train"]
    total, expected = np.zeros(P), np.zeros(P)
    for t in (1, 2, 3):
        task = Task(t, "train", {"model": np.zeros(P, np.float32)})
        sent = unpack(encoded.answer(task).release)
        assert sent["update"].shape == sent["update.index"].shape == (305,)
        total += MessageEncoding(encoded.algorithm).decode_release(step, sent)["update"]
        expected += unpack(plain.answer(task).release)["update"]
        (residual,) = encoded.gate.state().values()
        assert np.allclose(total + residual, expected, rtol=0, atol=1e-5)
    assert np.abs(residual).max() > 1e-3


def test_what_feedback_adds_up_is_cut_to_the_bound_and_the_rest_is_kept(tmp_path):
    job = made(tmp_path, communication=FORMS["feedback"], algorithm={"name": "global"})
    encoding, step = MessageEncoding(job.algorithm), client_steps(job.algorithm)["train"]
    bound = step.gives["update"].max_norm(job.algorithm, job.protocol.client(0))
    update = np.full(P, 0.9 * bound / np.sqrt(P), np.float32)
    residuals, longest = {}, 0.0
    for _ in range(30):
        sent, residuals = encoding.encode_release(step, 0, Release(update=update), residuals)
        longest = max(longest, float(np.linalg.norm(sent.tensors["update"].astype(np.float64))))
    assert 0.999 * bound < longest <= bound


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_number_that_is_not_finite_does_not_stay_in_the_residual(tmp_path):
    """The server refuses that release; the residual is added to all later ones."""
    job = made(tmp_path, communication=FORMS["feedback"], algorithm={"name": "global"})
    encoding, step = MessageEncoding(job.algorithm), client_steps(job.algorithm)["train"]
    residuals = {}
    for bad in (np.nan, np.inf, -np.inf):
        update = np.full(P, 1e-6, np.float32)
        update[:400] = bad  # more than are sent
        _, residuals = encoding.encode_release(step, 0, Release(update=update), residuals)
        sent, residuals = encoding.encode_release(step, 0, Release(update=np.full(P, 1e-6, np.float32)), residuals)
        assert all(np.isfinite(array).all() for array in (sent.tensors["update"], *residuals.values()))


def test_the_claim_and_the_noise_are_those_of_the_same_job_without_compression(tmp_path):
    plain = made(tmp_path / "a")
    for name, form in FORMS.items():
        job = made(tmp_path / name, communication=form)
        assert [e.noise_multiplier for e in job.protocol.roster] == [e.noise_multiplier for e in plain.protocol.roster]
        assert job.algorithm.plan(job.protocol.roster[0]) == plain.algorithm.plan(plain.protocol.roster[0])
        assert job.protocol.unprotected == plain.protocol.unprotected


def test_the_signed_job_names_the_forms_and_is_unchanged_without_them(tmp_path):
    plain = made(tmp_path / "a").protocol
    assert b"communication" not in canonical(plain)
    usual = plain.model_copy(update={"communication": Communication()})
    assert canonical(usual) == canonical(plain)
    hashes = {digest(plain)}
    for form in ({"down": "float16"}, {"up": {"form": "int8"}}, {"up": {"form": "top-k", "fraction": 0.5}}, {"up": FEEDBACK}):
        hashes.add(digest(plain.model_copy(update={"communication": Communication.model_validate(form)})))
    assert len(hashes) == 5


def test_updates_below_half_a_step_of_bfloat16_add_up_at_the_server(tmp_path):
    """The server adds updates to its own float32 model: added to the rounded one, they would be lost for ever."""
    job = made(tmp_path, communication={"down": "bfloat16"}, algorithm={"name": "global"})
    model = np.ones((1, P), np.float32)
    small = np.full(P, 2.0**-10, np.float32)  # bfloat16 has steps of 2^-7 above 1

    class Still(Federation):
        def _exchange(self, kind, tasks, take, window):
            assert {array.dtype.str for tensors in tasks.values() for array in tensors.values()} == {"<u2"}
            for client in tasks:
                take(client, {"update": small})

    state = State(model, [0] * 8)
    for t in range(1, 9):
        state = job.algorithm.round(state, t, Still(job.protocol))
    assert np.array_equal(state.models[0], np.full(P, 1 + 8 * 2.0**-10, np.float32))


FEW = {"dataset": "digits", "clients": [2, 2, 2, 2], "train_per_client": 64, "test_per_client": 10}
CLIENT_LEVEL = {
    "privacy": {
        "epsilon": 8,
        "delta": 1e-2,
        "unit": "client",
        "trust": "trusted-server",
        "noise": "seeded",
        "noise_seed": "5eed" * 16,
    }
}
RR = {"name": "rr-cluster", "clusters": 2, "min_cluster_size": 2, "sampling_rate": 1.0}
ALGORITHMS = {
    "dp-ifca": {"algorithm": {"name": "dp-ifca", "clusters": 2}},
    "km-cdpfl": {"algorithm": {"name": "km-cdpfl", "clusters": 2}},
    "mr-mtl": {"algorithm": {"name": "mr-mtl", "lam": 0.2}},
    "mr-mtl without pull": {"algorithm": {"name": "mr-mtl", "lam": 0.0}},
    "local": {"algorithm": {"name": "local"}},
    "em-fdro": {
        "algorithm": {"name": "em-fdro", "mode": "full", "clients_per_round": 3},
        "data": {**FEW, "validation": 0.1},
    },
    "fedcam": {**CLIENT_LEVEL, "algorithm": {**RR, "base": "fedcam", "guarantee": "expected"}},
    "dp-fedper": {**CLIENT_LEVEL, "algorithm": {"name": "dp-fedper", "sampling_rate": 1.0}},
}


@pytest.mark.parametrize(
    "form", [{"down": "float16", "up": "int8"}, {"down": "bfloat16", "up": "topk:0.1"}], ids=["int8", "top-k"]
)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_kind_of_algorithm_runs_with_compressed_messages(name, form, tmp_path):
    changes = {"data": FEW, **ALGORITHMS[name], "rounds": 2}
    if (name, form["up"]) == ("mr-mtl", "topk:0.1"):
        form = {**form, "up": FEEDBACK}
    compressed, plain = (
        simulate(made(tmp_path / kind, **changes, communication=chosen), tmp_path / kind / "ledgers")
        for kind, chosen in (("compressed", form), ("plain", {}))
    )
    assert compressed.models.shape == plain.models.shape
    assert np.isfinite(compressed.models).all()
    assert (compressed.models.tobytes() == plain.models.tobytes()) == (name == "local")


def test_the_mean_of_mr_mtl_lacks_what_its_clients_have_yet_to_send_and_nothing_else(tmp_path):
    """A client trains on from all of its model, which the server knows by the updates that it was sent."""
    changes = {"data": FEW, "rounds": 6, "model": {"name": "linear"}, "algorithm": {"name": "mr-mtl", "lam": 0.2}}
    job = made(tmp_path, **changes, communication={"up": {**FEEDBACK, "fraction": 0.2}})
    with federation(job, tmp_path / "ledgers", key_folder=tmp_path / "keys") as fed:
        state = job.algorithm.start(fed)
        for fed.round in range(1, 7):
            state = job.algorithm.round(state, fed.round, fed)
        own = [fed.hosts[client].gate.state() for client in fed.clients]
    mean, waiting = (np.mean([each[name] for each in own], axis=0) for name in ("model", "residual of train update"))
    assert np.linalg.norm(waiting) > 0.1
    assert state.models[0] + waiting == pytest.approx(mean, abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"communication": {"up": "topk:0"}}, "communication.up is 'topk:0': must be float32, int8, topk:FRACTION"),
        ({"communication": {"up": {"form": "top-k"}}}, "communication.up: fraction is None: required with form top-k"),
        ({"communication": {"up": {"form": "int8", "error_feedback": True}}}, "error_feedback is true: belongs to form top-k"),
        ({"communication": {"down": "float8"}}, "communication.down is 'float8': must be 'float32', 'float16' or 'bfloat16'"),
        ({"communication": {"up": "int8"}, "audit": {"canaries": 9}}, "audit.canaries is 9: the audit reads whole updates"),
        (
            {
                "communication": {"up": FEEDBACK},
                "privacy": {"epsilon": 8, "delta": 1e-2, "unit": "client", "trust": "trusted-server"},
                "algorithm": {"name": "rr-cluster", "clusters": 2, "min_cluster_size": 2, "sampling_rate": 1.0},
            },
            "communication.up.error_feedback is true: needs privacy.trust untrusted-server",
        ),
        (
            {"communication": {"up": "topk:0.1"}, "algorithm": {"name": "mr-mtl", "lam": 0.1}},
            "communication.up.error_feedback is false: must be true for mr-mtl with form top-k",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(changes, said):
    with pytest.raises(config.ConfigError) as caught:
        config.resolve({**SMALL, **changes})
    assert any(said in problem for problem in caught.value.problems), caught.value.problems


def test_no_signature_makes_a_residual_of_raw_updates_valid(tmp_path):
    """Workers served such a job: with samples of fixed size, what a client sends would tell in which samples it was before."""
    rr = {"algorithm": RR, "privacy": {**CLIENT_LEVEL["privacy"], "adjacency": "replace-one"}}
    document = made(tmp_path, data=FEW, **rr).protocol.model_dump()
    document["communication"] = {"down": "float32", "up": FEEDBACK}
    with pytest.raises(ValidationError, match=r"communication\.up\.error_feedback must be false with trust trusted-server"):
        Protocol.model_validate(document)


def test_the_short_and_the_long_form_are_one_setting():
    short, long = (
        config.resolve({**SMALL, "communication": {"up": up}}) for up in ("topk:0.1", {"form": "top-k", "fraction": 0.1})
    )
    assert short == long
    assert config.load(short) == short
    assert "communication" not in config.resolve({**SMALL, "communication": {"up": "float32"}}).model_dump()
