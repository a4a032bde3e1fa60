"""Waits of a launcher for other processes do not count time in which the launcher itself was stopped (Ctrl-Z)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT

LIMIT_S, PAUSE_S = 6.0, 8.0

AGENT = """
import os, sys, threading, time
from dpcfl_net.core import clock
from dpcfl_net.launch.placement.remote import Host, HostAgent
clock.LONGEST_STEP_S = 1.5
agent, read = HostAgent(Host("far", None)), []

def answers():
    read.append(sys.stdin.readline())
    with agent._changed:
        agent._changed.notify_all()

threading.Thread(target=answers, daemon=True).start()
print(os.getpid(), flush=True)
agent.wait_for(lambda: read, LIMIT)
"""
FORK = """
import os, pathlib, signal, sys
from dpcfl_net.core import clock
from dpcfl_net.launch.placement import child
clock.LONGEST_STEP_S, child.FORK_S = 1.5, LIMIT
server = child.ForkServer()
while not child.wait([server._channel], 60):
    pass
os.kill(server.pid, signal.SIGSTOP)
child.ForkServer.resume = lambda self: None  # as if it were busy
print(server.pid, flush=True)
start = child.start_of("dpcfl_net.launch.placement.fork_server:serve", 3, child.role_environment(), watches_launcher=False)
server.fork("the child", start, pathlib.Path(os.devnull))
os._exit(0)
"""


@pytest.mark.parametrize("script", [pytest.param(AGENT, marks=pytest.mark.slow), FORK], ids=["host", "fork"])
def test_a_pause_of_the_launcher_takes_no_time_from_what_it_waits_for(script):
    words = [sys.executable, "-c", script.replace("LIMIT", str(LIMIT_S))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    launcher = subprocess.Popen(words, text=True, cwd=ROOT, **pipes)
    other = int(launcher.stdout.readline())
    time.sleep(0.3)
    launcher.send_signal(signal.SIGSTOP)
    time.sleep(PAUSE_S)
    launcher.send_signal(signal.SIGCONT)
    time.sleep(0.5)
    if other != launcher.pid:
        os.kill(other, signal.SIGCONT)
    _, errors = launcher.communicate("answer\n", timeout=60)
    assert launcher.returncode == 0, errors
    if other != launcher.pid:
        os.kill(other, signal.SIGKILL)
