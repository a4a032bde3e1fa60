"""Runs from Python: the same bits as the command line's, and a caller's process that is left as it was."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from api_runs import TINY
from conftest import ROOT, assert_nothing_left, dpcfl, only_run, write_config

import dpcfl_net as api
from dpcfl_net.core import runlog
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.federation.client import Client
from dpcfl_net.launch import interrupts as launch_interrupts
from dpcfl_net.launch.cli.run import report
from dpcfl_net.runtime.checkpoint import Checkpoints

THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "2")
SCRIPT = """
import os, signal, sys
import yaml
import dpcfl_net as dpcfl
before = dict(os.environ), signal.getsignal(signal.SIGINT)
settings = yaml.safe_load(open(sys.argv[1]))
run = dpcfl.run(settings, out=sys.argv[2], federation=sys.argv[3])
assert (dict(os.environ), signal.getsignal(signal.SIGINT)) == before, "the caller's process was changed"
import torch
assert torch.get_num_threads() == 2, torch.get_num_threads()
print(run.path)
"""
INTERRUPTED = """
import sys
import yaml
import dpcfl_net as dpcfl
try:
    dpcfl.run(yaml.safe_load(open(sys.argv[1])), out=sys.argv[2], federation=sys.argv[3], callbacks=[lambda m: print(m.round, flush=True)])
except KeyboardInterrupt as stop:
    print(stop)
"""


def script(tmp_path: Path, text: str, *arguments: object, **settings) -> subprocess.Popen:
    """A plain script without a `__main__` guard, in a terminal's process group."""
    path = tmp_path / "script.py"
    path.write_text(text)
    return subprocess.Popen(
        [sys.executable, str(path), *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **THREADS}, cwd=tmp_path, **settings,
    )  # fmt: skip


def models(folder: Path) -> bytes:
    found = Checkpoints(folder / "checkpoints").newest()
    assert found is not None
    return found[0].to_bytes(4, "big") + bytes(found[1].models.tobytes())


def open_below(folder: Path) -> list[str]:
    """Files below a folder that this process has open."""
    handles = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    names = [os.readlink(handle) for handle in handles if os.path.islink(handle)]
    return [name for name in names if name.startswith(str(folder))]


def figures(run: api.Run) -> list[dict]:
    changing = ("seconds", "bytes_up", "bytes_down", "time")
    return [{key: value for key, value in row.items() if key not in changing} for row in run.records]


@pytest.mark.parametrize("federation", ["network", pytest.param("in-process", marks=pytest.mark.slow)])
def test_a_script_without_a_guard_runs_once_and_prints_nothing_else(tmp_path, by_network, federation):
    config = write_config(tmp_path, **TINY)
    process = script(tmp_path, SCRIPT, config, tmp_path / "out", federation)
    out, error = process.communicate(timeout=240)
    assert (process.returncode, error) == (0, "")
    folder = only_run(tmp_path / "out")
    assert out == f"{folder}\n"
    assert models(folder) == models(by_network.path), "two OpenMP threads outside are one inside"
    assert_nothing_left(folder)


def test_both_federations_give_the_same_bits(by_network, in_process):
    assert models(by_network.path) == models(in_process.path)
    assert figures(by_network) == figures(in_process)
    for client in range(2):
        assert by_network.events(client) == in_process.events(client)
    assert in_process.config.output.transcript == "off"


def test_seeded_noise_is_drawn_anew_for_each_run_and_the_configuration_of_a_run_repeats_it(tmp_path):
    unset = {**TINY, "privacy": {**TINY["privacy"], "noise": "seeded", "noise_seed": None}}
    first, other = (api.run(unset, tmp_path / name, "in-process", progress=False) for name in "ab")
    again = api.run(first.config, tmp_path / "c", "in-process", progress=False)
    saved = api.run(first.path / "config.yaml", tmp_path / "d", progress=False)
    assert models(first.path) == models(again.path) == models(saved.path) != models(other.path)


