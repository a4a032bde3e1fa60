"""Compute slots hold between processes and across crashes; a checkpoint is whole or not there."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
import time
import tracemalloc
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest
from full_disk import files_do_not_grow
from safetensors.numpy import save

from dpcfl_net.core.errors import RunFailed
from dpcfl_net.core.lock_holders import is_stopped
from dpcfl_net.core.types import State
from dpcfl_net.federation.capabilities import Capabilities
from dpcfl_net.runtime.checkpoint import Checkpoints
from dpcfl_net.runtime.coordinator import drive
from dpcfl_net.runtime.specs import WorkerSpec
from dpcfl_net.runtime.worker_process import turns
from dpcfl_net.training.compute_semaphore import ComputeSemaphore, cpu_folder, host_folder


@contextmanager
def a_slot(folder, count):
    """Hold a slot of a semaphore that is closed afterwards."""
    with closing(ComputeSemaphore(folder, count)) as slots, slots.hold():
        yield


def work(folder, holders, most, hold_s, start):
    slots = ComputeSemaphore(folder, 2)
    start.wait(60)
    for _ in range(5):
        with slots.hold():
            with holders.get_lock():
                holders.value += 1
                most.value = max(most.value, holders.value)
            time.sleep(hold_s)
            with holders.get_lock():
                holders.value -= 1


def test_no_more_hold_a_slot_than_there_are(tmp_path):
    context = multiprocessing.get_context("fork")
    holders, most = context.Value("i", 0), context.Value("i", 0)
    start = context.Barrier(6)
    workers = [context.Process(target=work, args=(tmp_path, holders, most, 0.01, start)) for _ in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 6
    assert most.value == 2  # both slots were used, and never a third


def test_a_killed_holder_gives_its_slot_back(tmp_path):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with a_slot(tmp_path, 1):
            os.write(writer, b"held")
            time.sleep(60)
        os._exit(0)
    assert os.read(reader, 4) == b"held"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    started = time.monotonic()
    with a_slot(tmp_path, 1):
        assert time.monotonic() - started < 30  # and not the minute that it would have had it


def test_a_stopped_waiter_holds_nobody_up_and_a_stopped_holder_only_its_slot(tmp_path):
    """One slot: a worker that is stopped while it waits for it, and others that want it too; then one that holds it."""
    context = multiprocessing.get_context("fork")
    ready, go = context.Event(), context.Event()

    def waiting():
        slots = ComputeSemaphore(tmp_path, 1)
        ready.set()
        with slots.hold():
            go.set()
            time.sleep(60)

    with a_slot(tmp_path, 1):
        waiter = context.Process(target=waiting)
        waiter.start()
        assert ready.wait(60)
        time.sleep(0.2)
        os.kill(waiter.pid, signal.SIGSTOP)
    started = time.monotonic()
    for _ in range(3):
        with a_slot(tmp_path, 1):
            pass
    assert time.monotonic() - started < 30  # the waiter is stopped until now
    os.kill(waiter.pid, signal.SIGCONT)
    assert go.wait(60)
    os.kill(waiter.pid, signal.SIGSTOP)  # now it holds one of two
    with a_slot(tmp_path, 2):
        assert time.monotonic() - started < 60
    waiter.kill()
    waiter.join()


@pytest.fixture
def stopped_holders():
    """Starts processes that take a slot and are stopped while they hold it, one after the other."""
    context, made = multiprocessing.get_context("fork"), []

    def hold(folder, held) -> None:
        with a_slot(folder, 1):
            held.set()
            time.sleep(600)

    def start(folder):
        held = context.Event()
        made.append(context.Process(target=hold, args=(folder, held)))
        made[-1].start()
        assert held.wait(60)
        os.kill(made[-1].pid, signal.SIGSTOP)
        return made[-1].pid

    yield start
    for process in made:
        process.kill()
        process.join()


@pytest.mark.timeout(120)
def test_a_run_that_is_stopped_holds_up_no_other_run(tmp_path, stopped_holders, caplog):
    """The second process that is stopped holds the stand-in of the first one's slot."""
    pids = [stopped_holders(tmp_path) for _ in range(2)]
    others = ComputeSemaphore(tmp_path, 1)
    with closing(ComputeSemaphore(tmp_path, 1)) as slots:
        for _ in range(3):
            with slots.hold():
                others._semaphore[0].look()
                assert others._take() is None  # one more computes, not any number
    assert [text.partition(" while it holds ")[0] for text in caplog.messages[:2]] == [
        f"process {pid} is stopped" for pid in pids
    ]
    os.kill(pids[0], signal.SIGCONT)
    while is_stopped(pids[0]):
        time.sleep(0.01)
    assert others._take() is None  # its holder computes again: the slot has no stand-in
    others.close()


