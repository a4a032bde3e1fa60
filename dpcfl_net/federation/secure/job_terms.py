"""Terms of secure sums as a signed job lays them down."""

from __future__ import annotations

from dpcfl_net.core.protocol import PrivacyTarget, Protocol, digest, once
from dpcfl_net.federation.secure.terms import Terms, settings_of, survivors_needed


def terms_of(protocol: Protocol, group: tuple[int, ...]) -> Terms:
    """Return the terms of a group; equal groups share one object.

    Args:
        protocol: The signed protocol.
        group: Client ids in ascending order.
    """
    return Terms.of(digest(protocol), group, settings_of(protocol.privacy))


def identities_of(protocol: Protocol) -> dict[int, str]:
    """Map each client to the public key of its identity, hex.

    Args:
        protocol: The signed protocol.
    """
    return once(protocol, "identities", lambda: {entry.id: entry.identity for entry in protocol.roster if entry.identity})


def honest_shares(n: int, privacy: PrivacyTarget) -> int:
    """Count the shares of the noise in a sum that colluders do not know, T - C at least.

    Args:
        n: Number of participants.
        privacy: The job's privacy target.
    """
    settings = settings_of(privacy)
    return survivors_needed(n, settings) - settings.colluders
