"""A malicious server of secure sums: real workers refuse; clients with a defence switched off give a single client's vector away."""

from __future__ import annotations

import multiprocessing
import time
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
from sum_play import Greedy, added, hosts_closed, hosts_of, rolled_back, shares_in, sum_job, sums_of, truth  # noqa: F401 - a fixture

from dpcfl_net.adversaries import malicious_sums
from dpcfl_net.adversaries.malicious_coordinator import MaliciousCoordinator
from dpcfl_net.adversaries.malicious_sums import MaliciousSums, SumPlayed
from dpcfl_net.adversaries.scripts import chosen
from dpcfl_net.adversaries.sum_attacks import SCRIPT
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.experiment.job_files import Job, write_job
from dpcfl_net.federation.secure import client_checks, client_side, masks
from dpcfl_net.federation.secure.keys import KEY_BYTES, Agreement, public_of, unseal
from dpcfl_net.federation.secure.messages import box_info, mask_key, self_mask_key
from dpcfl_net.federation.secure.recovery import recover_seed
from dpcfl_net.privacy.ledger.chain import read_ledger
from dpcfl_net.runtime.specs import WorkerSpec
from dpcfl_net.runtime.worker import run_worker
from dpcfl_net.transport.keys import client_key

CLIENTS, VICTIM = 4, 1
SERVER = bytes(range(32))  # secret key of the server
NO_SIGNATURES = np.zeros((CLIENTS, 64), np.uint8)


def nothing(*_: object) -> None:
    """In place of a check."""


@dataclass(frozen=True)
class Script:
    """Four rounds of a malicious server with worker processes: attacks in the first two, split models in the third, then none."""

    job: Job
    rounds: dict[int, SumPlayed]
    again: dict[str, dict]  # requests of round 1 after round 2
    charges: dict[int, list]

    def refusals(self, *attacks: str) -> str:
        both = {self.rounds[t].refusals(*attacks) for t in (1, 2)}
        assert len(both) == 1
        return both.pop()


@contextmanager
def workers(job: Job, folder):
    """Worker processes of all clients, forked here; they connect to the address in the file `address`, and end when told."""
    write_job(job, folder / "job", folder / "keys")
    operator, address = (folder / "job" / "operator.pub").read_text().strip(), folder / "address"

    def work(client: int) -> None:
        while not address.exists():
            time.sleep(0.01)
        run_worker(WorkerSpec(folder / "job", client, address.read_text(), None, folder / "keys", operator, folder / "ledgers"))

    processes = [multiprocessing.get_context("fork").Process(target=work, args=(client,)) for client in job.algorithm.clients]
    for process in processes:
        process.start()
    try:
        yield processes
        for process in processes:
            process.join(20)
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Script:
    folder = tmp_path_factory.mktemp("sums")
    job = sum_job(folder, CLIENTS)
    with (
        workers(job, folder) as started,
        MaliciousCoordinator(job.protocol, "tcp://127.0.0.1:*", folder / "keys", wait_s=60) as server,
    ):
        (folder / "new").write_text(server.address)
        (folder / "new").rename(folder / "address")
        assert server.join() == []
        sums = MaliciousSums(job.algorithm, server.ask)
        rounds = {t: sums.play(t, SCRIPT) for t in (1, 2)}
        again = {
            kind: server.ask(
                1, kind, {client: smaller(task) for client, task in rounds[1].tasks[kind].items() if client != VICTIM}
            )
            for kind in ("secure_shares", "masked_update", "secure_unmask")
        }
        again["same"] = server.ask(1, "masked_update", rounds[1].tasks["masked_update"])
        rounds |= {3: sums.play(3, split=True), 4: sums.play(4)}
    assert [process.exitcode for process in started] == [0] * CLIENTS
    charges = {client: read_ledger(folder / "ledgers" / client_key(client)) for client in range(CLIENTS)}
    return Script(job, rounds, again, charges)


def smaller(task: dict) -> dict:
    """The task with a list that lacks the victim."""
    name = "present" if "present" in task else "survivors"
    flags = task[name].copy()
    flags[VICTIM] = 0
    return {**task, name: flags}


def greatness(words: np.ndarray) -> float:
    """Mean size of words as numbers, over the largest; .5 for uniform words."""
    return float(np.abs(words.view(np.int32).astype(float)).mean() / 2**31)


def test_workers_refuse_every_attack_and_pay_for_the_rounds_alone(script):
    for t in (1, 2):
        reactions = script.rounds[t].reactions
        assert len(reactions) == len(SCRIPT) * CLIENTS
        assert all(reaction.holds for reaction in reactions), [str(r) for r in reactions if not r.holds]
    for t in (1, 2, 4):
        assert script.rounds[t].aborted == ""
        assert script.rounds[t].server.survivors == tuple(range(CLIENTS))
        assert greatness(script.rounds[t].total) < 0.2
    for entries in script.charges.values():
        paid = [(entry.round, entry.kind) for entry in entries if entry.type == "debit"]
        assert paid == [(t, kind) for t in (1, 2, 3, 4) for kind in script.rounds[t].tasks]


