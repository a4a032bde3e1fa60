"""Rounds of runs in TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from dpcfl_net.report.trackers.base import Tracker, privacy_text, require, result, settings
from dpcfl_net.results.run import RunData

EXTRA = "tensorboard"


class TensorBoard(Tracker):
    """Writes event files for TensorBoard: scalars by round, privacy statement and configuration as text, hyperparameters.

    Each run has a folder below `folder`. A part of a run that is written again, after a resumption or a second replay, replaces
    the earlier one.

    Args:
        folder: Folder for `tensorboard --logdir`.

    Raises:
        ConfigError: If tensorboard is not installed.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._writer: Any = None
        self._proto = (
            require("tensorboard.compat.proto.event_pb2", EXTRA),
            require("tensorboard.compat.proto.summary_pb2", EXTRA),
        )
        self._file_writer = require("tensorboard.summary.writer.event_file_writer", EXTRA).EventFileWriter
        self._hparams = require("tensorboard.plugins.hparams.summary_v2", EXTRA).hparams_pb
        self._text_plugin = require("tensorboard.plugins.text.metadata", EXTRA).create_summary_metadata
        self._tensor = require("tensorboard.util.tensor_util", EXTRA).make_tensor_proto

    def open(self, run: RunData) -> None:
        event, _ = self._proto
        self._writer = self._file_writer(str(self.folder / run.path.resolve().name))
        first = self.first_round
        # Hides the events of these rounds in earlier files.
        self._writer.add_event(
            event.Event(wall_time=time.time(), step=first, session_log=event.SessionLog(status=event.SessionLog.START))
        )
        own = settings(run)
        table = "\n".join(["| setting | value |", "|---|---|", *(f"| {key} | {_cell(value)} |" for key, value in own.items())])
        self._text("configuration", table, first)
        self._text("privacy statement", f"<pre>{escape(privacy_text(run))}</pre>", first)
        plain = {key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in own.items()}
        self._add(self._hparams(plain), first, time.time())

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        _, summary = self._proto
        found = [summary.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._add(summary.Summary(value=found), step, at)
        self._writer.flush()

    def close(self, run: RunData) -> None:
        self.log(run.rounds_done, result(run), time.time())
        self._text(
            "privacy statement", f"<pre>{escape(privacy_text(run))}</pre>", run.rounds_done
        )  # now with the epsilon spent
        self._writer.close()

    def _text(self, tag: str, text: str, step: int) -> None:
        _, summary = self._proto
        value = summary.Summary.Value(
            tag=tag,
            metadata=self._text_plugin(display_name=tag, description=""),
            tensor=self._tensor(np.array([text.encode()], dtype=object)),
        )
        self._add(summary.Summary(value=[value]), step, time.time())

    def _add(self, summary: Any, step: int, at: float) -> None:
        event, _ = self._proto
        self._writer.add_event(event.Event(wall_time=at, step=step, summary=summary))


def _cell(value: Any) -> str:
    return escape(str(value)).replace("|", "&#124;").replace("\n", " ")