def test_in_process_runs_in_this_process_and_leaves_torch_as_it_was(tmp_path, monkeypatch):
    seen = []
    original = Client.dpsgd

    def spy(self, *arguments, **more):
        seen.append((os.getpid(), torch.get_num_threads(), torch.get_default_dtype()))
        return original(self, *arguments, **more)

    monkeypatch.setattr(Client, "dpsgd", spy)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    random = torch.get_rng_state()
    try:
        run = api.run({**TINY, "rounds": 2}, tmp_path, "in-process", progress=False)
        assert torch.get_num_threads() == 2
        assert torch.get_default_dtype() == torch.float64
        assert torch.tensor([1e-310]).mul(1.0).item() != 0, "denormal numbers are kept again"
        assert torch.equal(torch.get_rng_state(), random)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(before)
    assert set(seen) == {(os.getpid(), 1, torch.float32)}
    assert run.state == "finished"
    assert not open_below(tmp_path)


BOOK = {"privacy": {"epsilon": 5, "delta": 1e-4}, "ledger": {"scope": "dataset"}}
SUMS = {
    "privacy": {"epsilon": 10, "delta": 1e-3, "trust": "secure-aggregation"}, "algorithm": {"name": "global"},
    "data": {**TINY["data"], "clients": [2, 2], "train_per_client": 50}, "local": {"batch_size": 50}, "rounds": 2, "model": {"name": "linear"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "name"), [(BOOK, "ledgers/client_0001/journal"), (SUMS, "keys/client_0001/client_0001.identity.secret")]
)
def test_a_file_of_one_client_that_is_restored_lets_the_same_process_resume_the_run(tmp_path, changes, name):
    """In a notebook the ledgers of clients that were opened before the error stayed locked until its end."""
    ledger = {**changes["ledger"], "root": str(tmp_path / "book")} if "ledger" in changes else {}
    settings = {**TINY, **changes, "ledger": ledger, "output": {}}
    stopped = api.run(settings, tmp_path, "in-process", callbacks=[lambda metrics: False], progress=False)
    (stopped.path / name).rename(tmp_path / "kept")
    with pytest.raises(api.DpcflError, match="client_0001"):
        api.resume(stopped.path, progress=False)
    assert not open_below(tmp_path)
    (tmp_path / "kept").rename(stopped.path / name)
    assert api.resume(stopped.path, progress=False).state == "finished"


PRECISION = (torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv, torch.backends.mkldnn.rnn, torch.backends.cuda.matmul)


@pytest.mark.parametrize("model", ["digits-cnn", "deep_own:build"])
def test_no_setting_of_the_callers_torch_reaches_a_run_or_is_changed_by_it(tmp_path, monkeypatch, model):
    """Autocast changed the bits of a run, or ended it."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "deep_own.py").write_text(
        "from torch import nn\n"
        "def build(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.PReLU(), nn.Linear(16, classes))\n"
    )
    settings = {**TINY, "model": {"name": model}, "rounds": 2, "output": {"transcript": "off"}}
    plain = api.run(settings, tmp_path / "plain", "in-process", progress=False)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    torch.backends.mkldnn.conv.fp32_precision = "bf16"
    flags = [part.fp32_precision for part in PRECISION]
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.mkldnn.enabled = False
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
            other = api.run(settings, tmp_path / "other", "in-process", progress=False)
            assert torch.is_autocast_enabled("cpu")
            assert torch.is_inference_mode_enabled()
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.backends.mkldnn.enabled
        assert torch.get_default_device().type == "meta"
        assert torch.get_float32_matmul_precision() == "medium"
        assert [part.fp32_precision for part in PRECISION] == flags
    finally:
        torch.set_default_device(None)
        torch.set_float32_matmul_precision(before)
        torch.backends.mkldnn.conv.fp32_precision = "none"
        torch.use_deterministic_algorithms(False)
        torch.backends.mkldnn.enabled = True
    assert models(other.path) == models(plain.path)


def test_a_run_in_a_relative_folder_survives_a_change_of_the_callers_folder(tmp_path, monkeypatch):
    """As by `%cd` in a notebook: `final` and `models` of the run were empty after it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    run = api.run(TINY, "out", "in-process", callbacks=[lambda metrics: os.chdir(tmp_path / "elsewhere")], progress=False)
    assert (run.state, run.path.parent, len(run.models) > 0) == ("finished", tmp_path / "out", True)
    assert run.final["accuracy_mean"] is not None
    os.chdir(tmp_path)
    assert f"<td>out/{run.path.name}</td>" in run._repr_html_()


def test_a_callback_that_returns_numpys_false_stops_the_run(tmp_path):
    assert (
        api.run(TINY, tmp_path, "in-process", callbacks=[lambda metrics: np.bool_(False)], progress=False).state
        == "interrupted"
    )