@pytest.mark.timeout(60)
def test_a_slot_that_stands_for_memory_is_waited_for_and_its_holder_named(tmp_path, stopped_holders, caplog):
    pid, taken = stopped_holders(tmp_path), []

    def waiting():
        with closing(ComputeSemaphore(tmp_path, 1, stand_ins=False)) as slots, slots.hold():
            taken.append(caplog.messages[-1])

    waiter = threading.Thread(target=waiting)
    waiter.start()
    while not caplog.messages:
        time.sleep(0.01)
    assert not taken
    os.kill(pid, signal.SIGKILL)
    waiter.join(30)
    (text,) = taken
    assert text.startswith(f"process {pid} is stopped")
    assert text.endswith("this process waits until it continues or ends")


def test_giving_back_wakes_who_waits_without_delay(tmp_path):
    context = multiprocessing.get_context("fork")
    reader, writer = os.pipe()

    def waiting():
        with a_slot(tmp_path, 1):
            os.write(writer, np.float64(time.monotonic()).tobytes())

    delays = []
    for _ in range(5):
        with a_slot(tmp_path, 1):
            waiter = context.Process(target=waiting)
            waiter.start()
            time.sleep(0.15)
        given = time.monotonic()
        waiter.join(60)
        delays.append(float(np.frombuffer(os.read(reader, 8), np.float64)[0]) - given)
    assert min(delays) < 0.5, delays  # it was woken, and did not look for itself a second after it began to wait


def test_slots_that_nobody_waits_for_leave_as_many_wake_ups_as_there_are_slots(tmp_path):
    """A pipe takes 65,536 bytes: a worker without others would end after as many steps."""
    with closing(ComputeSemaphore(tmp_path / "slots", 2)) as slots:
        for _ in range(5):
            with slots.hold():
                pass
        free = os.open(tmp_path / "slots" / "free", os.O_RDONLY | os.O_NONBLOCK)
        assert os.read(free, 10) == b"xx"
        os.close(free)
    assert (tmp_path / "slots").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "slots").iterdir()} == {0o600}


def test_slots_belong_to_the_host_and_the_user_across_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert host_folder() == tmp_path / "dpcfl_net" / boot
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert str(host_folder()).startswith(f"/tmp/dpcfl_net-{os.getuid()}/")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "of the host of the login"))  # as srun passes it on
    assert str(host_folder()).startswith(f"/tmp/dpcfl_net-{os.getuid()}/")
    specs = [WorkerSpec(tmp_path / run, 0, "", None, tmp_path, "", tmp_path) for run in ("a", "b")]
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    with turns(specs[0])():
        held = ComputeSemaphore(cpu_folder(), 1)
        assert held._take() is None  # what another run on this host would find
    with turns(specs[1])():
        pass


