"""What the commands do: make a job, run it on this machine, go on with it, look at it."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from dpcfl_net import config as configuration
from dpcfl_net import experiment, runlog, summary, yaml_file
from dpcfl_net.config import Config
from dpcfl_net.errors import ConfigError, DpcflError
from dpcfl_net.expectations import expectations, step_seconds
from dpcfl_net.experiment import Job
from dpcfl_net.federation.claim import noisy_plans
from dpcfl_net.files import read_object, write_text
from dpcfl_net.plugins import short
from dpcfl_net.statement import replace_one_epsilon
from dpcfl_net.wire.keys import read_operator_key
from launch import local, processes
from launch.sites import Here, Site

# Fields of run.json that are read again.
RUN_FIELDS: dict[str, tuple[type, ...]] = {
    "state": (str,), "rounds_done": (int,), "wall_s": (float,), "processes": (int,), "devices": (dict,), "privacy": (dict,),
    "final": (dict,),
}  # fmt: skip
FIRST_COUNT_S = 1.0  # what counting epsilon is taken to cost before the first time: a run of seconds counts at its end only


class Shown(Protocol):
    """Where a run's progress is shown."""

    def update(self, view: Any) -> None: ...

    def close(self) -> None: ...


def new(path: Path, overrides: Iterable[str], out: Path) -> int:
    """Make a job and run it; the exit code."""
    config = configuration.load(path, overrides)
    code, _ = run_and_report(new_folder(config, out), config)
    return code


def quickstart(path: Path, out: Path) -> int:
    """The main job, then Global and Local at the same epsilon, then one table."""
    from launch.screen import print_summary

    done: list[dict[str, Any]] = []
    for override in ([], ["algorithm.name=global"], ["algorithm.name=local"]):
        config = configuration.load(path, override)
        code, document = run_and_report(new_folder(config, out), config)
        if code:
            return code
        done.append(document)
    print_summary(done[0], done[1:])
    return 0


def resume(folder: Path) -> int:
    """Go on with a run that was stopped or killed: the same signed job, ledgers and checkpoints."""
    config = configuration.load(folder / "config.yaml")
    if (folder / "placement.json").exists():
        raise ConfigError(f"the workers of {folder} are on other hosts: go on with dpcfl launch --resume {folder} --on ...")
    return 0 if is_finished(folder) else go_on(folder, config)


def is_finished(folder: Path) -> bool:
    """Whether nothing is left to do in a run folder, which is said; Refused if its job is not signed."""
    summary.read_run_job(folder)
    document = read_document(folder)
    finished = document.get("state") == "finished"
    if finished:
        print(f"{folder} is finished: {document.get('rounds_done', 'all')} rounds")
    return finished


def go_on(folder: Path, config: Config, site: Site | None = None) -> int:
    """Go on with an interrupted run; the exit code."""
    code, _ = run_and_report(folder, config, before=float(read_document(folder).get("wall_s", 0.0)), site=site)
    return code


def dry_run(path: Path, overrides: Iterable[str]) -> None:
    """Make the job in memory and print what it would do and cost."""
    import tempfile

    config = configuration.load(path, overrides)
    with tempfile.TemporaryDirectory() as folder:
        experiment.make_keys(Path(folder) / "keys", sum(config.data.clients))
        _print_job(experiment.make_job(config, Path(folder) / "keys"), config)


def write_job(path: Path, overrides: Iterable[str], out: Path, keys: Path | None) -> None:
    """The two parts of a job with signatures, for processes that are started by hand or elsewhere."""
    config = configuration.load(path, overrides)
    keys = keys or out / "keys"
    if not keys.exists():
        experiment.make_keys(keys, sum(config.data.clients))
    job = experiment.make_job(config, keys)
    experiment.write_job(job, out, keys)
    _write_config(out, config)
    _print_job(job, config)
    print(f"job in {out}: protocol.json (for everybody), experiment.json (for workers and observer), signatures, operator.pub")


def report(folder: Path) -> None:
    """run.json, for a run of hand-started processes too, and report.html."""
    from dpcfl_net.report.page import write_report

    job = summary.read_run_job(folder)
    before = read_document(folder)
    summary.write_epsilon_lines(folder, job)
    done = max((line["round"] for line in runlog.read(folder / "metrics.jsonl") if "bytes_up" in line), default=0)
    state = before.get("state", "finished" if done == job.protocol.rounds else "interrupted")
    replace_one = before.get("privacy", {}).get("epsilon_replace_one") or replace_one_epsilon(job.protocol)
    document = summary.run_document(
        folder,
        job,
        state=state,
        wall_s=before.get("wall_s", _wall(folder)),
        processes=before.get("processes", len(job.protocol.roster) + 2),
        replace_one=replace_one,
        devices=before.get("devices", {}),
    )
    summary.write_run(folder, document)
    print(write_report(folder))


