"""Keys as files: CURVE pairs for the connections, the operator's Ed25519 pair for signatures."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from dpcfl_net.errors import ConfigError, Refused
from dpcfl_net.files import opened, read_text

CURVE_LENGTH = 40  # characters of z85 for 32 bytes
LONGEST_FILE = 4096  # bytes


def write_keypair(folder: str | Path, name: str) -> str:
    """A new CURVE pair as `name.public` and `name.secret` (z85 text); returns the public key.

    ConfigError if there is one of that name already: a key in use is never overwritten.
    """
    import zmq

    public, secret = zmq.curve_keypair()
    _write_pair(folder, name, public.decode(), secret.decode())
    return public.decode()


def read_public(folder: str | Path, name: str) -> str:
    """The public CURVE key, z85; ConfigError if it is missing or no key."""
    return _z85(Path(folder) / f"{name}.public", _read(Path(folder) / f"{name}.public"))


def read_secret(folder: str | Path, name: str) -> str:
    """The secret CURVE key, z85; Refused "key-permissions" if anyone but its owner can read it."""
    path = Path(folder) / f"{name}.secret"
    return _z85(path, _read_secret(path))


def write_operator_key(folder: str | Path, name: str = "operator") -> str:
    """A new Ed25519 pair as `name.public` and `name.secret` (hex); returns the public key, 64 hex digits."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    secret = Ed25519PrivateKey.generate()
    public = secret.public_key().public_bytes_raw().hex()
    _write_pair(folder, name, public, secret.private_bytes_raw().hex())
    return public


def read_operator_key(path: str | Path) -> str:
    """The operator's public key, 64 hex digits; ConfigError if it is missing or no key."""
    text = _read(Path(path))
    if re.fullmatch(r"[0-9a-f]{64}", text) is None:
        raise ConfigError(f"{path} does not hold an operator's public key, 64 hex digits")
    return text


def sign(secret_path: str | Path, data: bytes) -> str:
    """The Ed25519 signature (RFC 8032) of `data`, 128 hex digits; Refused "key-permissions" as for `read_secret`."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    text = _read_secret(Path(secret_path))
    try:
        key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(text))
    except ValueError:
        raise ConfigError(f"{secret_path} does not hold an operator's secret key") from None
    return key.sign(data).hex()


def verify(public_hex: str, data: bytes, signature_hex: str) -> bool:
    """Whether the signature is the operator's on exactly these bytes; malformed input is simply not a signature."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_hex)).verify(bytes.fromhex(signature_hex), data)
    except (InvalidSignature, ValueError):
        return False
    return True


def _write_pair(folder: str | Path, name: str, public: str, secret: str) -> None:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    if (folder / f"{name}.public").exists():
        raise ConfigError(f"{folder / name}.public exists already and is not overwritten")
    _write_new(folder / f"{name}.secret", secret, 0o600)
    _write_new(folder / f"{name}.public", public, 0o644)


def _write_new(path: Path, text: str, mode: int) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    except FileExistsError:
        raise ConfigError(f"{path} exists already and is not overwritten") from None
    with os.fdopen(handle, "w") as file:
        file.write(text + "\n")


def _read(path: Path) -> str:
    return read_text(path, LONGEST_FILE).strip()


def _read_secret(path: Path) -> str:
    with opened(path) as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            raise Refused("key-permissions", f"{path} is open to others (mode {mode:04o}); run: chmod 600 {path}")
        return file.read(LONGEST_FILE).decode(errors="replace").strip()


def _z85(path: Path, text: str) -> str:
    from zmq.utils import z85

    try:
        good = len(text) == CURVE_LENGTH and len(z85.decode(text.encode())) == 32
    except (ValueError, KeyError):
        good = False
    if not good:
        raise ConfigError(f"{path} does not hold a CURVE key")
    return text
