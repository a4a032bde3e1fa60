"""Run folders as versions before format 3 wrote them: payloads hashed with SHA-256."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rewriting

from dpcfl_net.core.frozen import digest
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.experiment.job_files import Job, read_job, write_job


def as_format_2(folder: Path, state: str = "finished") -> Job:
    """Rewrite a run with a full transcript as one of format 2: its signed job, ledgers and transcript, and its state.

    Ids of debits and answers in releases/ stay, so they belong to no task of this job, as those of format 2.
    """
    files = RunFolder(folder)
    new = read_job(folder, files.operator_key.read_text())
    old = Job(new.protocol.model_copy(update={"format": 2, "roster": list(new.protocol.roster)}), new.experiment)
    write_job(old, folder, files.keys)
    job = digest(old.protocol)
    for client in old.protocol.clients:
        rewriting.rewrite_ledger(folder, client, _of_job(job), counter=True)
    rewriting.rewrite_transcript(folder, lambda bodies: _of_version_1(bodies, job))
    document = json.loads(files.run.read_text())
    files.run.write_text(json.dumps({**document, "state": state}))
    return old


def _of_job(job: str) -> Callable[[list[dict[str, Any]]], None]:
    def change(lines: list[dict[str, Any]]) -> None:
        for line in lines:
            (line["owner"] if line["type"] == "header" else line)["job"] = job

    return change


def _of_version_1(bodies: list[rewriting.Body], job: str) -> None:
    whole = {body[4]["id"]: b"" for body in bodies if "blake3" in body[4]}
    for *_, header, payload in bodies:
        if header["kind"] == "CHUNK" and header["parent"] in whole:
            whole[header["parent"]] += payload
    for *_, header, _ in bodies:
        header |= {"version": 1, "job": job}
        if header.pop("blake3", None):
            header["sha256"] = hashlib.sha256(whole[header["id"]]).hexdigest()
