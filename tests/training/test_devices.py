"""GPUs: who is given which, how a process is bound to its own before CUDA starts, leases, and the engine on one."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import gpu_checks
import numpy as np
import pytest
import torch
from conftest import ROOT, SMALL, dpcfl
from records import KEY, Images, start

from dpcfl_net.core.errors import ConfigError, RunFailed
from dpcfl_net.core.frozen import digest
from dpcfl_net.core.types import Task
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.experiment.config_schema import RuntimeSettings
from dpcfl_net.launch.cli import doctor
from dpcfl_net.privacy import device_noise
from dpcfl_net.privacy.slots import DPSGDSlot
from dpcfl_net.runtime.client_hosts import make_host
from dpcfl_net.runtime.specs import WorkerSpec
from dpcfl_net.runtime.worker_process import turns
from dpcfl_net.training import devices, models
from dpcfl_net.training.deep_path import DeepPath
from dpcfl_net.training.devices import CPU, Device
from dpcfl_net.training.dpsgd import Evaluator, Trainer
from dpcfl_net.training.gradient_engines import PATHS
from dpcfl_net.training.nvidia_smi import memory_by_process
from dpcfl_net.training.opacus_path import OpacusPath
from dpcfl_net.training.physical_batches import SameBits
from dpcfl_net.training.sgd import PlainSGD
from dpcfl_net.transport.keys import make_keys

A, B, C = (f"GPU-{letter * 8}-1111-2222-3333-444444444444" for letter in "abc")
SLICE, OTHER = (f"MIG-{letter * 8}-1111-2222-3333-444444444444" for letter in "de")
SMI = f"""#!/bin/sh
case "$1" in
  --query-gpu=*) cat <<X
{A}, 81559, 40000, NVIDIA H100 80GB HBM3
{B}, 81559, 80000, NVIDIA H100 80GB HBM3
{C}, 81559, 20000, NVIDIA H100 80GB HBM3
X
  ;;
  --query-compute-apps=*) printf '17, 500\\n17, 20\\n18, [N/A]\\n' ;;
  -L) cat <<X
GPU 0: NVIDIA H100 80GB HBM3 (UUID: {A})
  MIG 1g.10gb     Device  0: (UUID: {SLICE})
  MIG 2g.20gb     Device  1: (UUID: {OTHER})
GPU 1: NVIDIA H100 80GB HBM3 (UUID: {B})
X
  ;;
