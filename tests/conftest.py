"""Shared by all tests: one small finished run, jobs made in a moment, and a check that nothing is left running."""

from __future__ import annotations

import contextlib
import io
import logging
import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # before numpy loads: one thread, as every process of a run has

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import psutil
import pytest
import threat_table
import yaml
from api_runs import by_network, in_process, with_epsilon  # noqa: F401 - fixtures
from hypothesis import HealthCheck, settings
from shared_runs import session_folder, shared_run
from stages import RUNS, UNITS, stage_of
from threat_table import evidence  # noqa: F401 - a fixture

from dpcfl_net.core import process_log

# Time limits of examples and of their generation would fail on a busy machine.
settings.register_profile("without time limits", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("without time limits")
ROOT = Path(__file__).parents[1]
DPCFL = [sys.executable, "-m", "dpcfl_net"]
SMALL = {
    "name": "small",
    "data": {"dataset": "digits", "clients": [2, 2, 2, 2], "train_per_client": 700, "test_per_client": 60},
    "model": {"name": "digits-cnn"},
    "rounds": 6,
    "local": {"batch_size": 32, "lr": 0.5},
    "privacy": {"epsilon": 5, "delta": 1e-4, "noise": "seeded", "noise_seed": "5eed" * 16},
    "algorithm": {"name": "r-dpcfl", "clusters": 4},
    "output": {"transcript": "full"},
}


def pytest_addoption(parser):
    parser.addoption("--threats", action="store_true", help="print the threat suite's table: expected, got, control")
    parser.addoption(
        "--stage", choices=(UNITS, RUNS), help="only the tests of one stage of `make test` (tests/support/stages.py)"
    )
    parser.addoption("--record-golden", action="store_true", help="record the golden runs again (tests/golden/runs.json)")
    parser.addoption("--record-notebooks", action="store_true", help="store the outputs of the executed docs/tutorials/*.ipynb")


def pytest_configure(config):
    """Let Ctrl-C reach tests and what they start: a shell's background jobs ignore it, and their children inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_of_other_stage(path: Path, stage: str) -> bool:
    """Return True for a test file of the other stage."""
    return path.match("test_*.py") and stage_of(path.relative_to(ROOT / "tests")) != stage


def pytest_ignore_collect(collection_path, config):
    """Skip the files of the other stage, which each test process would otherwise import."""
    stage = config.getoption("--stage")
    return True if stage and is_of_other_stage(collection_path, stage) else None


def pytest_collection_modifyitems(config, items):
    """Deselect the tests of the other stage in files that were named one by one: pytest ignores none of those."""
    if stage := config.getoption("--stage"):
        config.hook.pytest_deselected(items=[item for item in items if is_of_other_stage(item.path, stage)])
        items[:] = [item for item in items if not is_of_other_stage(item.path, stage)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call":
        item.call_report = report
    return report


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("--threats"):
        reports = [r for found in terminalreporter.stats.values() for r in found if hasattr(r, "user_properties")]
        terminalreporter.section("threats")
        terminalreporter.write_line("\n".join(threat_table.table(reports)))


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Claims and data caches of the tests go to a folder of their own, one for all test processes; compute slots are each one's."""
    cache = session_folder(tmp_path_factory) / "cache"
    # Compute slots are shared by all runs of a user: a test that stops a worker must not hold up the other test process.
    own = {"XDG_CACHE_HOME": str(cache), "XDG_RUNTIME_DIR": str(tmp_path_factory.mktemp("runtime"))}
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@pytest.fixture(scope="module", autouse=True)
def few_descriptors_left():
    """A file of tests leaves at most a few files and sockets open, else one test process would reach the limit in the end."""
    before = psutil.Process().num_fds()
    yield
    left = psutil.Process().num_fds() - before
    assert left < 48, f"{left} more descriptors are open than before this file"


@pytest.fixture(autouse=True)
def usual_arithmetic():
    """The engine flushes denormals in the thread that trains; other tests (and hypothesis) want them back."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)


@pytest.fixture(autouse=True)
def usual_logging():
    """Tests that read commands in this process choose the level of its logs, too."""
    with _level_of_logs_kept():
        yield


@contextlib.contextmanager
def _level_of_logs_kept():
    """A command sets the level for its process and those that it starts; restore it here afterwards."""
    logger = logging.getLogger(process_log.PACKAGE)
    level, handlers, propagate = logger.level, logger.handlers[:], logger.propagate
    try:
        with mock.patch.dict(os.environ):
            yield
    finally:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


def write_config(folder: Path, **changes) -> Path:
    """SMALL with some sections changed, as a file."""
    document = {**SMALL, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


# Commands that need no process of their own.
HERE = (
    "account", "attack", "clients", "compare", "export", "inspect", "job", "keygen", "report", "reproduce", "run", "schema", "sweep",
    "verify",
)  # fmt: skip


def dpcfl(*arguments: object, timeout: float = 400, **more) -> subprocess.CompletedProcess:
    """Run the command line, in this process if it can: a new one takes a second to start, and a run in it two more.

    Runs in this process share one parent of their coordinators, observers and workers, as the runs of a script do.
    """
    words = [*map(str, arguments)]
    whole_process = more or threading.current_thread() is not threading.main_thread()
    if {*words[:1]} & {*HERE} and not whole_process:
        return _in_this_process(words, timeout)
    return subprocess.run([*DPCFL, *words], capture_output=True, text=True, timeout=timeout, cwd=ROOT, check=False, **more)


def _in_this_process(words: list[str], timeout: float) -> subprocess.CompletedProcess:
    from dpcfl_net.launch.cli import main

    with (
        time_limit(words, timeout),
        _level_of_logs_kept(),
        contextlib.chdir(ROOT),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
        pytest.raises(SystemExit) as left,
    ):
        main(words)
    return subprocess.CompletedProcess(words, left.value.code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def time_limit(words: list[str], seconds: float):
    """Raise TimeoutExpired in the block after some seconds, as `subprocess.run` does; only in the main thread.

    The time limit of the test, which is a timer of the same signal, goes on afterwards.
    """

    def expired(number, frame):
        raise subprocess.TimeoutExpired(words, seconds)

    begun, before = time.monotonic(), signal.signal(signal.SIGALRM, expired)
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left_s:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, left_s - (time.monotonic() - begun)))


def at_a_terminal(*arguments: object) -> subprocess.Popen:
    """The command line as a person starts it, who can press Ctrl-C: a shell's background jobs ignore that signal, and so would this."""
    return subprocess.Popen(
        [*DPCFL, *map(str, arguments)], cwd=ROOT, stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def only_run(out: Path) -> Path:
    """The one run folder below `out`."""
    (folder,) = [path for path in out.iterdir() if (path / "protocol.json").exists()]
    return folder


def charged_by_round(folder, job, client):
    """The charges of a run to a client, in the ledger that is charged for it: (round, events) in order."""
    from dpcfl_net.privacy.ledger.chain import read_ledger
    from dpcfl_net.results.epsilon_spent import charges_to, paying_ledger

    return charges_to(read_ledger(paying_ledger(folder, job, client)), job, client)


def command_line(process: psutil.Process) -> str:
    """Command line of a process; empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def processes_of(folder: Path) -> list[psutil.Process]:
    """Living processes that hold a file of `folder` open: each of a run's processes writes its log there."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(folder) in str(file.path) for file in process.open_files()):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def assert_nothing_left(folder: Path, seconds: float = 12) -> None:
    """No process of the run is alive after `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, left


@pytest.fixture(scope="session")
def private_run(tmp_path_factory) -> Iterator[Path]:
    """One finished run of the same configuration with noise from the operating system, so that it has an epsilon; in one process."""
    settings = {
        "privacy": {"epsilon": 5, "delta": 1e-4},
        "runtime": {"federation": "in-process"},
        "output": {"transcript": "off"},
    }
    with shared_run(tmp_path_factory, "private", lambda out: _run(out, settings)) as folder:
        yield folder


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory) -> Iterator[Path]:
    """One finished seeded run of 8 workers, a coordinator and an observer, shared by every test that only looks."""
    # At the level that writes most: tests search the logs for what a server may not know.
    with shared_run(tmp_path_factory, "finished", lambda out: _run(out, {}, "--log-level", "debug")) as folder:
        yield folder


def _run(out: Path, settings: dict, *options: str) -> Path:
    done = dpcfl("run", write_config(out / "c", **settings), "--out", out, *options)
    assert done.returncode == 0, done.stderr + done.stdout
    folder = only_run(out)
    assert_nothing_left(folder)
    return folder
