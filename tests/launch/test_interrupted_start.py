"""Ctrl-C ends a command that still loads its libraries, however long that takes."""

import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT

from dpcfl_net.launch.one_process import OneProcessRun
from dpcfl_net.launch.placement import parents
from dpcfl_net.launch.placement.child import ForkServer
from dpcfl_net.launch.processes import FederationRun


class Pressed:
    """Ctrl-C was pressed."""

    def check(self):
        raise KeyboardInterrupt


@pytest.fixture
def loading(monkeypatch):
    """A fork server that loads for ever."""
    server = ForkServer()
    os.kill(server._process.pid, signal.SIGSTOP)
    monkeypatch.setattr(parents, "_libraries", server)
    yield server
    server.close()
    assert server._process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("kind", [OneProcessRun, FederationRun])
def test_ctrl_c_does_not_wait_for_libraries(loading, kind):
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        kind.__new__(kind).start(None, Pressed())
    assert time.monotonic() - started < 30  # it is never loaded


def test_a_loaded_fork_server_is_waited_for_once_and_ends_quietly(capfd):
    server = ForkServer()
    server.wait_until_loaded(lambda: None)
    server.wait_until_loaded(Pressed().check)
    server._used = True  # it ends with its channel
    server.close()
    assert server._process.returncode == 0
    assert capfd.readouterr().err == ""


def test_ctrl_c_ends_no_process_that_has_just_begun_and_prints_nothing(capfd):
    """The terminal sends it to all processes; only the launcher acts on it."""
    server = ForkServer()
    try:
        for number in (signal.SIGINT, signal.SIGHUP):
            os.kill(server.pid, number)
        server.wait_until_loaded(lambda: None)
        assert server.alive(0.2)
    finally:
        server.close()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["typer", "sitecustomize"])
def test_ctrl_c_while_commands_are_imported_prints_nothing(tmp_path, name):
    """With code 130, although CPython ends with SIGINT after one within an exec of text, as dataclasses make.

    One of the imports is that of the modules which report errors.
    """
    errors = "import sys; sys.modules['dpcfl_net.launch.cli.errors'] = Pressed()"
    pressed = "class Pressed:\n    def __getattr__(self, name):\n        exec('raise KeyboardInterrupt')\n"
    (tmp_path / f"{name}.py").write_text("exec('raise KeyboardInterrupt')" if name == "typer" else pressed + errors)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "dpcfl_net", "configs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_while_a_command_exits_prints_nothing():
    """It came while the command waited for the end of its fork server; Python prints what an exit handler raises."""
    program = """
import os, signal
from dpcfl_net.launch.placement import parents
from dpcfl_net.launch.placement.child import ForkServer

def close(self, close=ForkServer.close):
    os.kill(os.getpid(), signal.SIGINT)
    close(self)

ForkServer.close = close
parents.warm()
raise SystemExit(130)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