esac
"""


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """A machine with three GPUs, the first of them cut into slices, and a torch with CUDA; gives how to change what is printed."""
    path = tmp_path / "bin" / "nvidia-smi"
    path.parent.mkdir()

    def say(script: str) -> None:
        path.write_text(script)
        path.chmod(0o755)

    say(SMI)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    return say


def settings(**changes) -> RuntimeSettings:
    return RuntimeSettings(**changes)


def given(workers: int, **changes) -> list[str | None]:
    return [device.uuid for device in devices.assign(settings(**changes), workers, devices.visible_gpus())]


def refusal(**changes) -> str:
    with pytest.raises(ConfigError) as caught:
        given(1, **changes)
    return str(caught.value)


def test_gpus_are_read_with_their_memory(smi):
    gpus = devices.visible_gpus()
    assert [gpu.uuid for gpu in gpus] == [A, B, C]
    assert (gpus[1].name, gpus[1].total, gpus[1].free) == ("NVIDIA H100 80GB HBM3", 81559 << 20, 80000 << 20)
    assert memory_by_process() == {17: 520 << 20, 18: 0}


@pytest.mark.parametrize(
    ("allowed", "seen"),
    [
        ("", []), ("-1", []), ("1", [B]), ("2, 0", [C, A]), ("0,7,1", [A]), ("1,1", []), (B, [B]), ("GPU-cccc,GPU-aaaa", [C, A]),
        ("GPU-", []), (SLICE, [SLICE]), ("MIG-eee", [OTHER]), ("none", []),
    ],
)  # fmt: skip
def test_what_cuda_would_not_see_is_not_given_away(smi, monkeypatch, allowed, seen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    assert [gpu.uuid for gpu in devices.visible_gpus()] == seen


def test_numbers_of_gpus_of_different_kinds_are_not_guessed(smi, monkeypatch):
    smi(SMI.replace("80000, NVIDIA H100 80GB HBM3", "80000, NVIDIA A2"))
    assert len(devices.visible_gpus()) == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES is '1'.*NVIDIA A2.*PCI_BUS_ID"):
        devices.visible_gpus()
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert [gpu.uuid for gpu in devices.visible_gpus()] == [B]


@pytest.mark.parametrize("script", ["#!/bin/sh\necho 'No devices were found'\nexit 6\n", "#!/bin/sh\necho 'not, a table'\n"])
def test_a_driver_that_names_no_gpu_is_none(smi, script):
    smi(script)
    assert devices.visible_gpus() == []
    assert given(2) == [None, None]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18", "18: Failed to initialize NVML: Driver"),
        (
            "echo 'GPU-1, 8, 8, A2'\necho 'GPU 0000:01:00.0 is lost' >&2\nexit 15",
            "15: GPU-1, 8, 8, A2; GPU 0000:01:00.0 is lost",
        ),
    ],
)
def test_a_driver_that_fails_is_not_taken_for_no_gpu(smi, script, words):
    """With `runtime.device: auto` such a machine computed on the CPU, without a word."""
    smi(f"#!/bin/sh\n{script}\n")
    with pytest.raises(RunFailed, match=f"failed with exit code {words}") as caught:
        devices.deal(settings(), 2)
    assert "runtime.device=cpu" in str(caught.value)
    assert devices.deal(settings(device="cpu"), 2) == [CPU, CPU]


def test_an_nvidia_smi_that_cannot_be_run_is_named(smi):
    smi("no program of this machine")
    with pytest.raises(RunFailed, match="nvidia-smi cannot be run: "):
        devices.visible_gpus()


def test_workers_are_dealt_out_in_turn_with_the_settings_of_a_lease(smi):
    assert given(5) == given(5, device="cuda") == [A, B, C, A, B]
    assert given(2, device="cuda:1") == [B, B]
    assert given(3, device="cpu") == [None] * 3
    (device,) = devices.assign(settings(slots_per_gpu=4, gpu_memory_fraction=0.2), 1, devices.visible_gpus())
    assert device == Device(A, memory_fraction=0.2, slots_per_gpu=4)


def test_free_memory_takes_more_workers_where_there_is_more(smi):
    dealt = given(7, gpu_placement="free-memory")
    assert dealt[0] == B
    assert {uuid: dealt.count(uuid) for uuid in (A, B, C)} == {A: 2, B: 4, C: 1}
    assert "free memory is unknown for " + SLICE in refusal(gpu_placement="free-memory", gpus=[SLICE])


def test_gpus_and_slices_that_the_user_names(smi):
    assert given(3, gpus=[C, SLICE]) == [C, SLICE, C]
    assert given(1, gpus=["GPU-bbbb"], device="cuda") == [B]
    absent = refusal(gpus=["GPU-dddd"])
    assert "runtime.gpus holds 'GPU-dddd': no such GPU here" in absent
    assert f"visible: {A} (NVIDIA H100 80GB HBM3)" in absent
    assert f"{SLICE} (MIG 1g.10gb)" in refusal(gpus=["MIG-ffff"])


def test_a_slice_is_taken_as_given_where_nothing_lists_slices(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert given(1, gpus=[SLICE]) == [SLICE]


def test_a_gpu_that_is_asked_for_and_absent_is_said_with_what_there_is(smi, monkeypatch):
    assert refusal(device="cuda:3").startswith("runtime.device is 'cuda:3': no such GPU here; visible: GPU-aaaaaaaa")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert refusal(device="cuda") == "runtime.device is 'cuda': no such GPU here; visible: none (CUDA_VISIBLE_DEVICES is '')"


def test_without_cuda_in_torch_auto_is_the_cpu_and_cuda_is_an_error(smi, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert given(2, device="auto") == [None, None]
    assert "runtime.device is 'cuda': the installed torch is built without CUDA" in refusal(device="cuda")
    assert "built without CUDA" in refusal(gpus=[A])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "gpu"}, "runtime.device is 'gpu'"),
        ({"device": "cuda:x"}, "auto|cpu|cuda|cuda:"),
        ({"gpus": ["../x"]}, "runtime.gpus.0 is '../x'"),
        ({"slots_per_gpu": 0}, "runtime.slots_per_gpu is 0"),
        ({"gpu_memory_fraction": 1.5}, "runtime.gpu_memory_fraction is 1.5"),
        ({"gpu_placement": "best"}, "runtime.gpu_placement is 'best': must be 'round-robin' or 'free-memory'"),
        ({"gpus": [A], "device": "cpu"}, "runtime.device must be cuda or auto"),
        ({"federation": "in-process", "device": "cuda"}, "which computes on the CPU"),
    ],
)
def test_settings_that_cannot_be_are_named(changes, words):
    document = {**SMALL, "runtime": changes, "output": {"transcript": "off"}}
    with pytest.raises(ConfigError) as caught:
        config.resolve(document)
    assert any(words in problem for problem in caught.value.problems), caught.value.problems


def job_for(folder: Path, **runtime):
    document = {**SMALL, "data": {"dataset": "digits", "clients": [2, 2]}, "algorithm": {"name": "global"}, "rounds": 2}
    if not (folder / "keys").exists():
        make_keys(folder / "keys", 4)
    return make_job(config.resolve({**document, "runtime": runtime}), folder / "keys")


def test_the_host_s_devices_are_no_part_of_the_signed_protocol(tmp_path):
    job, other = job_for(tmp_path), job_for(tmp_path, device="cuda", slots_per_gpu=4, gpu_memory_fraction=0.5)
    assert digest(job.protocol) == digest(other.protocol)
    assert job.experiment == other.experiment


FORKED = """
import os, sys
from pathlib import Path
from dpcfl_net.launch.placement import parents
from dpcfl_net.launch.placement.child import start_of, worker_environment

