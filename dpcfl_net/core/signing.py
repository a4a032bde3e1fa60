"""Key files, and the operator's Ed25519 signature on both parts of a job."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.core.files import opened, read_bytes, read_text
from dpcfl_net.core.run_folder import signature_path

LONGEST_FILE = 4096  # bytes


def write_operator_key(folder: str | Path, name: str = "operator") -> str:
    """Write a new Ed25519 pair as `name.public` and `name.secret` (hex); returns the public key, 64 hex digits."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    secret = Ed25519PrivateKey.generate()
    public = secret.public_key().public_bytes_raw().hex()
    write_pair(folder, name, public, secret.private_bytes_raw().hex())
    return public


def sign(secret_path: str | Path, data: bytes) -> str:
    """The Ed25519 signature (RFC 8032) of `data`, 128 hex digits; Refused as `read_secret_file`."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    text = read_secret_file(Path(secret_path))
    try:
        key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(text))
    except ValueError:
        raise ConfigError(f"{secret_path} does not hold an operator's secret key") from None
    return key.sign(data).hex()


def verify(public_hex: str, data: bytes, signature_hex: str) -> bool:
    """True if the signature is the operator's on exactly these bytes; malformed input is no signature."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_hex)).verify(bytes.fromhex(signature_hex), data)
    except (InvalidSignature, ValueError):
        return False
    return True


def check_signature(path: Path, operator_key: str) -> None:
    """Refused "operator-signature" unless `path`.sig is the signature of the pinned operator on the bytes of `path`."""
    signature = signature_path(path)
    if not signature.exists() or not verify(
        operator_key, read_bytes(path), read_bytes(signature).decode(errors="replace").strip()
    ):
        raise Refused("operator-signature", f"{path.name} is not signed by the operator whose key is pinned here")


def write_pair(folder: str | Path, name: str, public: str, secret: str) -> None:
    """Write both files of a key pair, the secret one with mode 0600.

    Raises:
        ConfigError: If there is a pair of that name: a key in use is never overwritten.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    if (folder / f"{name}.public").exists():
        raise ConfigError(f"{folder / name}.public exists already and is not overwritten")
    _write_new(folder / f"{name}.secret", secret, 0o600)
    _write_new(folder / f"{name}.public", public, 0o644)


def write_secret(path: Path, text: str) -> None:
    """Write a file that its owner alone can read, in place of the one that is there."""
    path.unlink(missing_ok=True)
    _write_new(path, text, 0o600)


def read_key_file(path: Path) -> str:
    """The text of a public key file; ConfigError if it cannot be read."""
    return read_text(path, LONGEST_FILE).strip()


def read_operator_key(path: Path) -> str:
    """The operator's public key, 64 hex digits; ConfigError if it is missing or no key."""
    text = read_key_file(path)
    if re.fullmatch(r"[0-9a-f]{64}", text) is None:
        raise ConfigError(f"{path} does not hold an operator's public key, 64 hex digits")
    return text


def read_secret_file(path: Path) -> str:
    """The text of a secret key file; Refused "key-permissions" if anyone but its owner can read it."""
    with opened(path) as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            raise Refused("key-permissions", f"{path} is open to others (mode {mode:04o}); run: chmod 600 {path}")
        return file.read(LONGEST_FILE).decode(errors="replace").strip()


def _write_new(path: Path, text: str, mode: int) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    except FileExistsError:
        raise ConfigError(f"{path} exists already and is not overwritten") from None
    with os.fdopen(handle, "w") as file:
        file.write(text + "\n")
