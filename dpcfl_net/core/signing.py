"""Key files and the operator's Ed25519 signature on both parts of a job."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from pathlib import Path

from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.core.files import opened, read_bytes, read_text
from dpcfl_net.core.run_folder import signature_path

LONGEST_FILE = 4096  # bytes


def signing_pair() -> tuple[str, str]:
    """Generate an Ed25519 key pair.

    Returns:
        (public, secret), 64 hex digits each.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    secret = Ed25519PrivateKey.generate()
    return secret.public_key().public_bytes_raw().hex(), secret.private_bytes_raw().hex()


def signing_public(secret: bytes) -> str:
    """Return the public key of an Ed25519 secret of 32 bytes, 64 hex digits."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw().hex()


def write_operator_key(folder: str | Path, name: str = "operator") -> str:
    """Write a new Ed25519 key pair.

    Args:
        folder: Folder for `name.public` and `name.secret` (hex).
        name: Owner of the pair.

    Returns:
        The public key, 64 hex digits.

    Raises:
        ConfigError: As `write_pair`.
    """
    public, secret = signing_pair()
    write_pair(folder, name, public, secret)
    return public


def sign(secret_path: str | Path, data: bytes) -> str:
    """Sign bytes with Ed25519.

    Args:
        secret_path: File of the operator's secret key.
        data: Bytes to sign.

    Returns:
        The signature, 128 hex digits.

    Raises:
        ConfigError: If the file holds no secret key.
        Refused: As `read_secret_file`.

    Source: RFC 8032.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    text = read_secret_file(Path(secret_path))
    try:
        key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(text))
    except ValueError:
        raise ConfigError(f"{secret_path} does not hold an operator's secret key") from None
    return key.sign(data).hex()


def verify(public_hex: str, data: bytes, signature_hex: str) -> bool:
    """Return True if an Ed25519 signature is valid for these bytes; False for malformed input."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_hex)).verify(bytes.fromhex(signature_hex), data)
    except (InvalidSignature, ValueError):
        return False
    return True


def check_signature(path: Path, operator_key: str, digest: str) -> None:
    """Check the operator's signature on a file that was read before; the signature is in `path`.sig.

    Args:
        path: The file.
        operator_key: Public key of the operator.
        digest: sha256 of the content that was read, hex. Another file may be there now.

    Raises:
        Refused: "operator-signature" if the signature is missing, not valid, or not of this content.
    """
    signature, data = signature_path(path), read_bytes(path)
    signed = signature.exists() and verify(operator_key, data, read_bytes(signature).decode(errors="replace").strip())
    if not signed or hashlib.sha256(data).hexdigest() != digest:
        raise Refused("operator-signature", f"{path.name} is not signed by the operator whose key is pinned here")


def write_pair(folder: str | Path, name: str, public: str, secret: str) -> None:
    """Write both files of a key pair, the secret one with mode 0600.

    Raises:
        ConfigError: If the pair exists; a key in use is never overwritten.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    if (folder / f"{name}.public").exists():
        raise ConfigError(f"{folder / name}.public exists already and is not overwritten")
    _write_new(folder / f"{name}.secret", secret, 0o600)
    _write_new(folder / f"{name}.public", public, 0o644)


def write_secret(path: Path, text: str) -> None:
    """Write a file with mode 0600; an existing file is removed first."""
    path.unlink(missing_ok=True)
    _write_new(path, text, 0o600)


def read_key_file(path: Path) -> str:
    """Read a public key file; ConfigError if it cannot be read."""
    return read_text(path, LONGEST_FILE).strip()


def read_operator_key(path: Path) -> str:
    """Read the operator's public key, 64 hex digits; ConfigError if it is missing or malformed."""
    text = read_key_file(path)
    if not is_operator_key(text):
        raise ConfigError(f"{path} does not hold an operator's public key, 64 hex digits")
    return text


def is_operator_key(text: str) -> bool:
    """Return True if a text has the form of an operator's public key, 64 hex digits."""
    return re.fullmatch(r"[0-9a-f]{64}", text) is not None


def read_secret_file(path: Path, offset: int = 0, length: int = LONGEST_FILE) -> str:
    """Read a secret key file, or one line of it.

    Args:
        path: The file.
        offset: First byte.
        length: Most bytes.

    Raises:
        Refused: "key-permissions" if group or others can access it.
        ConfigError: If it cannot be read.
    """
    with opened(path) as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            raise Refused("key-permissions", f"{path} is open to others (mode {mode:04o}); run: chmod 600 {path}")
        file.seek(offset)
        return file.read(length).decode(errors="replace").strip()


def _write_new(path: Path, text: str, mode: int) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    except FileExistsError:
        raise ConfigError(f"{path} exists already and is not overwritten") from None
    with os.fdopen(handle, "w") as file:
        file.write(text + "\n")
