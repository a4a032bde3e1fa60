"""Signed jobs with rosters of some blocks, without keys or data."""

from __future__ import annotations

import json
from pathlib import Path

from dpcfl_net.adversaries.fuzz_readers import PROTOCOL
from dpcfl_net.core import signing
from dpcfl_net.core.frozen import canonical
from dpcfl_net.core.job_reader import read_signed_protocol
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.roster import BLOCK, Roster
from dpcfl_net.core.run_folder import RunFolder, signature_path

CLIENTS = 2 * BLOCK + 3


def protocol_of(clients: int = CLIENTS, **fields: object) -> Protocol:
    roster = [{**PROTOCOL["roster"][0], "id": k, "records": 1 + k % 7} for k in range(clients)]
    return Protocol.model_validate_json(json.dumps({**PROTOCOL, "roster": roster, **fields}))


def write(folder: Path, protocol: Protocol) -> RunFolder:
    """Write the public part of a job with the operator's signature."""
    folder.mkdir(exist_ok=True)
    files, key = RunFolder(folder), folder / "operator"
    if not (key / "operator.secret").exists():
        files.operator_key.write_text(signing.write_operator_key(key))
    files.protocol.write_bytes(canonical(protocol))
    Roster.of(protocol.roster).write(files.roster)
    signature_path(files.protocol).write_text(signing.sign(key / "operator.secret", canonical(protocol)))
    return files


def opened(files: RunFolder) -> Protocol:
    return read_signed_protocol(files.protocol, files.operator_key.read_text())
