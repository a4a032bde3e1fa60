"""The address that workers on other hosts connect to, where it is not given."""

from __future__ import annotations

import socket

import pytest

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.launch.placement import routes, slurm
from dpcfl_net.launch.placement.ssh import HostsFile, own_address

# Address of this machine on the route to each host.
TOWARDS = {"localhost": "127.0.0.1", "vm": "127.0.0.1", "far": "10.0.0.5", "farther": "192.168.0.5"}

SSH = """#!/bin/sh
[ "$1" = -G ] || exit 1
for name; do :; done
[ "$name" != alias ] || name=far
[ "$2 $3 $name" != "-F own mine" ] || name=farther
echo user me
echo "hostname ${name#*@}"
"""


@pytest.fixture(autouse=True)
def network(monkeypatch, tmp_path):
    """Routes of a machine named `vm`, whose ssh knows `far` as `alias`."""
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(routes, "_towards", TOWARDS.__getitem__)


def address(*hosts: str) -> str:
    ways = [{"through": ["env"]} if host == "pod" else {"address": host} for host in hosts]
    entries = [{"name": f"h{k}", **way} for k, way in enumerate(ways)]
    return own_address(HostsFile.model_validate({"hosts": entries}))


def test_the_address_is_that_on_the_route_to_another_machine():
    """With this machine as the first host it was 127.0.0.1, to which the workers of the other hosts could not connect."""
    assert address("me@far", "farther") == "10.0.0.5"
    assert address("alias") == "10.0.0.5"
    assert address("localhost", "farther", "far") == "192.168.0.5"
    assert address("localhost", "me@vm") == "127.0.0.1"
    assert address("far", "pod") == "10.0.0.5"
    file = HostsFile.model_validate({"hosts": [{"name": "h", "address": "mine", "options": ["-F", "own"]}]})
    assert own_address(file) == "192.168.0.5"  # by the options of the host


@pytest.mark.parametrize("hosts", [["pod", "far"], ["localhost", "pod"]])
def test_where_it_cannot_be_told_it_must_be_given(hosts):
    with pytest.raises(ConfigError, match="give --address"):
        address(*hosts)


def test_a_host_without_a_route_is_named(monkeypatch):
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"no route to no\.such\.invalid \(.*\): give --address"):
        routes.own_address(["no.such.invalid"])
    with pytest.raises(ConfigError, match=r"no route to a\.\.b "):
        routes.own_address(["a..b"])
    assert routes.own_address(["127.0.0.1"]) == "127.0.0.1"


def test_a_node_of_slurm_whose_name_is_of_loopback_takes_the_address_on_a_route(monkeypatch):
    """As on Debian, where /etc/hosts maps the host name to 127.0.1.1: workers on other nodes connected to themselves."""

    def resolve(name: str) -> str:
        if name == "n3":
            raise socket.gaierror(-2, "Name or service not known")
        return {"n1": "10.0.0.1", "n2": "127.0.1.1"}[name]

    monkeypatch.setattr(socket, "gethostbyname", resolve)
    assert slurm.own_address(["far"], {"SLURMD_NODENAME": "n1"}) == "10.0.0.1"
    monkeypatch.setattr(socket, "gethostname", lambda: "n1")
    assert slurm.own_address(["far"], {}) == "10.0.0.1"
    assert slurm.own_address(["vm", "far"], {"SLURMD_NODENAME": "n2"}) == "10.0.0.5"
    assert slurm.own_address(["vm"], {"SLURMD_NODENAME": "n2"}) == "127.0.0.1"
    assert slurm.own_address(["far"], {"SLURMD_NODENAME": "n3"}) == "10.0.0.5"
