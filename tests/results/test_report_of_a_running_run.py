"""`dpcfl report` leaves the record of a running run to its launcher."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import dpcfl_net as dpcfl
from dpcfl_net.core.locks import run_lock
from dpcfl_net.launch.cli.run import report
from dpcfl_net.results import summary


def test_a_run_that_ends_while_its_report_is_written_stays_finished(by_network: dpcfl.Run, tmp_path: Path, monkeypatch) -> None:
    folder = Path(shutil.copytree(by_network.path, tmp_path / "run"))
    record, real = folder / "run.json", summary.run_document
    finished = record.read_text()
    record.write_text(json.dumps({**json.loads(finished), "state": "running"}))

    def slow(*arguments, **more):
        found = real(*arguments, **more)
        record.write_text(finished)  # by the launcher
        return found

    monkeypatch.setattr(summary, "run_document", slow)
    with run_lock(folder):
        report(folder)
    assert record.read_text() == finished