def test_a_script_of_sums_is_checked_before_it_is_played():
    with pytest.raises(ConfigError, match=r"unknown step 'gift'.*other-group, box-key"):
        chosen("box-key,gift", SCRIPT)
    assert chosen("all", SCRIPT) == list(SCRIPT)


@pytest.mark.scenario(20)
def test_split_models_give_a_sum_of_random_numbers(script, tmp_path, evidence, monkeypatch):
    split = greatness(script.rounds[3].total)
    assert 0.43 < split < 0.57  # of 650 words: 6 deviations
    assert greatness(script.rounds[4].total) < 0.2
    evidence.got(
        f"the masks do not cancel: the words are uniform (mean size {split:.2f} of the largest), the next round is whole"
    )
    for module in (client_side, malicious_sums):
        monkeypatch.setattr(module, "context_of", lambda tensors: bytes(32))
    words, job = truth(monkeypatch), sum_job(tmp_path, CLIENTS)
    played = sums_of(job, hosts_of(job, tmp_path)).play(1, split=True)
    assert np.array_equal(played.total, added(words.values()))
    evidence.control("with masks not bound to the model the sum over different models is opened")


@pytest.mark.scenario(21)
def test_both_kinds_of_shares_of_one_client_are_never_given(script, tmp_path, evidence, monkeypatch):
    codes = script.refusals("both-shares", "other-list")
    assert codes == "secure-survivors, other-content"
    evidence.got(f"shares for another list, before and after the first: refused ({codes})")
    words, job = truth(monkeypatch), sum_job(tmp_path, CLIENTS)
    hosts = hosts_of(job, tmp_path)
    greedy = Greedy(sums_of(job, hosts), 1).until_masked()
    monkeypatch.setattr(client_checks, "check_unmask", nothing)
    everyone = np.ones(CLIENTS, np.uint8)
    copies = sums_of(job, rolled_back(job, tmp_path, "copies"))
    task = {"survivors": everyone, "signatures": NO_SIGNATURES}
    assert greedy.ask("secure_unmask", dict.fromkeys(range(CLIENTS), task)) == {}
    seeds = shares_in(greedy.answers["secure_unmask"])
    greedy.sums = copies
    assert greedy.ask("secure_unmask", dict.fromkeys(range(CLIENTS), smaller(task))) == {}
    secrets = shares_in(greedy.answers["secure_unmask"])
    assert np.array_equal(greedy.alone(VICTIM, seeds, secrets, copies.context(1)), words[1, VICTIM])
    evidence.control("from clients without memory and without the check, both kinds of shares open one client's vector")


@pytest.mark.scenario(22)
def test_swapped_and_unsigned_keys_are_refused(script, tmp_path, evidence, monkeypatch):
    codes = script.refusals("box-key", "mask-key", "unsigned", "exchanged", "old-keys", "own-keys")
    assert codes == "secure-signature, secure-keys"
    evidence.got(
        f"the server's keys, unsigned, exchanged and old keys, a client's own replaced: refused ({codes}), nothing charged"
    )
    words, job = truth(monkeypatch), sum_job(tmp_path, CLIENTS)
    monkeypatch.setattr(client_checks, "verify", lambda *_: True)
    sums = sums_of(job, hosts_of(job, tmp_path))
    greedy = Greedy(sums, 1)
    greedy.ask("secure_keys", greedy.server.keys_tasks())
    for client, release in greedy.answers["secure_keys"].items():
        assert greedy.server.add_keys(client, release)
    task = greedy.server.shares_tasks()[VICTIM]
    mine = np.frombuffer(public_of(SERVER) * 2, np.uint8)
    others = [at for at, holder in enumerate(greedy.terms.holders(VICTIM)) if holder != VICTIM]
    task["keys"][others, : 2 * KEY_BYTES] = mine
    greedy.ask("secure_shares", {VICTIM: task})
    boxes = greedy.answers["secure_shares"][VICTIM]["boxes"]
    model = sums.masked_model(1)
    greedy.ask("masked_update", {VICTIM: {"present": task["present"], "boxes": np.zeros_like(boxes), **model}})
    public, agreement = greedy.answers["secure_keys"][VICTIM]["keys"].tobytes(), Agreement(SERVER)
    shares, minus, plus = [], list[bytes](), list[bytes]()
    for at in others:
        holder = greedy.terms.holders(VICTIM)[at]
        key = agreement.key(public[:KEY_BYTES], box_info(greedy.terms, 1, VICTIM, holder))
        shares.append((greedy.terms.position(holder) + 1, unseal(key, boxes[at].tobytes())[:33]))
        mask = mask_key(
            greedy.terms, 1, agreement, public[KEY_BYTES : 2 * KEY_BYTES], (VICTIM, holder), task["present"], sums.context(1)
        )
        (minus if holder > VICTIM else plus).append(mask)
    minus.append(self_mask_key(greedy.terms, 1, VICTIM, recover_seed(greedy.terms.share_threshold, shares)))
    vector = greedy.answers["masked_update"][VICTIM]["masked"].copy()
    masks.apply(vector, plus, minus)
    assert np.array_equal(vector, words[1, VICTIM])
    evidence.control("without the check of signatures the server poses as all others and opens one client's vector")


