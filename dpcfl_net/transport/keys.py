"""CURVE key pairs of the processes, each in its own folder."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from pathlib import Path

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import opened, read_text
from dpcfl_net.core.signing import read_key_file, read_secret_file, write_operator_key, write_pair

OPERATOR, COORDINATOR, OBSERVER, AGGREGATOR = "operator", "coordinator", "observer", "aggregator"
NOISE_SEED = "noise.seed"  # in the coordinator's key folder, if it is trusted to add seeded noise
PACK = "clients"  # name of the files with the keys of all clients of a large roster
CURVE_LENGTH = 40  # characters of z85 for 32 bytes
LINE = CURVE_LENGTH + 1
_CLIENT = re.compile(r"client_([0-9]{4,7})")  # compiled here, in the parent of all workers


def aggregator_key(number: int) -> str:
    """Return the name of an aggregator's key files."""
    return f"{AGGREGATOR}_{number:04d}"


def client_key(client: int) -> str:
    """Return the name of a client's key files."""
    return f"client_{client:04d}"


def make_keys(folder: Path, clients: int, aggregators: int = 0) -> None:
    """Write the key pairs of a run on one machine: operator, coordinator, observer, aggregators and clients.

    Args:
        folder: Folder of all keys.
        clients: Number of clients.
        aggregators: Number of aggregators.

    Raises:
        ConfigError: As `write_pair`.
    """
    make_operator_keys(folder)
    make_aggregator_keys(folder, range(aggregators))
    make_client_keys(folder, range(clients))


def make_packed_keys(folder: Path, clients: int) -> None:
    """Write the key pairs of clients 0 to n - 1 of one machine to two files, a line for each client.

    100,000 clients with a folder each take a minute and 300,000 files; all of these files belong to one user anyway.

    Args:
        folder: Folder of all keys.
        clients: Number of clients.

    Raises:
        ConfigError: As `write_pair`.
    """
    import zmq

    pairs = [zmq.curve_keypair() for _ in range(clients)]
    public, secret = (b"\n".join(pair[k] for pair in pairs).decode() for k in range(2))
    write_pair(folder / PACK, PACK, public, secret)


def read_client_keys(folder: Path, clients: int) -> list[str]:
    """Read the public keys of clients 0 to n - 1.

    Args:
        folder: Folder of all keys.
        clients: Number of clients.

    Raises:
        ConfigError: If one is missing or is no key.
    """
    path = public_path(folder, PACK)
    if not path.exists():
        return [read_public(folder, client_key(client)) for client in range(clients)]
    found = read_text(path, clients * LINE).splitlines()
    if len(found) != clients:
        raise ConfigError(f"{path} holds {len(found)} keys, must be {clients}")
    return found if _are_z85(found) else [_z85(path, text) for text in found]


def make_operator_keys(folder: Path) -> None:
    """Write the operator's signing key and the key pairs of coordinator and observer.

    Args:
        folder: Folder of all keys.

    Raises:
        ConfigError: As `write_pair`.
    """
    write_operator_key(folder / OPERATOR, OPERATOR)
    for name in (COORDINATOR, OBSERVER):
        write_keypair(folder, name)


def make_aggregator_keys(folder: Path, numbers: Iterable[int]) -> None:
    """Write the key pairs of some aggregators.

    Args:
        folder: Folder of all keys.
        numbers: Their numbers in the job.

    Raises:
        ConfigError: As `write_pair`.
    """
    for number in numbers:
        write_keypair(folder, aggregator_key(number))


def make_client_keys(folder: Path, clients: Iterable[int]) -> None:
    """Write the key pairs of some clients.

    Args:
        folder: Folder of all keys.
        clients: Client ids.

    Raises:
        ConfigError: As `write_pair`.
    """
    for client in clients:
        write_keypair(folder, client_key(client))


