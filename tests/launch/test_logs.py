"""Logs of processes: one level for all of them, a logger for each module, and nothing private on the coordinator's side."""

from __future__ import annotations

import contextlib
import contextvars
import io
import logging
import re
import threading

import pytest
from cli_cases import call
from conftest import write_config

from dpcfl_net.core import process_log
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.launch.placement.child import role_environment

LINE = re.compile(r"\d\d:\d\d:\d\d (DEBUG|INFO|WARNING|ERROR) +dpcfl_net\.[\w.]+: .+")


@pytest.fixture(autouse=True)
def usual_logging(monkeypatch):
    """No handlers at the begin; at the end the level and the handlers of other tests, which may run commands that log."""
    monkeypatch.setenv(process_log.VARIABLE, "")
    logger = logging.getLogger(process_log.PACKAGE)
    before = logger.level, list(logger.handlers), logger.propagate
    logger.level, logger.handlers, logger.propagate = logging.NOTSET, [], True
    logger.manager._clear_cache()
    yield
    logger.level, logger.handlers, logger.propagate = before
    logger.manager._clear_cache()


@pytest.mark.parametrize(("level", "written"), [("debug", 3), ("info", 2), ("WARNING", 1), ("error", 0)])
def test_a_process_logs_from_its_level_on(monkeypatch, capsys, level, written):
    monkeypatch.setenv(process_log.VARIABLE, level)
    process_log.log_to_stderr()
    log = logging.getLogger("dpcfl_net.some.module")
    log.debug("one")
    log.info("two")
    log.warning("three")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == written
    assert all(LINE.fullmatch(line) for line in lines)


def test_a_forked_process_of_the_same_level_writes_to_no_logger(monkeypatch):
    monkeypatch.setenv(process_log.VARIABLE, "warning")
    process_log.log_to_stderr()
    changes = []
    monkeypatch.setattr(logging.Manager, "_clear_cache", lambda manager: changes.append(manager))
    process_log.log_to_stderr()
    assert not changes
    monkeypatch.setenv(process_log.VARIABLE, "error")
    process_log.log_to_stderr()
    assert len(changes) == 1


def test_an_unknown_level_is_refused(monkeypatch, capsys):
    done = call(capsys, "run", "quickstart", "--log-level", "loud")
    assert (done.code, done.err) == (2, "error: --log-level is 'loud': must be debug, info, warning or error\n")
    monkeypatch.setenv(process_log.VARIABLE, "7")
    with pytest.raises(ConfigError, match="DPCFL_LOG_LEVEL is '7'"):
        process_log.chosen_level()


def test_the_level_reaches_coordinator_and_observer(monkeypatch):
    monkeypatch.setenv(process_log.VARIABLE, "debug")
    monkeypatch.setenv("A_SECRET", "x")
    environment = role_environment()
    assert environment[process_log.VARIABLE] == "debug"
    assert "A_SECRET" not in environment


def test_a_run_in_this_process_logs_to_its_file_only(tmp_path, capsys):
    log = logging.getLogger("dpcfl_net.some.module")
    with process_log.log_to_file(tmp_path / "a.log"):
        log.info("mine")
        other = threading.Thread(target=log.info, args=("of another thread",))
        other.start()
        other.join()
    log.info("afterwards")
    (line,) = (tmp_path / "a.log").read_text().splitlines()
    assert line.endswith("INFO    dpcfl_net.some.module: mine")
    assert capsys.readouterr().err == ""


def test_every_process_of_a_run_logs_at_the_chosen_level(finished_run):
    """The shared run has the level debug; test_run.py and the threat tests search its coordinator's log for secrets."""
    logs = {path.stem: path.read_text().splitlines() for path in (finished_run / "logs").iterdir()}
    assert set(logs) == {"coordinator", "observer", *(f"client_{k}" for k in range(8))}
    assert any("DEBUG" in line and "round 1: first" in line for line in logs["coordinator"])
    assert sum("INFO" in line and "of 6 done" in line for line in logs["coordinator"]) == 6
    assert all(any("DEBUG" in line and "charges" in line for line in logs[f"client_{k}"]) for k in range(8))
    assert not [line for line in logs["coordinator"] if "charges" in line]
    assert all(LINE.fullmatch(line) for lines in logs.values() for line in lines)


def test_a_quiet_run_prints_nothing(capsys, tmp_path):
    path = write_config(
        tmp_path / "c", data={"dataset": "digits", "clients": [1, 1], "train_per_client": 60, "test_per_client": 20},
        rounds=2, algorithm="global", output={},
    )  # fmt: skip
    done = call(capsys, "run", path, "--debug", "--quiet", "--out", tmp_path)
    assert done == type(done)(0, "", "")
    (log,) = tmp_path.glob("*/logs/in-process.log")
    assert "round 2 of 2 done" in log.read_text()


def test_a_run_in_this_process_gives_handlers_of_its_user_no_more_than_they_had(monkeypatch, tmp_path):
    """Importing opacus adds a handler to the root logger, as `logging.basicConfig` does."""
    seen, root = io.StringIO(), logging.getLogger()
    monkeypatch.setattr(root, "handlers", [logging.StreamHandler(seen)])
    log, logger = logging.getLogger("dpcfl_net.some.module"), logging.getLogger(process_log.PACKAGE)
    paths = [tmp_path / "a.log", tmp_path / "b.log"]
    runs = [(contextvars.copy_context(), process_log.log_to_file(path)) for path in paths]
    for context, run in runs:
        context.run(run.__enter__)
    runs[0][0].run(runs[0][1].__exit__, None, None, None)  # the other run still logs all that its level allows
    runs[1][0].run(log.info, "detail")
    runs[1][0].run(log.warning, "seen")
    runs[1][0].run(runs[1][1].__exit__, None, None, None)
    log.info("later")
    assert seen.getvalue() == "seen\n"
    assert [path.read_text().count("\n") for path in paths] == [0, 2]
    assert (logger.level, logger.handlers, logger.propagate) == (logging.NOTSET, [], True)
    logger.setLevel(logging.INFO)  # a user who asks for more gets it
    with process_log.log_to_file(paths[0]):
        log.info("asked for")
    assert seen.getvalue() == "seen\nasked for\n"


def test_handlers_of_the_package_and_levels_of_its_modules_are_those_of_the_user(monkeypatch, tmp_path):
    """A handler of the package's own logger had the details of a run; one of the root, not those of a module that was set to them."""
    seen, at_root = io.StringIO(), io.StringIO()
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(at_root)])
    package, module = logging.getLogger(process_log.PACKAGE), logging.getLogger("dpcfl_net.some.module")
    package.addHandler(logging.StreamHandler(seen))
    asked = logging.getLogger("dpcfl_net.other")
    monkeypatch.setattr(asked, "level", logging.DEBUG)
    package.manager._clear_cache()
    for run in (process_log.log_to_file(tmp_path / "run.log"), contextlib.nullcontext()):
        with run:
            module.info("detail")
            module.warning("seen")
            logging.getLogger("dpcfl_net.other.deeper").debug("asked for")
        assert seen.getvalue() == at_root.getvalue() == "seen\nasked for\n"
        for stream in (seen, at_root):
            stream.seek(0)
            stream.truncate()
    assert (tmp_path / "run.log").read_text().count("\n") == 2