parents.preload()
start = start_of("test_devices:in_a_worker", None, worker_environment())
child = parents.fork_worker("chooses a GPU", start, Path(sys.argv[1]))
code = child.wait()
print(os.environ.get("CUDA_VISIBLE_DEVICES", "unset"))
parents.close()
sys.exit(code)
"""


def in_a_worker(argument: None):
    before = [
        int("dpcfl_net.launch.placement.preload" in sys.modules),
        int(torch.cuda.is_initialized()),
        int(torch.cuda._is_in_bad_fork()),
    ]
    try:
        devices.use(Device("GPU-00000000-not-there"))
        said = "used"
    except RunFailed as error:
        said = str(error)
    print(*before, os.environ["CUDA_VISIBLE_DEVICES"], devices.torch_device(), said, sep="|")


def test_a_forked_worker_chooses_its_gpu_before_cuda_starts(tmp_path):
    script = tmp_path / "forked.py"
    script.write_text(FORKED)
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [sys.executable, script, tmp_path / "log"], env={**environment, "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent), str(ROOT / "tests"), str(ROOT / "tests/support")])}, capture_output=True, text=True, timeout=120, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (child,), (parent,) = (tmp_path / "log").read_text().splitlines(), done.stdout.splitlines()
    assert child.startswith("1|0|0|GPU-00000000-not-there|cpu|GPU GPU-00000000-not-there cannot be used: ")
    assert parent == "unset"


def test_after_cuda_has_started_no_gpu_can_be_chosen(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RunFailed, match="CUDA was started"):
        devices.use(Device(A))
    assert devices.torch_device() == torch.device("cpu")


def test_a_gpu_on_which_nothing_can_be_computed_is_found_before_a_task_is_charged(monkeypatch):
    """CUDA starts, and the first kernel fails: it was that of a charged task, and of the next one after each restart."""

    def busy(device):
        raise RuntimeError(f"CUDA error: CUDA-capable device(s) is/are busy or unavailable ({device})")

    for name in ("CUDA_VISIBLE_DEVICES", *devices._CUDA_ENVIRONMENT):
        monkeypatch.setenv(name, "")  # restored at the end
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(device_noise, "check", busy)
    with pytest.raises(RunFailed, match=rf"GPU {A} cannot be used: .* busy or unavailable \(cuda\)"):
        devices.use(Device(A))
    assert devices.torch_device() == torch.device("cpu")


def test_a_worker_of_the_cpu_sees_no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    devices.use(CPU)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def lease(spec, ready, holders, most):
    turn = turns(spec)
    ready.wait(60)  # on a busy host the first could end all its turns before the last has started
    for _ in range(5):
        with turn():
            with holders.get_lock():
                holders.value += 1
                most.value = max(most.value, holders.value)
            time.sleep(0.02)
            with holders.get_lock():
                holders.value -= 1


@pytest.mark.parametrize(
    ("uuids", "slots", "most_at_once"), [((A, A, A), 1, 1), ((A, A, A), 2, 2), ((A, B, A), 1, 2), ((None, None, A), 1, 2)]
)
def test_workers_of_one_gpu_compute_in_turn_and_of_two_at_once(tmp_path, uuids, slots, most_at_once):
    context = multiprocessing.get_context("fork")
    ready, holders, most = context.Barrier(len(uuids)), context.Value("i", 0), context.Value("i", 0)
    specs = [
        WorkerSpec(
            tmp_path,
            0,
            "",
            None,
            tmp_path,
            "",
            tmp_path,
            slots=(tmp_path / "slots", 1),
            device=Device(uuid, slots_per_gpu=slots),
        )
        for uuid in uuids
    ]
    workers = [context.Process(target=lease, args=(spec, ready, holders, most)) for spec in specs]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * len(uuids)
    assert most.value == most_at_once


@pytest.fixture
def pretended(monkeypatch):
    """This process says that it is on a GPU; what would start CUDA is written down instead."""
    calls = []
    monkeypatch.setattr(devices, "_current", Device(A))
    monkeypatch.setattr(devices, "strict_arithmetic", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: calls.append("workspaces"), raising=False)
    yield calls
    devices._lent.clear()


def test_the_end_of_a_lease_gives_everything_back_though_the_task_fails(pretended, tmp_path):
    went = []
    thing = SimpleNamespace(to=lambda device: went.append(str(device)))
    turn = turns(WorkerSpec(tmp_path, 0, "", None, tmp_path, "", tmp_path, device=Device(A)))

    def task():
        with turn():
            devices.lend(thing)
            devices.lend(thing)
            raise RuntimeError("out of memory")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            task()
    assert went == ["cuda", "cpu"] * 2
    assert pretended == ["synchronize", "workspaces", "empty_cache"] * 2


def test_a_task_that_its_gpu_has_no_memory_for_ends_with_what_to_change(pretended, tmp_path):
    """It was a traceback of torch."""
    turn = turns(WorkerSpec(tmp_path, 0, "", None, tmp_path, "", tmp_path, device=Device(A)))
    said = "CUDA out of memory. Tried to allocate 20.00 MiB."
    with pytest.raises(RunFailed, match=rf"GPU {A} has too little memory .* runtime\.slots_per_gpu .*{said}"), turn():
        raise torch.OutOfMemoryError(said)
    assert pretended == ["synchronize", "workspaces", "empty_cache"]


PACKAGE = Path(devices.__file__).parents[1]
COPIED_OUT = r"Cannot copy out of meta tensor|item\(\) cannot be called on meta"


@pytest.fixture
def without_numbers(pretended, monkeypatch):
    """The GPU is torch's `meta` device; the comparisons of bits, which need numbers, are left out."""
    monkeypatch.setattr(devices, "torch_device", lambda: torch.device("meta"))
    monkeypatch.setattr(SameBits, "alike", lambda self, size, *_: size)
    monkeypatch.setattr(device_noise, "check", lambda device: None)


