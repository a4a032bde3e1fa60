"""Fork server: a process that loads libraries once and forks further processes on request.

It runs no thread, opens no network socket, draws no random number and never starts CUDA: children would inherit it. A request is
one message on a Unix socket: the title of the child, with file descriptors of its channel, its log, its arguments and those
that its specification names. The arguments are read by the child alone, so that a fork server never holds a configuration that it was not
started with. On the channel the child sends a handle of itself, and its exit code with the message of its failure, which a full
disk keeps out of its log; the fork server sends the code of a child that was killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import importlib
import json
import os
import socket
import sys
import threading
import typing
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import wait
from typing import Any, NamedTuple, cast

import setproctitle
from pydantic import TypeAdapter

from dpcfl_net.core import open_files
from dpcfl_net.core.errors import DpcflError, RunFailed
from dpcfl_net.core.files import reason, used_up
from dpcfl_net.core.process_log import log_to_stderr
from dpcfl_net.launch.interrupts import ignore_terminal_signals
from dpcfl_net.training import memory

CHANNEL, FIRST_FREE = 3, 4  # descriptors of a child: its channel, and the first of those that its specification names
MOST_DESCRIPTORS = 16
LONGEST_TITLE = 4096
LONGEST_TEXT = 8000  # characters of a message of a child that has failed, as of one that names many clients
_HIGH = 64  # descriptors from here on are out of the way while a child's are put in their places
# All that the coordinator needs: no data, configuration or experiment.
COORDINATOR_MAIN = "dpcfl_net.runtime.coordinator:run_coordinator"
AGGREGATOR_MAIN = "dpcfl_net.runtime.aggregator:run_aggregator"
# Main functions of a worker process of one client, and of several.
WORKER_MAIN, GROUP_MAIN = "dpcfl_net.runtime.worker:run_worker", "dpcfl_net.runtime.worker_group:run_group"
LIBRARIES = ("dpcfl_net.runtime.coordinator", "zmq.auth.thread", "safetensors.numpy")


class Start(NamedTuple):
    """Main function and arguments of a child process.

    Attributes:
        main: Its main function, "module:function".
        argument: Argument of the function, in JSON; read as the type that the function declares.
        environment: Its environment variables.
        folder: Current folder of the launcher, which may have changed since the fork server was started; empty if it was removed.
        path: Module path of the launcher, `sys.path`, which may have changed, too.
        watches_launcher: True if a thread ends the process with the launcher; a fork server has no thread and sees it itself.
    """

    main: str
    argument: str
    environment: dict[str, str]
    folder: str
    path: list[str]
    watches_launcher: bool = True


def main() -> None:
    """Load the libraries of the coordinator and serve; `sys.argv[1]` is the descriptor of the channel. Does not return."""
    ignore_terminal_signals()  # they were blocked until here; children inherit this
    setproctitle.setproctitle("dpcfl parent of all processes")
    import torch

    from dpcfl_net.algorithms.base import registry

    memory.keep_freed()
    torch.set_num_threads(1)
    for name in LIBRARIES:
        importlib.import_module(name)
    registry()
    main_function(COORDINATOR_MAIN)
    channel = int(sys.argv[1])
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(channel)) as end:  # the launcher may have ended
        end.send(b"loaded")
    serve(channel)


def serve(channel: int = CHANNEL) -> None:
    """Fork a child for each request, until the launcher has ended; does not return.

    Args:
        channel: Descriptor of the channel on which requests arrive.
    """
    gc.collect()
    memory.give_back_all()
    memory.fill_gaps()
    gc.freeze()  # so that the collector does not copy the shared memory
    requests, environment = socket.socket(fileno=channel), dict(os.environ)
    children: dict[int, tuple[int, socket.socket]] = {}  # by descriptor of the process: its id and its channel
    while True:
        open_files.allow(open_files.files_for(len(children)))
        for source in cast(list[int], wait([channel, *children])):
            if source != channel:
                _report_end(*children.pop(source))
                os.close(source)
                continue
            try:
                title, descriptors, flags, _ = socket.recv_fds(requests, LONGEST_TITLE, MOST_DESCRIPTORS)
            except ConnectionResetError:  # the launcher has ended without having read that this process has loaded
                title = b""
            if not title:
                os._exit(0)
            if not descriptors:  # too many open files: the launcher sees that its channel is closed
                continue
            end = socket.socket(fileno=descriptors[0])
            pid = None
            try:
                if flags & socket.MSG_CTRUNC:
                    raise OSError(errno.EMFILE, "some of its files cannot be opened")
                pid = os.fork()
            except OSError as error:  # too many open files, no memory, or too many processes
                end.send(f"cannot fork: {reason(error)}".encode())
                end.close()
            if pid == 0:
                _become(title.decode(), descriptors, environment)
            for descriptor in descriptors[1:]:  # they may have been the last ones: the handle of the child needs one
                os.close(descriptor)
            if pid is not None:
                children[os.pidfd_open(pid)] = pid, end


def _report_end(pid: int, channel: socket.socket) -> None:
    """Send the exit code of a child that has ended, negative for a signal; one that exited by itself has sent it first."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with channel:
        try:
            channel.send(str(code).encode())
        except OSError:
            return  # the launcher no longer waits for it


