"""Ed25519 identities of the clients, which sign messages of secure sums; beside the CURVE keys."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import read_text
from dpcfl_net.core.protocol import LARGE_ROSTER
from dpcfl_net.core.signing import read_key_file, read_secret_file, signing_pair, signing_public, write_pair
from dpcfl_net.transport.keys import PACK, client_key

LENGTH = 64  # hex digits of 32 bytes
LINE = LENGTH + 1


def make_identities(folder: Path, clients: Iterable[int]) -> None:
    """Write the identities of some clients: client_0003/client_0003.identity.public and .secret.

    Args:
        folder: Folder of all keys.
        clients: Client ids.

    Raises:
        ConfigError: As `write_pair`.
    """
    for client in clients:
        name = client_key(client)
        write_pair(folder / name, _file(name), *signing_pair())


def make_packed_identities(folder: Path, clients: int) -> None:
    """Write the identities of clients 0 to n - 1 to two files, a line for each client.

    Args:
        folder: Folder of all keys.
        clients: Number of clients.

    Raises:
        ConfigError: As `write_pair`.
    """
    pairs = [signing_pair() for _ in range(clients)]
    public, secret = ("\n".join(pair[k] for pair in pairs) for k in range(2))
    write_pair(folder / PACK, _file(PACK), public, secret)


def make_all_identities(folder: Path, clients: int) -> None:
    """Write the identities of clients 0 to n - 1 of one machine, packed for a large roster; errors as `make_identities`."""
    if clients >= LARGE_ROSTER:
        make_packed_identities(folder, clients)
    else:
        make_identities(folder, range(clients))


def read_identities(folder: Path, clients: int) -> list[str]:
    """Read the public identities of clients 0 to n - 1.

    Args:
        folder: Folder of all keys.
        clients: Number of clients.

    Returns:
        64 hex digits each.

    Raises:
        ConfigError: If one is missing or is no key.
    """
    path = identity_path(folder, PACK)
    if not path.exists():
        return [read_public_identity(folder, client) for client in range(clients)]
    found = read_text(path, clients * LINE).splitlines()
    if len(found) != clients:
        raise ConfigError(f"{path} holds {len(found)} identities, must be {clients}")
    return [_checked(path, text) for text in found]


def read_public_identity(folder: Path, client: int) -> str:
    """Read the public identity of a client with separate files, 64 hex digits; ConfigError if it is missing or no key."""
    path = identity_path(folder, client_key(client))
    return _checked(path, read_key_file(path))


def read_identity(folder: Path, client: int, signed: str) -> bytes:
    """Read the secret identity of a client.

    Args:
        folder: Folder of all keys.
        client: Client id.
        signed: Its public identity in the signed job.

    Returns:
        The Ed25519 secret, 32 bytes.

    Raises:
        ConfigError: If the file is missing, holds no key, or does not belong to the signed identity.
        Refused: "key-permissions" if anyone but its owner can read the file.
    """
    path = identity_path(folder, client_key(client), "secret")
    packed = identity_path(folder, PACK, "secret")
    if not path.exists() and packed.exists():
        path = packed
        text = read_secret_file(path, client * LINE, LINE)
    else:
        text = read_secret_file(path)
    secret = bytes.fromhex(_checked(path, text))
    if signing_public(secret) != signed:
        raise ConfigError(f"{path} does not hold the identity of client {client} that the signed job names")
    return secret


def identity_path(folder: Path, owner: str, part: str = "public") -> Path:
    """Return the path of an identity below the folder of all keys.

    Args:
        folder: Folder of all keys.
        owner: Name of the client's key files, or PACK.
        part: "public" or "secret".
    """
    return folder / owner / f"{_file(owner)}.{part}"


def _file(owner: str) -> str:
    return f"{owner}.identity"


def _checked(path: Path, text: str) -> str:
    if re.fullmatch(r"[0-9a-f]{64}", text) is None:
        raise ConfigError(f"{path} does not hold an identity, {LENGTH} hex digits")
    return text