def test_a_run_with_the_renyi_accountant_and_a_delta_that_pld_does_not_resolve_is_recorded(tmp_path):
    settings = {**TINY, "rounds": 2, "privacy": {"epsilon": 50, "delta": 1e-30, "accountant": "rdp"}}
    run = api.run(settings, tmp_path, "in-process", progress=False)
    assert run.state == "finished"
    assert json.loads((run.path / "run.json").read_text())["privacy"]["epsilon_replace_one"] is None
    assert dpcfl("report", run.path).returncode == 0


@pytest.mark.parametrize("client", [0.0, "0", True, None, 1_000_000])
def test_a_ledger_is_of_a_client_with_a_number(private_run, client):
    with pytest.raises(api.ConfigError, match=f"client is {client!r}: must be 0 to"):
        api.open_run(private_run).ledger(client)


def test_a_record_that_cannot_be_written_leaves_no_other_open(tmp_path):
    """Each attempt to resume the run in a notebook left descriptors open."""
    stopped = api.run(TINY, tmp_path, "in-process", callbacks=[lambda metrics: False], progress=False)
    warnings = stopped.path / "warnings.jsonl"
    warnings.unlink(missing_ok=True)
    warnings.mkdir()
    with pytest.raises(api.RunFailed, match=r"warnings\.jsonl: is a folder, not a file"):
        api.resume(stopped.path, progress=False)
    assert not open_below(tmp_path)
    warnings.rmdir()
    assert api.resume(stopped.path, progress=False).state == "finished"


def test_a_run_whose_models_cannot_be_written_has_failed_and_writes_them_when_it_is_resumed(tmp_path):
    """It counted as finished: the advice to resume it led to "nothing to resume", and a sweep took it for done."""
    block = [lambda metrics: only_run(tmp_path).joinpath("models").touch()]
    with pytest.raises(api.RunFailed, match=r"models: exists already") as found:
        api.run(TINY, tmp_path, "in-process", callbacks=block, progress=False)
    run = api.open_run(only_run(tmp_path))
    assert (run.state, run.document["error"]) == ("failed", str(found.value))
    (run.path / "models").unlink()
    assert len(api.resume(run.path, progress=False).models) == 2
    assert (run.path / "models" / "cluster_1.safetensors").exists()


def test_callbacks_see_each_round_once_in_order(tmp_path):
    seen: list[api.RoundMetrics] = []
    run = api.run({**TINY, "output": {"evaluate_every": 2}}, tmp_path, "in-process", callbacks=[seen.append], progress=False)
    assert [metrics.round for metrics in seen] == [1, 2, 3]
    assert [metrics.accuracy is None for metrics in seen] == [True, False, False]
    assert seen[-1].accuracy == run.final["accuracy_mean"]
    assert len(seen[0].assignment) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        seen[0].round = 5  # type: ignore[misc]


@pytest.mark.parametrize("federation", [pytest.param("network", marks=pytest.mark.slow), "in-process"])
def test_a_callback_stops_a_run_that_then_goes_on_to_the_same_models(tmp_path, by_network, federation):
    stopped = api.run(TINY, tmp_path, federation, callbacks=[lambda metrics: metrics.round < 1], progress=False)
    done = stopped.rounds_done
    assert (stopped.state, done >= 1) == ("interrupted", True)
    assert_nothing_left(stopped.path)
    assert json.loads(stopped.models.metadata(0)["round"]) == done
    seen: list[int] = []
    run = api.resume(stopped.path, callbacks=[lambda metrics: seen.append(metrics.round)], progress=False)
    assert run.state == "finished"
    assert seen == list(range(done + 1, 4))
    assert models(run.path) == models(by_network.path)
    files = RunFolder(run.path)
    lines = [line for line in runlog.each(files.metrics) if "bytes_up" in line]
    assert [(line["round"], line.get("resumed", False)) for line in lines] == [
        *((t, False) for t in range(1, done + 1)),
        (done, True),
        *((t, False) for t in range(done + 1, 4)),
    ]
    log = files.logs / ("coordinator.log" if federation == "network" else "in-process.log")
    text = log.read_text()
    assert text.count(f"round {done} of 3 done in") == text.count(f"round {done} of 3 was done before this start: ") == 1
    assert api.resume(run.path).path == run.path, "a finished run is returned as it is"