@pytest.mark.scenario(23)
def test_fewer_than_the_threshold_are_refused(script, tmp_path, evidence, monkeypatch):
    codes = script.refusals("few-present", "few-boxes", "few-survivors", "few-unmasked")
    assert codes == "secure-threshold"
    assert script.refusals("other-group") == "secure-group"
    evidence.got(f"2 of 4 clients at each stage, a smaller group: refused ({codes}, secure-group), nothing charged")
    words, job = truth(monkeypatch), sum_job(tmp_path, CLIENTS)
    monkeypatch.setattr(client_checks, "_check_survivors", nothing)
    sums = sums_of(job, hosts_of(job, tmp_path))
    greedy, alone = Greedy(sums, 1).until_masked(), np.zeros(CLIENTS, np.uint8)
    alone[VICTIM] = 1
    assert greedy.ask("secure_survivors", {client: {"survivors": alone} for client in range(CLIENTS)}) == {}
    signatures = np.stack([release["signature"] for _, release in sorted(greedy.answers["secure_survivors"].items())])
    opening = {"survivors": alone, "signatures": signatures}
    assert greedy.ask("secure_unmask", dict.fromkeys(range(CLIENTS), opening)) == {}
    shares = shares_in(greedy.answers["secure_unmask"])
    assert np.array_equal(greedy.opened({VICTIM}, shares, sums.context(1)), words[1, VICTIM])
    evidence.control("without the check of the threshold, the sum of one client is signed and opened")


@pytest.mark.scenario(38)
def test_lists_of_survivors_that_differ_between_clients_are_refused(script, tmp_path, evidence, monkeypatch):
    """Seven clients, of which five must survive: every list names five, but most clients are told that 0, 1 and 2 dropped out."""
    codes = script.refusals("second-list", "unsigned-list", "other-list")
    assert codes == "other-content, secure-signature, secure-survivors"
    words, job = truth(monkeypatch), sum_job(tmp_path, 7)
    sums = sums_of(job, hosts_of(job, tmp_path))
    greedy = Greedy(sums, 1).until_masked()
    assert (greedy.terms.survivors_needed, greedy.terms.share_threshold) == (5, 4)
    hidden = {0: (1, 2), 1: (0, 2), 2: (0, 1), 3: (0, 1), 4: (1, 2), 5: (0, 2), 6: (0, 1)}
    lists = {client: np.array([other not in gone for other in range(7)], np.uint8) for client, gone in hidden.items()}
    assert sum(2 in gone for gone in hidden.values()) == greedy.terms.share_threshold
    tasks = {client: {"survivors": flags, "signatures": np.ones((7, 64), np.uint8)} for client, flags in lists.items()}
    assert set(greedy.ask("secure_unmask", tasks).values()) == {"secure-signature"}
    evidence.got(f"a second list, an unsigned one, one with the signatures of another: refused ({codes}); nobody opens")
    monkeypatch.setattr(client_checks, "verify", lambda *_: True)
    assert greedy.ask("secure_unmask", tasks) == {}
    shares = shares_in(greedy.answers["secure_unmask"])
    opened = greedy.opened(range(3, 7), shares, sums.context(1))
    assert np.array_equal(opened, added(words[1, client] for client in range(3, 7)))
    evidence.control("without signatures, seven lists of 5 open the sum of 4: less noise than the shares that epsilon counts")


@pytest.mark.scenario(40)
def test_a_round_again_with_another_subset_is_refused(script, tmp_path, evidence, monkeypatch):
    assert script.refusals("other-present") == "other-content"
    for kind in ("secure_shares", "masked_update", "secure_unmask"):
        assert {(heard.answer, heard.code) for heard in script.again[kind].values()} == {("refused", "other-content")}
    for client, heard in script.again["same"].items():
        first = script.rounds[1].answers["masked_update"][client].tensors
        assert heard.answer == "stale" or np.array_equal(heard.tensors["masked"], first["masked"])
    evidence.got("round 1 without one client, at once and a round later: refused (other-content); unchanged: no new bytes")
    words, job = truth(monkeypatch), sum_job(tmp_path, CLIENTS)
    first = sums_of(job, hosts_of(job, tmp_path)).play(1)
    forgetful = sums_of(job, hosts_of(job, tmp_path, "forgotten"))
    ask = forgetful.ask
    forgetful.ask = lambda t, kind, tasks: ask(t, kind, {client: task for client, task in tasks.items() if client != VICTIM})
    second = forgetful.play(1)
    assert second.server.survivors == tuple(client for client in range(CLIENTS) if client != VICTIM)
    assert np.array_equal(first.total - second.total, words[1, VICTIM])
    evidence.control("with the ledgers' memory off and the same randomness, the difference of two sums is one client's vector")
