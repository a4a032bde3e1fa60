"""Sweeps as SLURM job arrays and Ray tasks: scripts, requeueing, collection, and both engines for real where they are installed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import engines
import fake_slurm
import psutil
import pytest
from cli_cases import call
from conftest import DPCFL, ROOT, assert_nothing_left, dpcfl, only_run, write_config
from test_sweep_at_once import TINY, states, tiny

from dpcfl_net.core import runlog
from dpcfl_net.core.errors import ConfigError, RunFailed
from dpcfl_net.core.locks import run_lock
from dpcfl_net.core.number_spans import spans
from dpcfl_net.core.run_folder import SweepFolder
from dpcfl_net.launch import sweeps
from dpcfl_net.launch.cells import local, ray, slurm
from dpcfl_net.launch.cells.outcome import CellOutcome
from dpcfl_net.launch.placement import slurm_batch
from dpcfl_net.launch.placement.ray import counts_of
from dpcfl_net.launch.placement.slurm_batch import Resources
from dpcfl_net.launch.sweeps import Sweep

pytestmark = pytest.mark.timeout(600)
needs_slurm = pytest.mark.skipif(
    not engines.ROOT_USER or bool(engines.missing("slurmctld", "slurmd", "munged", "sbatch", "scancel")),
    reason="SLURM and munge, and root to run them",
)


@pytest.fixture
def plan(tmp_path) -> Sweep:
    """A sweep of three cells that has not run."""
    made = Sweep.of(tiny(tmp_path / "c"), ["seed=0:3"], tmp_path / "out", "cpu")
    made.write(["waiting"] * 3)
    return made


# Scripts


def test_ranges_of_tasks():
    assert spans([0, 1, 2, 4, 7, 8]) == ["0-2", "4", "7-8"]
    assert spans([5]) == ["5"]
    assert fake_slurm.tasks_of("0-2,4,7-8%3") == ([0, 1, 2, 4, 7, 8], 3)


def test_a_dry_run_prints_the_script_and_submits_nothing(tmp_path, capsys):
    done = call(
        capsys, "sweep", tiny(tmp_path / "c", runtime={}), "seed=0:3", "--on", "slurm", "--dry-run", "--out", tmp_path / "out", "--jobs", 2,
        "--partition", "long", "--account", "lab", "--memory", "4G", "--time", "8:00:00", "--cpus", 4, "--gpus", 1,
        "--slurm", "comment=two words", "--slurm", "exclusive", "--slurm", "signal=B:USR1@300",
    )  # fmt: skip
    assert done.code == 0, done.err
    lines = set(done.out.splitlines())
    assert {
        "#SBATCH --array=0-2%2", "#SBATCH --partition=long", "#SBATCH --account=lab", "#SBATCH --mem=4G", "#SBATCH --time=8:00:00",
        "#SBATCH --cpus-per-task=4", "#SBATCH --gres=gpu:1", "#SBATCH --requeue", '#SBATCH --comment="two words"',
        "#SBATCH --exclusive", "#SBATCH --signal=B:USR1@300", "3 cells, 0 cached, 3 to submit; nothing was submitted",
    } <= lines  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_only_unfinished_cells_are_submitted_in_parts_that_slurm_accepts(tmp_path, plan):
    left = [0, 2, *range(999, 1003), 2500]
    contents = slurm.scripts(plan, left, Resources(), None)
    options = [fake_slurm.options_of(write(tmp_path / "script", text)) for text in contents.values()]
    assert [one["array"] for one in options] == ["0,2,999", "0-2", "500"]
    assert [one["output"] for one in options] == [f"{plan.folder.resolve()}/logs/array_{part}_%a.log" for part in range(3)]
    assert {one["chdir"] for one in options} == {os.getcwd()}  # relative paths of the configuration
    commands = [text.rstrip().splitlines()[-1] for text in contents.values()]
    for first, command in zip((0, 1000, 2000), commands, strict=True):
        shown = command.replace("exec ", "echo ", 1)
        told = subprocess.run(
            ["bash", "-c", shown], env={"SLURM_ARRAY_TASK_ID": "7"}, capture_output=True, text=True, check=True
        ).stdout
        assert told.split()[-4:] == ["-m", slurm.__name__, str(plan.folder.resolve()), str(first + 7)]


SBATCH = """#!/bin/sh
[ "$1" = --parsable ] || exit 1
case "$2" in
    *_0.sh) cat "$2" ;;
    *_1.sh) echo 200 ;;
    *) echo "too many jobs" >&2; exit 1 ;;