def test_runs_on_disjoint_cores_do_not_wait_for_each_other(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    cores = {0}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    spec = WorkerSpec(tmp_path / "a", 0, "", None, tmp_path, "", tmp_path)
    with turns(spec)():
        assert ComputeSemaphore(cpu_folder(), 1)._take() is None
        cores = {1}
        assert ComputeSemaphore(cpu_folder(), 1)._take() is not None


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    (tmp_path / "dpcfl_net").symlink_to(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(RunFailed, match="is not a folder of this user"):
        host_folder()
    (tmp_path / "dpcfl_net").unlink()
    (tmp_path / "dpcfl_net").write_text("")
    with pytest.raises(RunFailed, match="cannot be created"):
        host_folder()
    (tmp_path / "dpcfl_net").unlink()
    folder, mine = host_folder(), os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    with pytest.raises(RunFailed, match="is not a folder of this user"):
        host_folder()
    assert {path.stat().st_mode & 0o777 for path in (folder, folder.parent)} == {0o700}


def state(value: float) -> State:
    memory = {"posteriors": np.full((3, 2), float(value)), "soft_until": 7, "nested": {"list": [1, None, "x"]}}
    return State(np.full((2, 5), value, np.float32), [0, None, 1], memory, {"phase": "soft", "shares": [1.0, None]})


def test_a_state_is_read_as_it_was_written_and_old_ones_go(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.newest() is None
    for t in range(1, 5):
        checkpoints.write(t, state(t))
        assert checkpoints.read(t).models.tobytes() == state(t).models.tobytes()  # before its flush has ended
    checkpoints.flush()
    assert checkpoints.rounds() == [3, 4]
    found = Checkpoints(tmp_path).newest()
    assert found is not None
    t, read = found
    assert (t, read.assignment, read.memory["nested"], read.memory["soft_until"]) == (
        4,
        [0, None, 1],
        {"list": [1, None, "x"]},
        7,
    )
    assert read.models.tobytes() == state(4).models.tobytes()
    assert read.diagnostics == {"phase": "soft", "shares": [1.0, None]}
    assert read.memory["posteriors"].dtype == np.float64
    assert (read.memory["posteriors"] == 4).all()
    read.memory["posteriors"] += 1  # a round may write into its state, also the first one of a resumed run
    empty = State(np.empty((0, 5), np.float32), [None])
    checkpoints.write(5, empty)
    checkpoints.flush()
    assert checkpoints.read(5).models.shape == (0, 5)


def test_a_half_written_checkpoint_is_not_one(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.write(1, state(1))
    (tmp_path / ".round_00002.part").mkdir()
    (tmp_path / "notes.txt").write_text("not ours")
    (tmp_path / "round_x").mkdir()
    assert checkpoints.rounds() == [1]
    checkpoints.write(2, state(2))
    checkpoints.flush()
    assert checkpoints.rounds() == [1, 2]


def test_the_checkpoint_before_is_flushed_and_only_then_the_oldest_removed(tmp_path, monkeypatch):
    """With one to keep: the one before is there until the new one is on the disk."""
    checkpoints, flushed, rounds = Checkpoints(tmp_path, keep=1), [], []
    real = os.fsync

    def noted(handle):
        flushed.append(os.readlink(f"/proc/self/fd/{handle}").removeprefix(f"{tmp_path}/"))
        rounds.append(checkpoints.rounds())
        real(handle)

    checkpoints.write(1, state(1))
    checkpoints.flush()
    monkeypatch.setattr(os, "fsync", noted)
    checkpoints.write(2, state(2))
    checkpoints.flush()
    files = {f"round_00002/{name}" for name in ("state.msgpack", "cluster_0.safetensors", "cluster_1.safetensors", "sha256")}
    assert (set(flushed[:4]), flushed[4:]) == (files, ["round_00002", str(tmp_path)])
    assert rounds == [[1, 2]] * 6
    assert checkpoints.rounds() == [2]


def test_one_thread_flushes_all_checkpoints(tmp_path, monkeypatch):
    """Each round waited until a new thread had started: 3 ms while workers used the cores."""
    checkpoints, threads, real = Checkpoints(tmp_path), [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (threads.append(threading.current_thread()), real(handle)))
    for t in (1, 2, 3):
        checkpoints.write(t, state(t))
    checkpoints.flush()
    assert len(set(threads) | {threading.current_thread()}) == 2


class SlowDisk(Checkpoints):
    """Flushes each checkpoint only after a while; `flushed` lists them."""

    def _flush(self, final):
        time.sleep(0.1)
        self.flushed = [*getattr(self, "flushed", []), int(final.name[6:])]
        super()._flush(final)


def a_job(rounds, clients=1, parameters=2):
    privacy = SimpleNamespace(trust="untrusted-server")
    return SimpleNamespace(rounds=rounds, clients=range(clients), model=SimpleNamespace(parameters=parameters), privacy=privacy)


def test_a_round_that_lacks_clients_is_flushed_before_the_next_one_begins(tmp_path):
    checkpoints, fed, seen = SlowDisk(tmp_path), SimpleNamespace(missing=[]), {}

    class Rounds:
        protocol, capabilities = a_job(rounds=3), Capabilities(0.0)

        def start(self, fed):
            return State(np.zeros((1, 2), "f4"), [0], {})

        def round(self, state, t, fed):
            seen[t] = list(getattr(checkpoints, "flushed", []))
            fed.missing = [5] if t == 2 else []
            return state

    told = []
    drive(Rounds(), fed, checkpoints, lambda t, state: told.append((t, checkpoints.rounds()[-1])))
    assert seen == {1: [], 2: [], 3: [1, 2]}
    assert told == [(1, 1), (2, 2), (3, 3)]  # a round is told once its checkpoint is there


def test_a_resumed_run_writes_and_flushes_its_checkpoint_before_the_next_round(tmp_path, monkeypatch):
    """After a failed flush the system takes a file for written. A power failure would take the checkpoint of a round that lacked
    clients, which refuse another model, or three rounds, of which clients keep the answers of two."""
    first, trail = Checkpoints(tmp_path / "checkpoints"), []
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        first.write(1, state(1))
        with pytest.raises(OSError, match="Input/output"):
            first.flush()

    def noted(name):
        real = getattr(os, name)

        def call(handle, *rest):
            trail.append((name, os.path.relpath(os.readlink(f"/proc/self/fd/{handle}"), tmp_path)))
            return real(handle, *rest)

        return call

    class Rounds:
        capabilities = Capabilities(0.0, published_models=2)
        protocol = a_job(rounds=2, clients=len(state(1).assignment), parameters=state(1).models.shape[1])

        def round(self, state, t, fed):
            trail.append(f"round {t}")
            return state

    for name in ("pwritev", "fsync"):
        monkeypatch.setattr(os, name, noted(name))
    drive(Rounds(), SimpleNamespace(missing=[]), Checkpoints(tmp_path / "checkpoints"), lambda t, state: None)
    before = trail[: trail.index("round 2")]
    folder = Path("checkpoints/round_00001")
    for file in ("state.msgpack", "cluster_0.safetensors", "cluster_1.safetensors", "sha256"):
        assert before.index(("pwritev", str(folder / file))) < before.index(("fsync", str(folder / file)))
    assert [("fsync", name) for name in (str(folder), "checkpoints", ".")] == before[-3:]


@pytest.mark.parametrize("at_first", [True, False])
def test_an_algorithm_with_more_models_than_it_declares_is_told_what_to_declare(tmp_path, at_first):
    class Growing:
        protocol, capabilities = a_job(rounds=1), Capabilities(0.0)

        def start(self, fed):
            return State(np.zeros((1 + at_first, 2), "f4"), [0], {})

        def round(self, state, t, fed):
            return State(np.zeros((2, 2), "f4"), [0], {})

    with pytest.raises(
        RunFailed, match=r"Growing has 2 rows in State\.models: Capabilities\.published_models, here 1, must be"
    ):
        drive(Growing(), SimpleNamespace(missing=[]), Checkpoints(tmp_path), lambda t, state: None)
    assert Checkpoints(tmp_path).newest() is None


TWO = np.zeros((2, 2), "f4")


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (None, r"Wrong returned NoneType: must return a State"),
        (State(TWO.astype("f8"), [0, 1, 1]), r"Wrong has float64 \(2, 2\) as State\.models: must be float32 \(M, 2\), one row"),
        (State(TWO[:0], [None] * 3), r"Wrong has 0 rows in State\.models: must be at least 1, those that clients use"),
        (State(TWO[0], [0, 1, 1]), r"float32 \(2,\) as State\.models"),
        (State(np.zeros((2, 4), "f4"), [0, 1, 1]), r"float32 \(2, 4\) as State\.models"),
        (State([TWO[0], TWO[1]], [0, 1, 1]), r"list as State\.models"),
        (State(np.float32([[0, 1], [np.nan, 0]]), [0, 1, 1]), r"Wrong has a NaN or an infinity in row 1 of State\.models"),
        (State(np.float32([[0, -np.inf], [0, 0]]), [0, 1, 1]), r"Wrong has a NaN or an infinity in row 0 of State\.models"),
        (State(TWO, np.array([0, 1, 1])), r"ndarray in State\.assignment: must be a list with an int or None for each client"),
        (State(TWO, [0, np.int64(1), 1]), r"int, int64 in State\.assignment"),
        (State(TWO, [0, 1]), r"2 entries in State\.assignment: must be one for each of 3 clients"),
        (State(TWO, [0, 1, 2]), r"the cluster 2 in State\.assignment: State\.models has 2, numbered from 0"),
        (State(TWO, [0, None, -1]), r"the cluster -1 in State\.assignment"),
        (State(TWO, [0, 1, 1], {"seen": {1: 2}}), r"after round 1 cannot be stored: a dict has the key 1; .* texts as keys"),
        (State(TWO, [0, 1, 1], {"seen": {1, 2}}), r"after round 1 cannot be stored: can not serialize 'set' object"),
        (State(TWO, [0, 1, 1], {"seen": 2**70}), r"after round 1 cannot be stored: "),
        (State(TWO, [0, 1, 1], diagnostics={"key": b"k"}), r"after round 1 cannot be stored: bytes; .* hold numbers, texts"),
        (State(TWO, [0, 1, 1], {"seen": np.array([None])}), r"after round 1 cannot be stored: an array of objects"),
    ],
)
def test_a_state_that_would_be_evaluated_or_read_back_as_another_one_ends_the_run(tmp_path, state, words):
    class Wrong:
        protocol, capabilities = a_job(rounds=1, clients=3), Capabilities(0.0, published_models=2)

        def start(self, fed):
            return State(TWO, [0, 1, None])

        def round(self, earlier, t, fed):
            return state

    with pytest.raises(RunFailed, match=words):
        drive(Wrong(), SimpleNamespace(missing=[]), Checkpoints(tmp_path), lambda t, state: None)
    assert list(tmp_path.iterdir()) == []


def test_clusters_of_personal_models_have_no_rows(tmp_path):
    class Personal:
        protocol, capabilities = a_job(rounds=1, clients=3), Capabilities(0.0, personal=True)

        def start(self, fed):
            return State(TWO[:0], [None] * 3)

        def round(self, state, t, fed):
            return State(TWO[:1], [0, 1, 2])

    assert drive(Personal(), SimpleNamespace(missing=[]), Checkpoints(tmp_path), lambda t, state: None).assignment == [0, 1, 2]


def test_a_flush_that_fails_stops_the_next_write(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    checkpoints = Checkpoints(tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    checkpoints.write(1, state(1))
    with pytest.raises(OSError, match="No space"):
        checkpoints.write(2, state(2))
    assert checkpoints.rounds() == [1]


def test_a_checkpoint_whose_flush_cannot_start_ends_the_run_and_does_not_hold_it_up(tmp_path, monkeypatch):
    """As under a limit on processes (`ulimit -u`, a container's): the end of the run waited for that flush for ever."""

    def refused(self):
        raise RuntimeError("can't start new thread")

    checkpoints = Checkpoints(tmp_path)
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            checkpoints.write(1, State(np.zeros((1, 2), np.float32), [0]))
    end = threading.Thread(target=checkpoints.flush, daemon=True)
    end.start()
    end.join(10)
    assert not end.is_alive()
    checkpoints.write(2, State(np.ones((1, 2), np.float32), [0]))
    checkpoints.flush()
    assert checkpoints.newest()[0] == 2


def test_a_full_disk_names_the_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    with files_do_not_grow(), pytest.raises(OSError, match="File too large") as found:
        checkpoints.write(1, state(1))
    assert found.value.filename == str(tmp_path / "round_00001")
    checkpoints.write(1, state(1))
    checkpoints.flush()
    assert Checkpoints(tmp_path).newest()[0] == 1


def write(folder, t):
    """Write a checkpoint and wait for its flush."""
    checkpoints = Checkpoints(folder)
    checkpoints.write(t, state(t))
    checkpoints.flush()


def flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["state.msgpack", "cluster_0.safetensors", "cluster_1.safetensors", "sha256"])
@pytest.mark.parametrize("damage", [flipped, lambda path: path.write_bytes(path.read_bytes()[:-3]), lambda path: path.unlink()])
def test_a_damaged_checkpoint_is_told_and_the_one_before_is_taken(tmp_path, name, damage):
    """Any file cut, changed in one bit or gone: never other models without a word."""
    for t in (1, 2):
        write(tmp_path, t)
    damage(tmp_path / "round_00002" / name)
    said = []
    found = Checkpoints(tmp_path, warn=said.append).newest()
    assert found is not None
    assert (found[0], found[1].models.tobytes()) == (1, state(1).models.tobytes())
    (text,) = said
    assert "round_00002 cannot be read" in text
    damage(tmp_path / "round_00001" / name)
    with pytest.raises(RunFailed, match=r"no checkpoint in .* can be read: rounds 1, 2"):
        Checkpoints(tmp_path).newest()
    write(tmp_path, 2)
    assert Checkpoints(tmp_path).newest()[0] == 2


def test_a_file_in_a_checkpoints_place_is_passed_over_and_replaced(tmp_path):
    write(tmp_path, 1)
    (tmp_path / "round_00002").write_text("stray")
    assert Checkpoints(tmp_path).newest()[0] == 1
    write(tmp_path, 2)
    assert Checkpoints(tmp_path).newest()[0] == 2


def forge(folder, change):
    """Change the fields of a state, or the second model, and write the hashes that fit."""
    path, hashes = folder / ("state.msgpack" if isinstance(change, dict) else "cluster_1.safetensors"), folder / "sha256"
    before = path.read_bytes()
    path.write_bytes(msgpack.packb(msgpack.unpackb(before) | change) if isinstance(change, dict) else save({"theta": change}))
    old, new = (hashlib.sha256(data).hexdigest() for data in (before, path.read_bytes()))
    hashes.write_text(hashes.read_text().replace(f"{old}  {path.name}", f"{new}  {path.name}"))


@pytest.mark.parametrize(
    "change",
    [{"models": [2**40, 5]}, {"models": [2, 2**40]}, {"models": [3, 5]}, {"models": [2, 4]}, {"models": [-1, -1]}, {"models": None},
     {"memory": {"a": {"__array__": ["<f8", [2**40], b""]}}}, {"memory": {"a": {"__array__": ["O", [1], bytes(8)]}}}, {"memory": {"__array__": 1}},
     {"memory": 5}, {"assignment": 0}, {"diagnostics": []}, {"round": 3}, np.zeros(5), np.zeros(1, "f4")],
)  # fmt: skip
def test_a_checkpoint_of_other_content_with_hashes_that_fit_is_told_and_takes_no_memory(tmp_path, change):
    """The observer reads those of a server that nobody trusts: it ended in a traceback, or took the memory that a shape claimed."""
    for t in (1, 2):
        write(tmp_path, t)
    forge(tmp_path / "round_00002", change)
    said = []
    tracemalloc.start()
    try:
        found = Checkpoints(tmp_path, warn=said.append).newest()
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()
    assert found[0] == 1
    assert "round_00002 cannot be read" in said[0]


@pytest.mark.parametrize("name", ["../secret", "/dev/zero", "pipe"])
def test_a_checkpoint_names_its_own_regular_files_alone(tmp_path, name):
    write(tmp_path / "checkpoints", 1)
    folder = tmp_path / "checkpoints" / "round_00001"
    os.mkfifo(folder / "pipe")
    (folder / "sha256").write_text(f"{'0' * 64}  {name}\n")
    with pytest.raises(RunFailed, match=r"is not the name of one of its files|named pipe"):
        Checkpoints(tmp_path / "checkpoints").read(1)


def test_a_checkpoint_of_another_round_is_not_taken_for_one_of_this(tmp_path):
    for t in (1, 2):
        write(tmp_path, t)
    (tmp_path / "round_00001").rename(tmp_path / "round_00003")
    with pytest.raises(RunFailed, match="it holds round 1"):
        Checkpoints(tmp_path).read(3)
