"""Reads the parts of a signed job and checks form, roster and signature."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from dpcfl_net.core.errors import Refused
from dpcfl_net.core.files import read_bytes
from dpcfl_net.core.frozen import FrozenModel, canonical, digest, invalid_fields, once
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.roster import RosterFile
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.signing import check_signature

PartType = TypeVar("PartType", bound=FrozenModel)


def read_protocol(path: Path) -> Protocol:
    """Read a protocol file and verify the roster beside it.

    Args:
        path: File of the protocol.

    Returns:
        The protocol; entries of its roster are read when they are used.

    Raises:
        ConfigError: As `read_part`, and if the roster cannot be read.
        Refused: As `read_part`, and "roster" if the roster is not the one that the protocol names.
    """
    protocol = read_part(path, Protocol)
    if isinstance(protocol.roster, RosterFile):
        protocol.roster.verify()
    return protocol


def read_signed_protocol(path: Path, operator_key: str) -> Protocol:
    """Read a protocol file and check the operator's signature.

    Args:
        path: File of the protocol.
        operator_key: Public key of the operator.

    Returns:
        The protocol, as `read_protocol`.

    Raises:
        ConfigError: As `read_protocol` and `check_signature`.
        Refused: As `read_protocol` and `check_signature`.
    """
    protocol = read_protocol(path)
    check_signature(path, operator_key, digest(protocol))
    return protocol


def read_part(path: Path, kind: type[PartType]) -> PartType:
    """Read one part of a job.

    Args:
        path: File of the part.
        kind: Its model.

    Returns:
        The part; its digest is that of the bytes that were read.

    Raises:
        ConfigError: If the file cannot be read.
        Refused: "job-invalid" if the content does not fit the model or is not in canonical form.
    """
    data = read_bytes(path)
    try:
        part = kind.model_validate_json(data, context={"roster": RunFolder(path.parent).roster})
    except ValidationError as error:
        raise Refused("job-invalid", f"{path}: {invalid_fields(error)}") from None
    if not _is_canonical(part, data):
        raise Refused("job-invalid", f"{path} is not in canonical form")
    once(part, "digest", lambda: hashlib.sha256(data).hexdigest())
    return part


def _is_canonical(part: FrozenModel, data: bytes) -> bool:
    """Return True if the bytes are canonical; infinity can be read but has no canonical form."""
    try:
        return canonical(part) == data
    except ValueError:
        return False
