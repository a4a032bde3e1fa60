"""Terms of secure sums as a signed job lays them down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dpcfl_net.core.frozen import digest
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.signed_settings import PrivacyTarget
from dpcfl_net.federation.secure.terms import Terms, settings_of, survivors_needed


def terms_of(protocol: Protocol, group: tuple[int, ...]) -> Terms:
    """Return the terms of a group; equal groups share one object.

    Args:
        protocol: The signed protocol.
        group: Client ids in ascending order.
    """
    return Terms.of(digest(protocol), group, settings_of(protocol.privacy))


class Identities(Mapping[int, str]):
    """Maps each client to the public key of its identity, hex; reads the roster's entries of the clients that are asked for.

    Args:
        protocol: The signed protocol, of a job with secure sums.
    """

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol

    def __getitem__(self, client: int) -> str:
        """Return the key of a client; KeyError if it has none."""
        identity = self._protocol.client(client).identity
        if identity is None:
            raise KeyError(client)
        return identity

    def __iter__(self) -> Iterator[int]:
        return iter(self._protocol.clients)

    def __len__(self) -> int:
        return len(self._protocol.clients)


def honest_shares(n: int, privacy: PrivacyTarget) -> int:
    """Count the shares of the noise in a sum that colluders do not know, T - C at least.

    Args:
        n: Number of participants.
        privacy: The job's privacy target.
    """
    settings = settings_of(privacy)
    return survivors_needed(n, settings) - settings.colluders