def verify(folder: Path, operator_key: Path | None) -> int:
    """Print every check; 3 if one does not hold."""
    from dpcfl_net.verify import verify_run

    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a run folder")
    checks = verify_run(folder, read_operator_key(operator_key) if operator_key else None)
    for check in checks:
        word = {True: "holds", False: "FAILS", None: "none "}[check.holds]
        print(f"{word}  {check.what}: {check.detail}")
    return 3 if any(check.holds is False for check in checks) else 0


def inspect(folder: Path, client: int | None, round_: int | None, limit: int) -> None:
    """The transcript as a table."""
    from dpcfl_net.wire import transcript
    from dpcfl_net.wire.messages import decode

    path = folder / "transcript.msgpack"
    if not path.exists():
        raise ConfigError(f"{folder} has no transcript.msgpack (output.transcript: off?)")
    protocol = summary.read_run_job(folder).protocol
    print({
        "untrusted-server": "The server is not trusted: what it received below is all that it has, and what each client's gate let out.",
        "trusted-server": "The server is trusted: it sees every sampled client's update and cluster identifier as they are. Only what it "
        "publishes is noisy; whoever holds this transcript holds the clients' raw updates.",
    }[protocol.privacy.trust])  # fmt: skip
    if protocol.unprotected:
        print(f"Without any guarantee: {'; '.join(protocol.unprotected)}")
    print("   #  time      to the server  from the server  client  round  kind       task                 bytes  content")
    shown = left = 0
    reader = transcript.read(path)
    for record in reader:
        header = decode(record.header)
        peer = record.peer.removeprefix("client ")
        if (
            header.kind == "CHUNK"
            or (client is not None and peer != str(client))
            or (round_ is not None and header.round != round_)
        ):
            continue
        if shown >= limit:
            left += 1
            continue
        shown += 1
        up, down = ("x", "") if record.direction == "up" else ("", "x")
        tensors = ", ".join(f"{name} {dtype}{list(shape)}" for name, dtype, shape, _ in header.tensors)
        clock = time.strftime("%H:%M:%S", time.localtime(record.time))
        size = len(record.header) + header.size
        print(f"{record.number:>4}  {clock}  {up:^13}  {down:^15}  {peer:>6}  {header.round:>5}  {header.kind:<9}  {header.task:<18} "
              f"{size:>7}  {tensors or header.code}")  # fmt: skip
    if left:
        print(f"{left} more messages; --limit, --client and --round choose")
    if reader.cut:
        print("the last record was cut by a crash")


def run_in(
    folder: Path, config: Config, screen: Shown, before: float = 0.0, site: Site | None = None
) -> tuple[dict[str, Any], DpcflError | None]:
    """Start or go on with the run of a folder, watch, stop everything; (run.json, what it failed of, if it did).

    site: where its workers are, this machine unless it is given.

    Prints nothing itself; Ctrl-C and SIGTERM end in state `interrupted`. ConfigError while another process runs the folder.
    """
    with _held(folder):
        if not (folder / "protocol.json").exists():
            prepare(folder, config)
        operator_key = read_operator_key(folder / "operator.pub")
        job = experiment.read_job(folder, operator_key)
        site = site or Here()
        alone, clients = config.runtime.federation == "in-process", len(job.protocol.roster)
        run = (
            processes.OneProcessRun(folder, config, operator_key)
            if alone
            else processes.FederationRun(folder, config, clients, operator_key, site)
        )
        count = 1 if alone else processes.worker_processes(config, clients) + 2
        book = Book(folder, job, before, count, (lambda: {"cpu": 1}) if alone else site.devices)
        state, failure = "failed", None
        signal.signal(signal.SIGTERM, _interrupt)
        try:
            run.start()
            book.write("running")
            run.watch(lambda: screen.update(book.look()))
            run.finish()
            screen.update(book.look())
            state = "finished"
        except KeyboardInterrupt:
            state = "interrupted"
        except DpcflError as error:
            failure = error
        finally:
            screen.close()
            run.stop()
            document = book.write(state, last=True)
    return document, failure


def run_and_report(folder: Path, config: Config, before: float = 0.0, site: Site | None = None) -> tuple[int, dict[str, Any]]:
    """A run as a person sees it, with its report; (exit code, run.json)."""
    from dpcfl_net.report.page import write_report
    from launch.screen import open_screen

    screen = open_screen()
    document, failure = run_in(folder, config, screen, before, site)
    write_report(folder)
    if failure is not None:
        print(f"what was done is in {folder}; go on with: {_again(folder, site)}")
        raise failure
    if document["state"] == "interrupted":
        print(f"stopped after round {document['rounds_done']} of {config.rounds}; go on with: {_again(folder, site)}")
        return 130, document
    screen.finish(document)
    print(f"run folder {folder}, report {folder / 'report.html'}")
    return 0, document