def copied_out_in(compute) -> str:
    """Function in which a computation on `meta` ends: where it brings its result back."""
    with pytest.raises((NotImplementedError, RuntimeError), match=COPIED_OUT) as caught:
        compute()
    return [frame.name for frame in traceback.extract_tb(caught.tb) if PACKAGE in Path(frame.filename).parents][-1]


# A module moves to `meta` by new parameters, and to a GPU by new memory of the old ones, which these two keep.
ENGINES = {"deep": DeepPath, "opacus": OpacusPath}


@pytest.mark.parametrize(
    ("name", "shape", "path"),
    [
        *(("digits-cnn", (1, 8, 8), path) for path in PATHS),
        ("cifar-cnn", (3, 32, 32), "fast"),
        *(("char-transformer", (16,), path) for path in ("deep", "vmap")),
    ],
)
def test_nothing_of_the_engine_stays_on_the_cpu(without_numbers, name, shape, path):
    """Tensors without data, on a device that takes no others: the engine must come to where it brings its result back.

    It stopped at the comparison of bits, or at a parameter of Opacus: clipping, sums, noise and steps were not reached.
    """
    data, theta, module = Images(20, shape), start(name, shape), models.build(name, shape, 10)
    sgd = PlainSGD(models.build(name, shape, 10), epochs=1, batch_size=8, lr=0.1, momentum=0.5, weight_decay=0.1)
    engine = ENGINES[path](models.build(name, shape, 10).to("meta")) if path in ENGINES else path
    trainer = Trainer(module, clip=1.0, learning_rate=0.1, batch_size=8, path=engine)
    slot = DPSGDSlot("train", 0.9, 2)
    for compute, last in (
        (lambda: trainer.clipped_sum(theta, data, np.arange(20)), "clipped_sum"),
        (lambda: trainer.train(theta, data, slot, 1.0, KEY, proximal=(0.1, theta)), "model"),
        (lambda: Evaluator(module).each(theta, data, base_model=theta), "each"),
        (lambda: sgd.train(theta, data, np.random.default_rng(0), proximal=(0.1, theta), base_model=theta), "train"),
        (lambda: sgd.mean_losses(np.stack([theta, theta]), data, base_model=theta), "mean_losses"),
    ):
        assert copied_out_in(compute) == last


