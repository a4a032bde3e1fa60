"""CURVE key pairs of the connections: a folder for each process, so that none needs a place where others' secrets lie."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.signing import read_key_file, read_secret_file, write_operator_key, write_pair

OPERATOR, COORDINATOR, OBSERVER = "operator", "coordinator", "observer"
NOISE_SEED = "noise.seed"  # beside the coordinator's keys, where it is trusted to add seeded noise
CURVE_LENGTH = 40  # characters of z85 for 32 bytes
LONGEST_FILE = 4096  # bytes


def client_key(client: int) -> str:
    """The name of a client's key files."""
    return f"client_{client:04d}"


def make_keys(folder: Path, clients: int) -> None:
    """Key pairs for everybody of one run on one machine: operator, coordinator, observer and the clients."""
    make_operator_keys(folder)
    make_client_keys(folder, range(clients))


def make_operator_keys(folder: Path) -> None:
    """The operator's signing key, and the key pairs of coordinator and observer."""
    write_operator_key(folder / OPERATOR, OPERATOR)
    for name in (COORDINATOR, OBSERVER):
        write_keypair(folder, name)


def make_client_keys(folder: Path, clients: Iterable[int]) -> None:
    """The key pairs of some clients, where these will run."""
    for client in clients:
        write_keypair(folder, client_key(client))


def write_keypair(folder: str | Path, name: str) -> str:
    """Write a new CURVE pair (z85 text) as name/name.public and name/name.secret in `folder`; returns the public key.

    ConfigError as `write_pair`.
    """
    import zmq

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    public, secret = zmq.curve_keypair()
    write_pair(folder / name, name, public.decode(), secret.decode())
    return public.decode()


def read_public(folder: str | Path, name: str) -> str:
    """The public CURVE key, z85; ConfigError if it is missing or no key."""
    path = public_path(folder, name)
    return _z85(path, read_key_file(path))


def read_secret(folder: str | Path, name: str) -> str:
    """The secret CURVE key, z85; Refused "key-permissions" if anyone but its owner can read it."""
    path = secret_path(folder, name)
    return _z85(path, read_secret_file(path))


def read_pair(folder: str | Path, name: str, signed: str) -> tuple[str, str]:
    """Read a process's own CURVE pair: (public, secret), both z85.

    Args:
        folder: Folder of all keys.
        name: Name of the process.
        signed: Its public key in the signed job.

    Raises:
        ConfigError: If a file is missing, holds no key, or is not of this pair: nobody could connect.
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
    """The file of a public key below the folder of all keys."""
    return Path(folder) / name / f"{name}.public"


def secret_path(folder: str | Path, name: str) -> Path:
    """The file of a secret key below the folder of all keys."""
    return Path(folder) / name / f"{name}.secret"


def _z85(path: Path, text: str) -> str:
    from zmq.utils import z85

    try:
        good = len(text) == CURVE_LENGTH and len(z85.decode(text.encode())) == 32
    except (ValueError, KeyError):
        good = False
    if not good:
        raise ConfigError(f"{path} does not hold a CURVE key")
    return text