@pytest.mark.parametrize("federation", ["network", "in-process"])
def test_what_a_callback_raises_comes_out_after_everything_has_ended(tmp_path, federation):
    def careless(metrics):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        api.run({**TINY, "rounds": 20}, tmp_path, federation, callbacks=[careless], progress=False)
    folder = only_run(tmp_path)
    assert_nothing_left(folder)
    assert api.open_run(folder).state == "interrupted"


def test_a_clock_that_is_set_back_does_not_shorten_the_duration_of_a_run(tmp_path, monkeypatch):
    now = time.time
    set_back = lambda metrics: monkeypatch.setattr(time, "time", lambda: now() - 3600)  # noqa: E731
    run = api.run({**TINY, "rounds": 2}, tmp_path, "in-process", callbacks=[set_back], progress=False)
    assert 0 < json.loads(RunFolder(run.path).run.read_text())["wall_s"] < 600


def test_stop_run_stops_as_false_does(tmp_path):
    def stop(metrics):
        raise api.StopRun

    run = api.run({**TINY, "rounds": 20}, tmp_path, "in-process", callbacks=[stop], progress=False)
    assert (run.state, run.rounds_done) == ("interrupted", 1)


@pytest.mark.parametrize("federation", ["network", pytest.param("in-process", marks=pytest.mark.slow)])
def test_ctrl_c_ends_every_process_and_the_run_can_be_resumed(tmp_path, federation):
    config = write_config(tmp_path, **{**TINY, "rounds": 400})
    default = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    process = script(tmp_path, INTERRUPTED, config, tmp_path / "out", federation, process_group=0, **default)
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    os.killpg(process.pid, signal.SIGINT)
    out, error = process.communicate(timeout=240)
    folder = only_run(tmp_path / "out")
    assert (process.returncode, error) == (0, "")
    assert out.splitlines()[-1] == f"stopped; resume with dpcfl.resume('{folder}')"
    assert_nothing_left(folder)
    run = api.open_run(folder)
    assert run.state == "interrupted"
    stop = run.rounds_done + 2
    again = api.resume(folder, callbacks=[lambda metrics: metrics.round < stop], progress=False)
    assert again.rounds_done >= stop


ENDLESS = """
import threading
from dpcfl_net.algorithms.base import MODEL, UPDATE, on_client
from dpcfl_net.algorithms.global_model import Global

class Endless(Global):
    @on_client(charges=["train"], takes={"model": MODEL}, gives={"update": UPDATE})
    def train(self, me, model):
        print("in a step", flush=True)
        while True:
            threading.Event().wait(0.1)
"""


def test_a_second_ctrl_c_ends_a_client_step_that_does_not_end(tmp_path):
    """A run in the calling process, as in a notebook, waited for the end of the step: only SIGKILL ended it."""
    (tmp_path / "own_endless.py").write_text(ENDLESS)
    config = write_config(tmp_path, **{**TINY, "algorithm": {"name": "own_endless:Endless"}})
    default = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    process = script(tmp_path, INTERRUPTED, config, tmp_path / "out", "in-process", process_group=0, **default)
    assert process.stdout is not None
    assert process.stdout.readline() == "in a step\n"
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=4)  # the second signal counts a second after the first
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=120)
    folder = only_run(tmp_path / "out")
    assert (process.returncode, error) == (0, "")
    assert out.splitlines()[-1] == f"stopped; resume with dpcfl.resume('{folder}')"
    assert api.open_run(folder).state == "interrupted"


def test_a_run_has_a_second_to_end_after_a_signal_that_interrupts_a_step(monkeypatch):
    """A third Ctrl-C at once would interrupt the closing of ledgers."""
    now = [10.0]
    monkeypatch.setattr(launch_interrupts, "time", SimpleNamespace(monotonic=lambda: now[0]))
    raised = []
    with launch_interrupts.Interrupts() as interrupts, interrupts.raising_again():
        for now[0] in (10.0, 10.5, 11.5, 11.6, 12.4, 12.6):
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                raised.append(now[0])
    assert raised == [11.5, 12.6]


