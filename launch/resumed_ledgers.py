"""Ledgers that a resumed run must have: a client without its ledger would go on with an empty one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpcfl_net.core import runlog
from dpcfl_net.core.errors import LedgerError
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.experiment.job_files import Job
from dpcfl_net.federation.central_dp import CENTRAL_SERVER
from dpcfl_net.privacy.ledger.chain import LINES
from dpcfl_net.results.epsilon_spent import ledger_folder
from dpcfl_net.results.round_times import client_of


def check_ledgers(folder: Path, job: Job) -> None:
    """Check that each client that has answered in a run on this machine has a ledger, and the trusted server has one after a round.

    Args:
        folder: The run folder.
        job: The job.

    Raises:
        LedgerError: "ledger-missing" for the first one without.
    """
    files = RunFolder(folder)
    without = {client for client in job.protocol.clients if not (ledger_folder(folder, client) / LINES).exists()}
    if without and (found := without & set(_answered(files, job))):  # else the records need not be read
        raise _missing(ledger_folder(folder, min(found)), f"client {min(found)} has answered")
    central = files.ledger(CENTRAL_SERVER)
    if job.protocol.privacy.central and not (central / LINES).exists() and any(_rounds(files)):
        raise _missing(central, "the trusted server has released sums")


def _missing(where: Path, what: str) -> LedgerError:
    return LedgerError(
        "ledger-missing",
        f"{where} holds no ledger, but {what} in this run: restore the folder, since an empty ledger would hide what was spent",
    )


def _answered(files: RunFolder, job: Job) -> Iterator[int]:
    """Yield clients that have answered, as far as the server's records tell; a run in one process has no messages."""
    for line in runlog.each(files.messages):
        if line.get("kind") == "RESULT" and (client := client_of(line.get("peer"))) is not None:
            yield client
    for line in _rounds(files):
        gone = {*line.get("missing", ()), *line.get("away", ())}
        there = [client for client in job.protocol.clients if client not in gone]
        if line["answered"] == len(there):
            yield from there


def _rounds(files: RunFolder) -> Iterator[dict[str, Any]]:
    return (line for line in runlog.each(files.metrics) if line.get("view") == "server" and "answered" in line)
