"""Secrets from the shares of clients, some of which may be wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dpcfl_net.federation.secure.keys import public_of
from dpcfl_net.federation.secure.shamir import combine, is_share

Shares = Sequence[tuple[int, bytes]]  # points and shares


def recover_seed(threshold: int, shares: Shares) -> bytes | None:
    """Compute the seed of a self mask from exactly `threshold` shares.

    A wrong share gives a wrong seed: no check of a seed is public.

    Args:
        threshold: Shares that determine the seed.
        shares: Points and shares; invalid ones are left out.

    Returns:
        32 bytes; None if there are too few valid shares.
    """
    return next((secret for secret in _candidates(threshold, shares) if secret is not None), None)


def recover_mask_key(threshold: int, shares: Shares, public: bytes) -> bytes | None:
    """Compute a secret mask key and check it against its public key.

    Args:
        threshold: Shares that determine the key.
        shares: Points and shares; invalid ones are left out.
        public: The public key.

    Returns:
        32 bytes; None if there are too few valid shares or more than one is wrong.
    """
    return next(
        (secret for secret in _candidates(threshold, shares) if secret is not None and public_of(secret) == public), None
    )


def _candidates(threshold: int, shares: Shares) -> Iterator[bytes | None]:
    """The secret of the first shares, then with each of them in turn replaced by the next one: this finds one wrong share."""
    valid = [(point, data) for point, data in shares if is_share(data)]
    if len(valid) < threshold:
        return
    first = valid[:threshold]
    yield _combined(first)
    if len(valid) > threshold:
        for at in range(threshold):
            yield _combined([*first[:at], valid[threshold], *first[at + 1 :]])


def _combined(shares: Shares) -> bytes | None:
    return combine(tuple(point for point, _ in shares), [data for _, data in shares])
