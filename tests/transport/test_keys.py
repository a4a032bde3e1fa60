"""Packed keys of a large roster: the same pairs as with a folder for each client, and as private."""

from __future__ import annotations

import stat

import pytest

from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.transport import keys
from dpcfl_net.transport.keys import PACK, client_key


@pytest.fixture
def packed(tmp_path):
    keys.make_packed_keys(tmp_path, 20)
    return tmp_path


def test_each_client_finds_its_own_pair(packed):
    public = keys.read_client_keys(packed, 20)
    assert len(set(public)) == 20
    for client in (0, 7, 19):
        own, secret = keys.read_pair(packed, client_key(client), public[client])
        assert own == public[client]
        assert secret == keys.read_secret(packed, client_key(client))
    with pytest.raises(ConfigError, match="not the key that the signed job names"):
        keys.read_pair(packed, client_key(1), public[2])


def test_two_files_hold_all_keys_and_the_secret_one_is_private(packed):
    assert sorted(path.name for path in (packed / PACK).iterdir()) == ["clients.public", "clients.secret"]
    secret = keys.secret_path(packed, PACK)
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    secret.chmod(0o640)
    with pytest.raises(Refused, match="open to others"):
        keys.read_secret(packed, client_key(3))


def test_a_client_beyond_the_files_and_a_short_file_are_refused(packed):
    with pytest.raises(ConfigError, match="does not hold a CURVE key"):
        keys.read_public(packed, client_key(20))
    with pytest.raises(ConfigError, match="holds 20 keys, must be 21"):
        keys.read_client_keys(packed, 21)


@pytest.mark.parametrize(
    "bad",
    ['"' + "a" * 39, "~" + "a" * 39, "a" * 39 + "~", "é" + "a" * 39, "#####" + "a" * 35, "%nSc1" + "a" * 35, "a" * 39],
)
def test_a_line_that_is_no_key_is_refused(packed, bad):
    path = keys.public_path(packed, PACK)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:7], bad, *lines[8:]]))
    with pytest.raises(ConfigError, match="does not hold a CURVE key"):
        keys.read_client_keys(packed, 20)


def test_packed_keys_are_never_overwritten(packed):
    with pytest.raises(ConfigError, match="exists already"):
        keys.make_packed_keys(packed, 20)


def test_a_folder_of_the_client_comes_first(packed):
    public = keys.write_keypair(packed, client_key(4))
    assert keys.read_public(packed, client_key(4)) == public
    assert keys.read_public(packed, client_key(5)) == keys.read_client_keys(packed, 20)[5]