def _become(title: str, descriptors: list[int], environment: dict[str, str]) -> None:
    """Continue as the child: its log, its channel and its descriptors in their places, and no other open file."""
    end = descriptors[0]  # of the channel
    try:
        channel, log, arguments, *others = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH) for fd in descriptors]
        end = channel
        os.dup2(log, 1)
        os.dup2(log, 2)
        for place, descriptor in enumerate((channel, *others), CHANNEL):
            os.dup2(descriptor, place, inheritable=False)
        end = CHANNEL
        with os.fdopen(arguments, "rb") as file:
            content = file.read()
        os.closerange(FIRST_FREE + len(others), os.sysconf("SC_OPEN_MAX"))
        handle = os.pidfd_open(os.getpid())
        with socket.socket(fileno=os.dup(CHANNEL)) as one:
            socket.send_fds(one, [str(os.getpid()).encode()], [handle])
        os.close(handle)
    except BaseException as error:  # else the child would go on as the fork server, and end with its exit handlers
        with contextlib.suppress(OSError):  # the launcher has ended
            why = reason(error) if isinstance(error, OSError) else repr(error)
            os.write(end, f"its files could not be put in place: {why}".encode())
        os._exit(4)
    run(title, content, environment)


def run(title: str, content: bytes, environment: dict[str, str]) -> None:
    """Run the main function of a child and exit; does not return.

    Args:
        title: Name in process lists.
        content: A `Start` in JSON.
        environment: The inherited environment variables; `os.environ` would decode each of them again.
    """
    setproctitle.setproctitle(f"dpcfl {title}")
    code, text = 0, ""
    try:
        start = Start(**json.loads(content))
        if environment != start.environment:  # a worker's is that of its parent
            os.environ.clear()
            os.environ.update(start.environment)
        if start.folder and not _is_in(start.folder):
            os.chdir(start.folder)
        sys.path[:] = start.path
        if start.watches_launcher:
            threading.Thread(target=_exit_with_launcher, name="launcher watch", daemon=True).start()
        log_to_stderr()
        function, argument = main_function(start.main)
        function(argument.validate_json(start.argument))
    except BaseException as error:
        code, text = _failure(error)
    finally:  # also if its log cannot be written, on a full disk
        try:
            _tell(code, text)
            sys.stdout.flush()
        finally:
            os._exit(code)  # forked children skip the parent's exit handlers


def _is_in(folder: str) -> bool:
    """Return True if this is the current folder, which need not be entered: this user may not be allowed to, as after `sudo -u`."""
    try:
        return os.getcwd() == folder
    except FileNotFoundError:
        return False


def _failure(error: BaseException) -> tuple[int, str]:
    """Write an error to the log, if it can be written; return exit code and message."""
    if why := used_up(error):
        error = RunFailed(why)
    with contextlib.suppress(OSError):
        if isinstance(error, DpcflError):
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        else:
            import traceback

            traceback.print_exception(error)
    return error.exit_code if isinstance(error, DpcflError) else 70, f"{type(error).__name__}: {error}"


@cache
def main_function(name: str) -> tuple[Callable[[Any], None], TypeAdapter[Any]]:
    """Find the main function of a child, and the reader of its argument.

    A fork server calls this for its children before it forks them: the reader takes 4 MiB and 20 ms.

    Args:
        name: "module:function".
    """
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    kind = next(hint for parameter, hint in typing.get_type_hints(function).items() if parameter != "return")
    return function, TypeAdapter(kind)


def _tell(code: int, text: str) -> None:
    """Send exit code and message to the launcher: the fork server, which would send the code, may have been killed."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(CHANNEL)) as end:  # the launcher no longer waits for it
        end.send(f"{code} {text[:LONGEST_TEXT]}".encode(errors="replace"))


def _exit_with_launcher() -> None:
    """Exit when the launcher ends, also by SIGKILL; ledgers and checkpoints stay consistent."""
    with contextlib.suppress(ConnectionResetError):  # it has ended without having read the handle of this process
        os.read(CHANNEL, 1)
    os._exit(4)