@pytest.mark.parametrize(("on_gpu", "status"), [(True, "lost"), (False, "release")])
def test_what_a_gpu_left_unfinished_is_lost_wherever_the_worker_comes_back(tmp_path, monkeypatch, on_gpu, status):
    job = job_for(tmp_path)
    theta = np.zeros(job.protocol.model.parameters, np.float32)
    task = Task(1, "train", {"model": theta})

    def no_memory():
        if host.gate.spent():
            raise RuntimeError("CUDA out of memory")
        return nullcontext()  # the check of the model, before the charge

    with monkeypatch.context() as patch:
        if on_gpu:
            patch.setattr(devices, "_current", Device(A))
        host = make_host(job, 0, tmp_path / "ledgers", durable=False)
        host.turn = no_memory
        with pytest.raises(RuntimeError, match="out of memory"):
            host.answer(task)
        host.close()
    host = make_host(job, 0, tmp_path / "ledgers", durable=False)
    answer = host.answer(task)
    host.close()
    assert answer.status == status
    assert digest(job.protocol) == host.gate.job_hash
    assert len(host.gate.spent()) == 1


def test_the_doctor_says_what_a_gpu_takes(smi, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    finding = doctor.gpus()
    assert finding.verdict == "good"
    assert f"78.1 GiB free on {B}" in finding.found
    assert "runtime.slots_per_gpu workers" in finding.found


def test_the_bench_needs_a_gpu_and_says_so(tmp_path):
    done = dpcfl("bench", "gpu", env={**os.environ, "PATH": str(tmp_path)})
    assert done.returncode == 2
    assert done.stderr == "error: bench gpu needs a GPU: nvidia-smi names none here, or is not installed\n"


BENCH = """
from dpcfl_net.training.devices import CPU
from dpcfl_net.launch.cli import bench_gpu

if __name__ == "__main__":
    load = bench_gpu.Load(clients=3, model="small-cnn", data="digits", records=60, steps=2, rounds=2)
    found = bench_gpu.measure(CPU, load)
    for row in (found["one"], found["many"]):
        assert abs(row["records_per_second"] * row["seconds"] - 3 * 32 * 2 * 2) < 1e-6
    assert found["ratio"] > 0
"""


@pytest.mark.slow
def test_the_bench_measures_both_ways_and_leaves_nobody_behind(tmp_path):
    script = tmp_path / "bench.py"
    script.write_text(BENCH)
    done = subprocess.run(
        [sys.executable, script], env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])}, capture_output=True, text=True, timeout=120, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "3 workers that share the GPU: " in done.stdout
    assert "ratio of records/s, workers to one process: " in done.stdout


def check(name: str, *uuid: str) -> None:
    done = subprocess.run(
        [sys.executable, gpu_checks.__file__, name, *uuid], env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])}, capture_output=True, text=True,
        timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_checks_of_the_engine_hold_on_the_cpu():
    check(",".join(sorted(set(gpu_checks.CHECKS) - {"resnet", "removes"})))  # `removes` calls two tests of test_dpsgd.py


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU and a torch that is built with CUDA")
@pytest.mark.parametrize("name", sorted(gpu_checks.CHECKS))
def test_the_checks_of_the_engine_hold_on_a_gpu(name):
    check(name, devices.visible_gpus()[0].uuid)
