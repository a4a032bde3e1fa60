"""Logs of processes: one level for all processes of a run, and one format, with the standard library's `logging`.

The coordinator logs only what it received or may see. What a client logs stays on the client's host, except the end of the log of a
worker that has ended, which an agent sends to the operator.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TextIO

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import shown

VARIABLE = "DPCFL_LOG_LEVEL"
LEVELS = ("debug", "info", "warning", "error")
USUAL = "info"
PACKAGE = "dpcfl_net"  # parent of the loggers of all modules
_FORMAT = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")
_file: ContextVar[Path | None] = ContextVar("log file", default=None)


def checked_level(level: str, where: str) -> str:
    """Return a level in lower case.

    Args:
        level: One of LEVELS.
        where: Option or variable that holds it, for the message.

    Raises:
        ConfigError: If it is not one of LEVELS.
    """
    if level.lower() not in LEVELS:
        raise ConfigError(f"{where} is {shown(level)}: must be {', '.join(LEVELS[:-1])} or {LEVELS[-1]}")
    return level.lower()


def chosen_level() -> str:
    """Return the level of $DPCFL_LOG_LEVEL, or USUAL; ConfigError if it is none."""
    return checked_level(os.environ.get(VARIABLE) or USUAL, VARIABLE)


class _Stderr(logging.StreamHandler):
    """Writes to the stderr of now, which may have been redirected since."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr


def log_to_stderr() -> None:
    """Write what this process logs, from the chosen level on, to stderr; in a process of a run that is its log file."""
    logger = logging.getLogger(PACKAGE)
    handler, level = _Stderr(), getattr(logging, chosen_level().upper())
    handler.setFormatter(_FORMAT)
    handler.setLevel(level)
    logger.handlers[:] = [handler]
    if logger.level != level:  # to set it writes to all loggers, also those of libraries: 0.5 MiB of a forked process
        logger.setLevel(level)
    logger.propagate = False


def log_if_chosen() -> None:
    """Write the log of a process that is not part of a run, such as the command, if $DPCFL_LOG_LEVEL is set."""
    if os.environ.get(VARIABLE):
        log_to_stderr()


@contextmanager
def log_to_file(path: Path) -> Iterator[None]:
    """Append what this context logs to a file, for a run inside a process whose stderr belongs to its user.

    Args:
        path: The file.
    """
    logger, level = logging.getLogger(PACKAGE), getattr(logging, chosen_level().upper())
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(_FORMAT)
    handler.setLevel(level)
    handler.addFilter(lambda record: _file.get() == path)  # runs of other threads have their own files
    token = _file.set(path)
    try:
        with _detail.of(level):
            logger.addHandler(handler)
            try:
                yield
            finally:
                logger.removeHandler(handler)
    finally:
        _file.reset(token)
        handler.close()


class _Onward(logging.Handler):
    """Passes records on to the handlers of the root logger, which are the user's."""

    def emit(self, record: logging.LogRecord) -> None:
        root = logging.getLogger()
        if root.handlers:  # without any, `logging` would print warnings to stderr
            root.handle(record)


class _Detail:
    """Lets the package log more to files of runs while the user's handlers get no more than before the first of these runs."""

    def __init__(self) -> None:
        self._lock, self._runs, self._before, self._usual = threading.Lock(), 0, (logging.NOTSET, True), logging.NOTSET
        self._onward = _Onward()
        self._handlers: list[logging.Handler] = []

    @contextmanager
    def of(self, level: int) -> Iterator[None]:
        logger = logging.getLogger(PACKAGE)
        with self._lock:
            self._runs += 1
            if self._runs == 1:
                self._before, self._usual = (logger.level, logger.propagate), logger.getEffectiveLevel()
                if logger.propagate:
                    logger.addHandler(self._onward)
                    logger.propagate = False
                self._handlers = logger.handlers[:]
                for handler in self._handlers:
                    handler.addFilter(self._is_usual)
            logger.setLevel(min(level, logger.getEffectiveLevel()))
        try:
            yield
        finally:
            with self._lock:
                self._runs -= 1
                if self._runs == 0:
                    for handler in self._handlers:
                        handler.removeFilter(self._is_usual)
                    logger.removeHandler(self._onward)
                    logger.setLevel(self._before[0])
                    logger.propagate = self._before[1]

    def _is_usual(self, record: logging.LogRecord) -> bool:
        """Return True for a record that is logged without these runs, too: by the level of its module's logger, if it has one."""
        logger = logging.getLogger(record.name)
        while logger.name != PACKAGE and not logger.level and logger.parent is not None:
            logger = logger.parent
        return logger.name != PACKAGE or record.levelno >= self._usual


_detail = _Detail()
