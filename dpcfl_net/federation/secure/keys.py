"""Keys, signatures and boxes of secure aggregation: X25519, Ed25519, HKDF-SHA256 and AES-256-GCM."""

from __future__ import annotations

from functools import lru_cache

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from dpcfl_net.federation.secure.shamir import SHARE_BYTES

KEY_BYTES = 32
SIGNATURE_BYTES = 64
KEYS_BYTES = 2 * KEY_BYTES + SIGNATURE_BYTES  # public key for boxes, public key for masks, signature of both
BOX_BYTES = 2 * SHARE_BYTES + 16  # a share of each secret, and the tag
_NONCE = bytes(12)  # the key of a box seals one box only


def message(label: str, *parts: bytes | str | int) -> bytes:
    """Encode a label and parts so that no two sequences share an encoding."""
    return b"".join(map(_encode, (f"dpcfl secure aggregation: {label}", *parts)))


def _encode(part: bytes | str | int) -> bytes:
    if isinstance(part, bytes):
        body = b"b" + part
    else:
        body = b"s" + part.encode() if isinstance(part, str) else b"i" + str(int(part)).encode()
    return len(body).to_bytes(8, "big") + body


def sign(secret: bytes, signed: bytes) -> bytes:
    """Sign a message with an identity's secret key, 32 bytes."""
    return Ed25519PrivateKey.from_private_bytes(secret).sign(signed)


@lru_cache(maxsize=8192)  # clients of one process check the same signatures
def verify(public: str, signed: bytes, signature: bytes) -> bool:
    """Return True if a signature is valid for an identity, 64 hex digits; False for malformed input."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(signature, signed)
    except (InvalidSignature, ValueError):
        return False
    return True


def public_of(secret: bytes) -> bytes:
    """Compute the public key of an X25519 secret key."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


class Agreement:
    """Keys that one secret key shares with others.

    Args:
        secret: Own X25519 secret key, 32 bytes.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = X25519PrivateKey.from_private_bytes(secret)

    def key(self, public: bytes, info: bytes) -> bytes:
        """Derive a key of 32 bytes for one purpose.

        Args:
            public: The other's X25519 public key.
            info: The purpose, as `message` makes it.
        """
        try:
            shared = self._secret.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:
            # A point of small order: its owner gives the key away, which any peer can do. It must not silence this client.
            shared = bytes(KEY_BYTES)
        return HKDF(SHA256(), KEY_BYTES, None, info).derive(shared)


def seal(key: bytes, plain: bytes) -> bytes:
    """Encrypt and authenticate under a key that is used for nothing else."""
    return AESGCM(key).encrypt(_NONCE, plain, None)


def unseal(key: bytes, box: bytes) -> bytes | None:
    """Decrypt a box; None if it was not sealed under this key."""
    try:
        return AESGCM(key).decrypt(_NONCE, box, None)
    except InvalidTag:
        return None