def test_a_failure_names_its_folder_and_what_the_library_refuses_is_its_own_error(tmp_path):
    with pytest.raises(api.ConfigError, match="federation is 'nearby': must be network or in-process"):
        api.run(TINY, tmp_path, "nearby")  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(api.ConfigError, match="file"):
        api.run(TINY, tmp_path / "file" / "below", "in-process", progress=False)
    asked = {**TINY, "privacy": {"epsilon": 5, "delta": 1e-4}}
    with pytest.raises(
        api.ConfigError, match="client 0 would refuse the job: the job's epsilon is 5, this worker serves at most 1"
    ):
        api.run({**asked, "runtime": {"max_epsilon": 1}}, tmp_path / "none", "in-process", progress=False)
    assert not list((tmp_path / "none").iterdir())  # before anything was started
    book = {"scope": "dataset", "root": str(tmp_path / "book"), "budget": {"epsilon": 1, "delta": 1e-4}}
    with pytest.raises(api.Refused, match="budget") as refused:
        api.run({**asked, "ledger": book}, tmp_path / "out", "in-process", progress=False)
    (note,) = refused.value.__notes__
    folder = only_run(tmp_path / "out")
    assert note == f"run folder {folder}; resume with dpcfl.resume('{folder}')"
    assert api.open_run(folder).state == "failed"
    assert api.open_run(folder).document["error"] == str(refused.value)
    with pytest.raises(api.ConfigError, match="is not a run folder"):
        api.resume(tmp_path)


def test_a_run_folder_that_is_moved_meanwhile_is_not_made_again(tmp_path):
    def move(metrics):
        only_run(tmp_path / "runs").rename(tmp_path / "moved")

    with pytest.raises(api.DpcflError, match="was removed or moved while it was in use") as found:
        api.run({**TINY, "rounds": 20}, tmp_path / "runs", "in-process", callbacks=[move], progress=False)
    assert not hasattr(found.value, "__notes__")  # no advice to resume it there
    assert [*(tmp_path / "runs").iterdir()] == []
    assert api.resume(tmp_path / "moved", callbacks=[lambda metrics: False], progress=False).rounds_done


def test_an_error_in_code_does_not_make_a_moved_run_folder_again(tmp_path, monkeypatch):
    def broken(self, *arguments, **more):
        only_run(tmp_path / "runs").rename(tmp_path / "moved")
        raise IndexError("in a client step")

    monkeypatch.setattr(Client, "dpsgd", broken)
    with pytest.raises(IndexError, match="in a client step"):
        api.run(TINY, tmp_path / "runs", "in-process", progress=False)
    assert [*(tmp_path / "runs").iterdir()] == []


def test_an_error_in_code_that_runs_here_comes_out_with_its_traceback(tmp_path, monkeypatch):
    def broken(self, *arguments, **more):
        raise IndexError("in a client step")

    monkeypatch.setattr(Client, "dpsgd", broken)
    with pytest.raises(IndexError, match="in a client step"):
        api.run(TINY, tmp_path, "in-process", progress=False)
    run = api.open_run(only_run(tmp_path))
    assert (run.state, run.document["error"]) == ("failed", "IndexError: in a client step")
    report(run.path)
    assert run.document["error"] in run.path.joinpath("report.html").read_text()
    monkeypatch.undo()
    assert "error" not in api.resume(run.path, progress=False).document


def test_debug_on_the_command_line_runs_in_that_process(tmp_path):
    model = "import os\n\ndef build(shape, classes):\n    from torch import nn\n    print('model in', os.getpid())\n"
    (tmp_path / "mine.py").write_text(f"{model}    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n")
    config = write_config(tmp_path, **{**TINY, "model": {"name": "mine:build"}})
    command = [sys.executable, "-m", "dpcfl_net", "run", str(config), "--out", "out", "--debug"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    out, error = process.communicate(timeout=240)
    assert process.returncode == 0, error
    where = {line for line in out.splitlines() if line.startswith("model in")}
    assert where == {f"model in {process.pid}"}
    assert out.startswith("preparing: libraries\n")
    assert "preparing: keys of clients: 2\n" in out
    assert "prepared in " in out.split("round 1/3")[0]
    assert "round 3/3" in out
    run = api.open_run(only_run(tmp_path / "out"))
    assert (run.state, run.config.output.transcript, run.document["processes"]) == ("finished", "off", 1)


def test_a_network_run_is_not_resumed_in_debug_mode(by_network):
    copy = dpcfl("run", "--resume", by_network.path, "--debug")
    assert copy.returncode == 2
    assert "resume it without --debug" in copy.stderr


def test_no_process_is_left_behind_by_the_shared_runs(by_network):
    assert_nothing_left(by_network.path)