def write_keypair(folder: str | Path, name: str) -> str:
    """Write a new CURVE pair (z85 text) as name/name.public and name/name.secret.

    Args:
        folder: Folder of all keys.
        name: Name of the process.

    Returns:
        The public key.

    Raises:
        ConfigError: As `write_pair`.
    """
    import zmq

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    public, secret = zmq.curve_keypair()
    write_pair(folder / name, name, public.decode(), secret.decode())
    return public.decode()


def read_public(folder: str | Path, name: str) -> str:
    """Read a public CURVE key, z85.

    Args:
        folder: Folder of all keys.
        name: Name of the process.

    Raises:
        ConfigError: If the file is missing or holds no key.
    """
    if (line := _packed(folder, name)) is not None:
        path = public_path(folder, PACK)
        with opened(path) as file:
            file.seek(line * LINE)
            return _z85(path, file.read(LINE).decode(errors="replace").strip())
    path = public_path(folder, name)
    return _z85(path, read_key_file(path))


def read_secret(folder: str | Path, name: str) -> str:
    """Read a secret CURVE key, z85.

    Args:
        folder: Folder of all keys.
        name: Name of the process.

    Raises:
        ConfigError: If the file is missing or holds no key.
        Refused: "key-permissions" if anyone but its owner can read the file.
    """
    if (line := _packed(folder, name)) is not None:
        path = secret_path(folder, PACK)
        return _z85(path, read_secret_file(path, line * LINE, LINE))
    path = secret_path(folder, name)
    return _z85(path, read_secret_file(path))


def read_pair(folder: str | Path, name: str, signed: str) -> tuple[str, str]:
    """Read a process's own CURVE pair.

    Args:
        folder: Folder of all keys.
        name: Name of the process.
        signed: Its public key in the signed job.

    Returns:
        (public, secret), both z85.

    Raises:
        ConfigError: If a file is missing, holds no key, or does not belong to this pair.
        Refused: "key-permissions" as `read_secret`.
    """
    import zmq

    public, secret = read_public(folder, name), read_secret(folder, name)
    if public != signed:
        raise ConfigError(f"{public_path(folder, name)} is not the key that the signed job names")
    if zmq.curve_public(secret.encode()).decode() != public:
        raise ConfigError(f"{secret_path(folder, name)} does not belong to {public_path(folder, name).name}")
    return public, secret


def public_path(folder: str | Path, name: str) -> Path:
    """Return the path of a public key below the folder of all keys."""
    return Path(folder) / name / f"{name}.public"


def secret_path(folder: str | Path, name: str) -> Path:
    """Return the path of a secret key below the folder of all keys."""
    return Path(folder) / name / f"{name}.secret"


def _packed(folder: str | Path, name: str) -> int | None:
    """Return the line of a client in the packed files, or None if its keys are in a separate folder."""
    found = _CLIENT.fullmatch(name)
    if found is None or public_path(folder, name).exists() or not public_path(folder, PACK).exists():
        return None
    return int(found[1])


def _are_z85(keys: list[str]) -> bool:
    """Return True if all are CURVE keys: a check of each in Python takes 10 microseconds."""
    import numpy as np
    from zmq.utils import z85

    text = "".join(keys)
    if any(len(key) != CURVE_LENGTH for key in keys) or not text.isascii():
        return False
    digit = np.full(128, 85, np.uint64)
    digit[list(z85.Z85CHARS)] = np.arange(85)
    digits = digit[np.frombuffer(text.encode(), np.uint8)].reshape(-1, 5)
    words = digits @ np.array([85**k for k in (4, 3, 2, 1, 0)], np.uint64)
    return bool((digits < 85).all() and (words < 2**32).all())


def is_curve_key(text: object) -> bool:
    """Return True if a value is a CURVE key: 40 characters of z85 for 32 bytes."""
    from zmq.utils import z85

    try:
        return isinstance(text, str) and len(text) == CURVE_LENGTH and len(z85.decode(text.encode())) == 32
    except (ValueError, KeyError, struct.error):
        return False


def _z85(path: Path, text: str) -> str:
    if not is_curve_key(text):
        raise ConfigError(f"{path} does not hold a CURVE key")
    return text