def _again(folder: Path, site: Site | None) -> str:
    return f"dpcfl run --resume {folder}" if site is None else f"dpcfl launch --resume {folder} --on ... (as before)"


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Lock a run folder, or ConfigError while another process runs it."""
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{folder} is being run by another process") from None
        yield
    finally:
        os.close(handle)


class Book:
    """Keeps run.json and the epsilon lines while a run goes; the operator's side, which may know everything."""

    def __init__(self, folder: Path, job: Job, before: float, processes: int, devices: Callable[[], dict[str, int]]) -> None:
        self.folder, self.job, self.before, self._processes, self._devices = folder, job, before, processes, devices
        self.started = time.time()
        self._replace_one: float | None = None
        self._round, self._cost, self._counted = 0, FIRST_COUNT_S, time.monotonic()
        self._statement = threading.Thread(target=self._compute_replace_one, daemon=True)
        self._statement.start()

    def look(self) -> Any:
        """The screen's view; now and then the epsilon lines are brought up to date, at a tenth of the time at most."""
        from launch.progress import tail_progress

        view = tail_progress(self.folder)
        if view.round > self._round and time.monotonic() - self._counted > 10 * self._cost:
            start = time.monotonic()
            summary.write_epsilon_lines(self.folder, self.job)
            self._round, self._counted = view.round, time.monotonic()
            self._cost = self._counted - start
            view = tail_progress(self.folder)
        return view

    def write(self, state: str, *, last: bool = False) -> dict[str, Any]:
        """Bring run.json up to date."""
        if last:
            self._statement.join()
            summary.write_epsilon_lines(self.folder, self.job)
        wall = self.before + time.time() - self.started
        document = summary.run_document(
            self.folder,
            self.job,
            state=state,
            wall_s=wall,
            processes=self._processes,
            replace_one=self._replace_one,
            devices=self._devices(),
        )
        summary.write_run(self.folder, document)
        return document

    def _compute_replace_one(self) -> None:
        self._replace_one = replace_one_epsilon(self.job.protocol)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def prepare(folder: Path, config: Config, site: Site | None = None) -> None:
    """Keys, each made where it is used, the signed job and the resolved configuration: all that a run starts from."""
    experiment.make_operator_keys(folder / "keys")
    (site or Here()).enrol(folder / "keys", sum(config.data.clients), config.runtime.clients_per_worker)
    job = experiment.make_job(config, folder / "keys")
    _write_config(folder, config)
    experiment.write_job(job, folder, folder / "keys")


def _write_config(folder: Path, config: Config) -> None:
    """The resolved configuration: itself a valid CONFIG."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "config.yaml", yaml_file.dump(config.model_dump(mode="json", exclude={"algorithms"})))


def new_folder(config: Config, out: Path) -> Path:
    """An empty run folder below `out`, named after the configuration and the time."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    stem = f"{config.name}-{short(config.algorithm['name'])}-{stamp}"
    for count in range(100):
        folder = out / (stem if not count else f"{stem}-{count}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise ConfigError(f"no free name for a run folder {out / stem}")


def _print_job(job: Job, config: Config) -> None:
    """The plan and what it will cost on a machine like this one."""
    protocol, cost = job.protocol, expectations(job.protocol, config.runtime.max_live_workers)
    z = sorted({round(noise, 5) for noise in noisy_plans(job.algorithm).values() if noise is not None})
    print(
        f"{protocol.name}: {protocol.algorithm}, {cost['clients']} clients, {protocol.rounds} rounds, {cost['parameters']:,} parameters"
    )
    print(
        f"epsilon {protocol.privacy.epsilon:g} at delta {protocol.privacy.delta:g}: noise multiplier {', '.join(map(str, z)) or 'none'}"
    )
    for slot, count in Counter(job.algorithm.plan(protocol.roster[0])).items():
        print(f"  plan of a client: {count} x {slot}")
    for slot, count in Counter(job.algorithm.curator_plan()).items():
        print(f"  plan of the trusted server: {count} x {slot}")
    slots = local.compute_slots(config.runtime)
    minutes = step_seconds(job, config.data.root) * cost["steps"] / slots / 60
    print(
        f"expected: {cost['steps']:,} steps over {cost['records']:,} records, about {minutes:.1f} minutes of computing in {slots} slots here; "
        f"{cost['bytes_up'] / 1e6:.1f} MB up, {cost['bytes_down'] / 1e6:.1f} MB down; "
        f"about {cost['memory'] / 2**30:.1f} GiB of memory for all processes"
    )


def read_document(folder: Path) -> dict[str, Any]:
    """run.json, empty where there is none yet; ConfigError if it is not what a run writes."""
    path = folder / "run.json"
    return read_object(path, RUN_FIELDS) if path.exists() else {}


def _wall(folder: Path) -> float:
    times = [line["time"] for line in runlog.read(folder / "metrics.jsonl") if "time" in line]
    return max(times) - min(times) if times else 0.0