esac
"""


def test_a_refused_array_names_those_that_were_submitted_before(tmp_path, plan, monkeypatch):
    """As beyond a limit of jobs per user: the ids of the arrays that run were not shown."""
    write(tmp_path / "sbatch", SBATCH).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    scripts = {plan.folder / "slurm" / f"array_{part}.sh": "100;here\n" for part in range(3)}
    of_a_failure = SweepFolder(plan.folder).outcome(1)
    of_a_failure.parent.mkdir()
    of_a_failure.touch()
    with pytest.raises(RunFailed, match=r"array_2.sh: too many jobs; submitted before it: array jobs 100, 200$"):
        slurm.submit(plan, scripts)
    with pytest.raises(ConfigError, match=r"array_2.sh: too many jobs$"):
        slurm.submit(plan, {path: text for path, text in scripts.items() if path.stem.endswith("2")})
    assert not of_a_failure.exists()  # it is to run again


@pytest.mark.parametrize("name", ["50%", "a\\b"])
def test_a_folder_that_slurm_would_replace_in_the_names_of_logs_is_refused(tmp_path, name):
    plan = Sweep.of(tiny(tmp_path / "c"), ["seed=0:2"], tmp_path / name, "cpu")
    with pytest.raises(ConfigError, match=r"--out: .* holds '%' or a backslash"):
        slurm.scripts(plan, [0], Resources(), None)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--on", "moon"], "--on is 'moon': must be local, slurm or ray"),
        (["--partition", "long"], "--partition: only with --on slurm; --on is 'local'"),
        (["--on", "ray", "--time", "5", "--slurm", "qos=x"], "--time, --slurm: only with --on slurm"),
        (["--cpus", "2"], "--cpus: only with --on slurm or ray"),
        (["--gpus", "1"], "--gpus: only with --on slurm or ray"),
        (["--memory", "4G"], "--memory: only with --on slurm or ray"),
        (["--on", "slurm", "--memory", "4 GB"], "--memory is '4 GB'"),
        (["--on", "slurm", "--slurm", "Array=3"], "--slurm is 'Array=3'"),
        (["--on", "ray", "--dry-run"], "--dry-run: not with --collect or --on ray"),
        (["--on", "slurm", "runtime.device=cuda", "runtime.federation=network"], "request GPUs for each cell with --gpus"),
        (["--on", "slurm", "--gpus", "1"], "runtime.federation is 'in-process'"),
        (["--collect"], "/out; run it without --collect"),
        (["--on", "slurm"], "--on slurm needs sbatch on the PATH"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path, capsys, monkeypatch, arguments, said):
    monkeypatch.setenv("PATH", str(tmp_path))
    done = call(capsys, "sweep", tiny(tmp_path / "c"), *arguments, "--out", tmp_path / "out")
    assert done.code == 2
    assert said in done.err


def test_gpus_on_other_hosts_are_other_cells(tmp_path):
    cpu, gpu = (
        Sweep.of(tiny(tmp_path / "c", runtime={}), ["seed=0:2"], tmp_path / "out", device) for device in ("cpu", "cuda")
    )
    assert cpu.folder != gpu.folder
    assert not set(cpu.folders()) & set(gpu.folders())
    gpu.write(["waiting"] * 2)
    cell, _ = sweeps.read_cell(gpu.folder, 1)  # on a host without GPUs, too
    assert cell.config.runtime.device == "cuda"


# Tasks of an array


@pytest.fixture
def task(tmp_path, plan, monkeypatch):
    """Runs cell 1 as task of an array; its run ends as told. Returns exit code, state of the outcome file, and calls of scontrol."""
    calls = tmp_path / "calls"
    before = signal.getsignal(signal.SIGUSR1)

    def play(outcome: str, rounds: int = 0, limit: bool = False, queue: str = "77 77 RUNNING", cpus: str = "3"):
        programs = tmp_path / "bin"
        programs.mkdir(exist_ok=True)
        for name, body in (
            ("squeue", f'[ "$*" = "--noheader --jobs 77 --format %A %i %T" ] && echo "{queue}"'),
            ("scontrol", f'echo "$@" >> {calls}'),
        ):
            write(programs / name, f"#!/bin/sh\n{body}\n").chmod(0o755)
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        monkeypatch.setenv("SLURM_JOB_ID", "77")
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", cpus)
        folder = plan.folders()[1]

        def run_cell(config, store, display, slots):
            assert slots == (int(cpus) if cpus else None)
            folder.mkdir(parents=True, exist_ok=True)
            write(folder / "run.json", json.dumps({"state": outcome, "rounds_done": rounds}))
            for t in range(rounds):
                (folder / "checkpoints" / f"round_{t + 1:05d}").mkdir(parents=True, exist_ok=True)
            if limit:
                monkeypatch.setattr(os, "kill", lambda pid, number: None)
                signal.raise_signal(signal.SIGUSR1)
            return CellOutcome(folder, outcome, error="burnt" if outcome == "failed" else "")

        monkeypatch.setattr(slurm, "run_cell", run_cell)
        code = slurm.task(plan.folder, 1)
        return code, sweeps.recorded_outcomes(plan.folder)[1], calls.read_text() if calls.exists() else ""

    yield play
    signal.signal(signal.SIGUSR1, before)


def test_an_interrupted_task_is_requeued(task):
    code, outcome, calls = task("interrupted", rounds=3, limit=True)
    assert (code, outcome.state, calls) == (130, "interrupted", "requeue 77\n")


def test_of_an_array_only_the_interrupted_task_is_requeued(task):
    """The last task has the id of the array, with which SLURM tells of all tasks and requeues all: it was not requeued."""
    queue = "75 77_0 COMPLETING\n76 77_1 RUNNING\n77 77_2 RUNNING"
    assert task("interrupted", rounds=3, limit=True, queue=queue)[2] == "requeue 77_2\n"


@pytest.mark.parametrize("state", ["CANCELLED", "PREEMPTED", "COMPLETING", ""])
def test_a_task_that_slurm_has_ended_is_not_requeued(task, capsys, state):
    code, outcome, calls = task("interrupted", rounds=3, queue=f"77 77 {state}" if state else "")
    assert (code, outcome.state, calls) == (130, "interrupted", "")
    assert f"SLURM has ended job 77 (state {state or 'unknown'}): it decides" in capsys.readouterr().out


@pytest.mark.parametrize("rounds", [0, 2])  # none at all, or none since SLURM started the task again
def test_a_time_limit_too_short_for_a_round_fails_instead_of_starting_again_for_ever(task, plan, capsys, rounds):
    for t in range(rounds):
        (plan.folders()[1] / "checkpoints" / f"round_{t + 1:05d}").mkdir(parents=True)
    code, outcome, calls = task("interrupted", rounds=rounds, limit=True)
    assert (code, outcome.state, calls) == (4, "failed", "")
    assert "raise --time" in outcome.error
    assert capsys.readouterr().err == f"error: {outcome.error}\n"


def test_a_preemption_before_the_first_round_is_requeued(task):
    assert task("interrupted", rounds=0, cpus="")[2] == "requeue 77\n"


def test_a_failed_task_is_recorded_and_not_requeued(task):
    code, outcome, calls = task("failed")
    assert (code, outcome.state, outcome.error, calls) == (4, "failed", "burnt", "")


def test_the_record_of_a_failure_stays_until_the_cell_has_run_again(plan, task, monkeypatch):
    record = SweepFolder(plan.folder).outcome(1)
    kept = []
    monkeypatch.setattr(slurm, "outcome_text", lambda outcome: outcome.state)
    for outcome in ("failed", "failed", "in use", "finished", "finished"):
        code, _, _ = task(outcome)
        kept.append((code, record.exists()))
    assert kept == [(4, True), (4, True), (0, True), (0, False), (0, False)]


def silent(command, *, timeout, **more):
    raise subprocess.TimeoutExpired(command, timeout)


def test_requeueing_says_what_slurm_refuses(tmp_path, monkeypatch):
    write(tmp_path / "squeue", "#!/bin/sh\necho no such job >&2; exit 1\n").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    before = signal.getsignal(signal.SIGUSR1)
    try:
        with pytest.raises(RunFailed, match="no such job"):
            slurm_batch.requeue("7", slurm_batch.TimeLimit(), progress=True)
        monkeypatch.setenv("PATH", "")
        with pytest.raises(RunFailed, match="squeue is not on the PATH of this job"):
            slurm_batch.requeue("7", slurm_batch.TimeLimit(), progress=True)
        monkeypatch.setattr(subprocess, "run", silent)
        with pytest.raises(RunFailed, match="squeue did not answer: the job was not requeued"):
            slurm_batch.requeue("7", slurm_batch.TimeLimit(), progress=True)
        with pytest.raises(RunFailed, match="sbatch did not answer within 120 s"):
            slurm_batch.submit(tmp_path / "script")
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_recorded_outcomes_tell_running_cells_from_interrupted_ones(plan):
    assert [outcome.state for outcome in sweeps.recorded_outcomes(plan.folder)] == ["waiting"] * 3
    for folder in plan.folders()[:2]:
        folder.mkdir(parents=True)
        write(folder / "run.json", '{"state": "running"}')
    with run_lock(plan.folders()[1]):
        assert [outcome.state for outcome in sweeps.recorded_outcomes(plan.folder)] == ["interrupted", "running", "waiting"]


# Ray


def test_a_resumed_run_asks_ray_for_the_same_bundles():
    assert counts_of(["bundle-0", "bundle-1", "bundle-0", "bundle-2"]) == [2, 1, 1]
    with pytest.raises(ConfigError, match="no bundles of Ray"):
        counts_of(["node-0"])


def test_memory_in_slurms_format():
    memory = {"2K": 2 << 10, "300M": 300 << 20, "4G": 4 << 30, "1T": 1 << 40, "100": 100 << 20}
    assert {text: ray.memory_bytes(text) for text in memory} == memory


class StandInForRay:
    """A cluster that notes what it is asked for; the test sets its nodes, and the result of each task."""

    class exceptions:
        class RayError(Exception):
            pass

    def __init__(self) -> None:
        self.asked, self.stopped, self.alive, self.results, self.nodes = {}, [], False, {}, list

    def is_initialized(self):
        return self.alive

    def init(self, **settings):
        self.alive = True

    def shutdown(self):
        self.alive = False

    def remote(self, *arguments):
        return self if callable(arguments[0]) else arguments  # of the function, then of each task

    def options(self, **options):
        self.asked = options
        return self

    def wait(self, tasks, **options):
        return [task for task in tasks if task in self.results], []

    def get(self, task):
        if isinstance(self.results[task], Exception):
            raise self.results[task]
        return self.results[task]

    def cancel(self, task):
        self.stopped.append(task[1])


@pytest.fixture
def cluster(monkeypatch) -> StandInForRay:
    made = StandInForRay()
    monkeypatch.setattr(ray, "import_ray", lambda: made)
    return made


def test_cells_take_their_resources_from_ray_and_end_as_their_tasks(plan, cluster):
    runs, where = plan.folders(), os.getcwd()
    place = ray.RayCells(plan.folder, runs, Resources(cpus=2, gpus=1, memory="4G"), jobs=2)
    asked = {"num_cpus": 2, "num_gpus": 1, "memory": 4 << 30, "max_retries": 3, "name": "dpcfl cell"}
    assert (cluster.asked, place.wait([], 0)) == (asked, [])
    tasks = [(str(plan.folder.resolve()), index, 2, where) for index in range(3)]
    place.start(0, 3)
    assert place.free()
    place.start(1, 2)
    assert not place.free()
    cluster.results = {tasks[1]: CellOutcome(runs[1], "finished", seconds=3.0).to_json()}
    assert place.wait([], 0) == [(1, CellOutcome(runs[1], "finished", seconds=3.0))]
    cluster.results = {tasks[0]: cluster.exceptions.RayError("the node is lost\nat once")}
    assert place.wait([], 0) == [(0, CellOutcome(runs[0], "failed", error="Ray: RayError: the node is lost"))]
    place.start(2, 1)
    assert (place.stop(), cluster.stopped) == ([(2, CellOutcome(runs[2], "interrupted"))], [2])
    assert place.stop() == []
    place.close()
    assert not cluster.alive


def test_a_cluster_without_room_for_a_cell_or_without_an_answer_is_told(plan, cluster, monkeypatch):
    cluster.alive = True  # by the program that runs the sweep
    place = ray.RayCells(plan.folder, plan.folders(), Resources(cpus=2, gpus=1, memory="4G"), jobs=None)
    enough = {"CPU": 2.0, "GPU": 1.0, "memory": 4.0 * 2**30}
    node = {"Alive": True, "Resources": enough}
    short = [{"Resources": {**enough, name: amount / 2}} for name, amount in enough.items()]
    for other in ({"Alive": False}, {"Resources": {"CPU": 2.0}}, *short):
        cluster.nodes = lambda other=other: [node | other]
        assert place.note().startswith("no node of the Ray cluster has 2 CPU, 1 GPU, 4,294,967,296 memory for a cell: ")
    cluster.nodes = lambda: [node | {"Alive": False}, node]
    assert (place.note(), place.free()) == ("", True)
    place.close()
    assert cluster.alive
    ray.RayCells(plan.folder, plan.folders(), Resources(), jobs=None)
    assert "memory" not in cluster.asked
    assert "this node does not see" in ray.run_on_node(str(plan.folder / "elsewhere"), 0, 1, os.getcwd())
    cluster.alive = False
    monkeypatch.setattr(cluster, "init", lambda **settings: (_ for _ in ()).throw(ConnectionError("no head node")))
    with pytest.raises(ConfigError, match=r"^--on ray: Ray: ConnectionError: no head node$"):
        ray.RayCells(plan.folder, plan.folders(), Resources(), jobs=None)


# Stands in for `cells.process` on a node: cell 1 does not end, each other one tells what it was asked for, and where.
ON_NODE = """
import json, os, sys, time
cell = json.loads(sys.stdin.readline())
time.sleep(20 * (cell["cell"] == 1))
outcome = dict(state="finished", cached=False, seconds=float(cell["slots"]), error=str(cell["cell"]) + os.getcwd())
os.write(1, json.dumps(outcome).encode() + b"\\n")
"""


def test_a_task_of_ray_runs_its_cell_where_the_command_was_called_until_ray_cancels_it(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(local, "MAIN", ON_NODE)
    monkeypatch.chdir(tmp_path)  # restored after the test
    folder, elsewhere = str(plan.folder), plan.folder / "logs"
    elsewhere.mkdir()
    for where in (elsewhere, tmp_path / "not on this node"):
        found = CellOutcome.from_json(plan.folder, ray.run_on_node(folder, 2, 3, str(where)))
        assert found == CellOutcome(plan.folder, "finished", seconds=3.0, error=f"2{elsewhere}")
    looks = iter([[]])  # then Ray interrupts the task
    monkeypatch.setattr(ray, "wait", lambda outcomes, timeout: next(looks))
    start = time.monotonic()
    with pytest.raises(StopIteration):
        ray.run_on_node(folder, 1, 3, str(elsewhere))
    assert time.monotonic() - start < 8
    assert not [child for child in psutil.Process().children() if ON_NODE in child.cmdline()]


# Whole sweeps


def until_done(folder: Path, seconds: float = 240) -> None:
    engines.until((folder / "done").exists, seconds, "the job did not end")


@pytest.mark.slow
def test_a_job_array_of_stand_ins_runs_requeues_and_is_collected(tmp_path):
    """sbatch, squeue and scontrol are stand-ins that run the tasks here. The last task gets USR1, as before a time limit."""
    environment = fake_slurm.install(tmp_path / "bin")
    path, axes = tiny(tmp_path / "c", rounds=60), ["seed=0:3"]
    submitted = dpcfl("sweep", path, *axes, "--on", "slurm", "--cpus", 2, "--out", tmp_path / "out", env=environment)
    assert submitted.returncode == 0, submitted.stderr
    assert "submitted array job 100: " in submitted.stdout
    (sweep,) = (tmp_path / "out").glob("*-sweep-*")
    last = (sweep / json.loads((sweep / "sweep.json").read_text())["cells"][2]["folder"]).resolve()
    engines.until(lambda: any(last.glob("checkpoints/round_*")), 120, "no round was reached")
    os.kill(int((tmp_path / "bin" / "100_2.pid").read_text()), signal.SIGUSR1)
    until_done(tmp_path / "bin")
    logs = [(sweep / "logs" / f"array_0_{task}.log").read_text() for task in range(3)]
    assert "requeueing job 100_2: the run resumes when SLURM starts it again" in logs[2]
    assert ["SLURM started this task again" in log for log in logs] == [False, False, True]
    charged = [line["round"] for line in runlog.read(last / "metrics.jsonl") if line.get("view") == "server"]
    assert sorted(set(charged)) == list(range(1, 61))
    collected = dpcfl("sweep", path, *axes, "--collect", "--out", tmp_path / "out")
    assert collected.returncode == 0, collected.stderr
    assert "3 finished" in collected.stdout
    assert "report: " in collected.stdout
    again = dpcfl("sweep", path, *axes, "--out", tmp_path / "out")  # and without --on
    assert again.stdout.count("cached") == 3
    assert_nothing_left(tmp_path / "out")


@pytest.mark.slow
def test_a_launch_in_a_batch_job_of_stand_ins_resumes_after_a_requeue(tmp_path):
    environment = fake_slurm.install(tmp_path / "bin") | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    config = write_config(tmp_path / "c", rounds=12)
    script = tmp_path / "job.sh"
    written = dpcfl(
        "launch", config, "--on", "slurm", "--sbatch", script, "--nodes", 2, "--cpus", 2, "--address", "127.0.0.1",
        "--root", tmp_path / "there", "--slurm", f"output={tmp_path / 'log'}", "--out", tmp_path / "out",
    )  # fmt: skip
    assert written.returncode == 0, written.stderr
    subprocess.run(["sbatch", str(script)], env=environment, check=True, capture_output=True, cwd=ROOT)
    reached = lambda: any((tmp_path / "out").glob("*/checkpoints/round_0000[1-9]"))  # noqa: E731
    engines.until(reached, 120, "no round was reached")
    os.kill(int((tmp_path / "bin" / "100.pid").read_text()), signal.SIGUSR1)
    until_done(tmp_path / "bin")
    log = (tmp_path / "log").read_text()
    assert "requeueing job 100" in log, log
    assert "job 100 was started again (1): resuming" in log, log
    document = json.loads((only_run(tmp_path / "out") / "run.json").read_text())
    assert (document["state"], document["rounds_done"]) == ("finished", 12)
    assert only_run(tmp_path / "out").name == "small-r-dpcfl-slurm-100"
    assert_nothing_left(tmp_path)


@pytest.mark.slow
@needs_slurm
def test_a_real_job_array_runs_requeues_and_is_collected(tmp_path):
    (tmp_path / "slurm").mkdir()
    with engines.slurm(tmp_path / "slurm") as environment:
        path = tiny(tmp_path / "c", rounds=150)
        command = ["sweep", path, "seed=0:3", "--out", tmp_path / "out"]
        submitted = dpcfl(*command, "--on", "slurm", "--time", "10", env=environment)
        assert submitted.returncode == 0, submitted.stderr
        (sweep,) = (tmp_path / "out").glob("*-sweep-*")
        last = (sweep / json.loads((sweep / "sweep.json").read_text())["cells"][2]["folder"]).resolve()
        engines.until(lambda: any(last.glob("checkpoints/round_*")), 120, "no round was reached")
        names = engines.said("squeue", "-h", "-r", "-o", "%i", env=environment).split()
        (job,) = [name for name in names if name.endswith("_2")]
        engines.said("scancel", "--batch", "--signal=USR1", job, env=environment)
        engines.until(lambda: not engines.said("squeue", "-h", env=environment).strip(), 400, "the array did not end")
        logs = [(sweep / "logs" / f"array_0_{task}.log").read_text() for task in range(3)]
        assert ["SLURM started this task again (1)" in log for log in logs] == [False, False, True]
        collected = dpcfl(*command, "--collect")
        assert collected.returncode == 0, collected.stdout + collected.stderr
        assert "3 finished" in collected.stdout


@pytest.mark.slow
def test_cells_as_ray_tasks(tmp_path):
    pytest.importorskip("ray")
    with engines.ray_cluster(nodes=2, cpus=2) as cluster:
        command = [
            "sweep",
            tiny(tmp_path / "c"),
            "privacy.epsilon=5,1e-9",
            "seed=0:2",
            "--on",
            "ray",
            "--out",
            tmp_path / "out",
        ]
        done = dpcfl(*command, timeout=300, env=cluster.environment)
        assert done.returncode in (0, 4), done.stderr
        assert states(tmp_path / "out")[:2] == ["finished"] * 2
        stopped = subprocess.Popen(
            [*DPCFL, *map(str, ["sweep", tiny(tmp_path / "d", rounds=900), "seed=5", "--on", "ray", "--out", tmp_path / "out2"])],
            env=cluster.environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        engines.until(lambda: any((tmp_path / "out2").glob("store/*/checkpoints/round_*")), 120, "no round was reached")
        stopped.send_signal(signal.SIGTERM)
        printed = stopped.communicate(timeout=60)[0]
        assert stopped.returncode == 130, printed
        assert states(tmp_path / "out2") == ["interrupted"]
        assert_nothing_left(tmp_path / "out2", seconds=15)


assert TINY["runtime"] == {"federation": "in-process"}  # what makes the tests above quick
