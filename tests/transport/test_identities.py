"""Signing identities of clients: files, packed files, and the check against the signed job."""

from __future__ import annotations

import stat

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.core.signing import verify
from dpcfl_net.transport import identities
from dpcfl_net.transport.identities import identity_path, read_identities, read_identity
from dpcfl_net.transport.keys import PACK, client_key, make_client_keys


@pytest.fixture(params=["separate", "packed"])
def folder(request, tmp_path):
    make_client_keys(tmp_path, range(3))
    if request.param == "packed":
        identities.make_packed_identities(tmp_path, 12)
    else:
        identities.make_identities(tmp_path, range(12))
    return tmp_path


def test_each_client_reads_its_secret_and_everyone_the_public_part(folder):
    public = read_identities(folder, 12)
    assert len(set(public)) == 12
    for client in (0, 2, 11):
        secret = read_identity(folder, client, public[client])
        signature = Ed25519PrivateKey.from_private_bytes(secret).sign(b"round 1").hex()
        assert verify(public[client], b"round 1", signature)
        assert not verify(public[client - 1], b"round 1", signature)
    with pytest.raises(ConfigError, match="not hold the identity of client 1 that the signed job names"):
        read_identity(folder, 1, public[2])


def test_secret_identities_are_private(folder):
    owner = PACK if identity_path(folder, PACK).exists() else client_key(4)
    path = identity_path(folder, owner, "secret")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.chmod(0o604)
    with pytest.raises(Refused, match="open to others"):
        read_identity(folder, 4, read_identities(folder, 12)[4])


def test_missing_and_damaged_identities_are_named(folder):
    public = read_identities(folder, 12)
    with pytest.raises(ConfigError, match=r"holds 12 identities, must be 13|client_0012\.identity\.public"):
        read_identities(folder, 13)
    with pytest.raises(ConfigError, match=r"does not hold an identity|client_0012\.identity\.secret"):
        read_identity(folder, 12, public[0])
    owner = PACK if identity_path(folder, PACK).exists() else client_key(4)
    path = identity_path(folder, owner)
    path.write_text(path.read_text().upper())
    with pytest.raises(ConfigError, match="does not hold an identity, 64 hex digits"):
        read_identities(folder, 12)


def test_identities_are_never_overwritten(folder):
    again = identities.make_identities if not identity_path(folder, PACK).exists() else identities.make_packed_identities
    with pytest.raises(ConfigError, match="exists already"):
        again(folder, [4] if again is identities.make_identities else 12)


def test_a_large_roster_is_packed(tmp_path, monkeypatch):
    monkeypatch.setattr(identities, "LARGE_ROSTER", 5)
    identities.make_all_identities(tmp_path / "small", 4)
    identities.make_all_identities(tmp_path / "large", 5)
    assert not identity_path(tmp_path / "small", PACK).exists()
    assert sorted(path.name for path in (tmp_path / "large" / PACK).iterdir()) == [
        "clients.identity.public",
        "clients.identity.secret",
    ]
