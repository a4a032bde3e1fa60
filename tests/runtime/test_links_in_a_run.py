"""Whole runs over emulated links: equal bits, measured bytes and time, a relay that dies, and what is refused."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from conftest import assert_nothing_left, at_a_terminal, command_line, dpcfl, only_run, processes_of, write_config
from run_results import last_models

from dpcfl_net.core import runlog
from dpcfl_net.transport.links.netem import problems

LATENCY_MS = 60


def server_lines(folder: Path) -> list[dict]:
    return [line for line in runlog.read(folder / "metrics.jsonl") if "seconds" in line]


@pytest.mark.slow
def test_a_run_over_relayed_links_gives_the_same_bits_and_takes_the_time_of_its_slowest_link(finished_run, tmp_path):
    network = {"how": "relay", "clients": {"3": {"latency_ms": LATENCY_MS, "up_mbps": 20}, "5": "fiber"}}
    done = dpcfl("run", write_config(tmp_path / "c", network=network), "--out", tmp_path / "runs")
    assert done.returncode == 0, done.stderr + done.stdout
    folder = only_run(tmp_path / "runs")
    assert_nothing_left(folder)
    assert last_models(folder) == last_models(finished_run)
    assert all(line["seconds"] >= 2 * LATENCY_MS / 1000 for line in server_lines(folder)[1:])
    totals = {line["client"]: line for line in runlog.read(folder / "links.jsonl")}
    assert sorted(totals) == [*range(8)]
    counted = sum(line["bytes_up"] for line in server_lines(folder))
    # The relay also sees handshakes, heartbeats and the overhead of CURVE.
    assert counted < sum(line["bytes_up"] for line in totals.values()) < 1.5 * counted
    assert dpcfl("verify", folder).returncode == 0


@pytest.mark.slow
def test_a_relay_that_dies_starts_again_on_its_ports(finished_run, tmp_path):
    settings = write_config(tmp_path / "c", network={"how": "relay", "default": {"latency_ms": 30}})
    run = at_a_terminal("run", settings, "--out", tmp_path / "runs")
    while run.poll() is None and not any(server_lines(folder) for folder in (tmp_path / "runs").glob("*")):
        time.sleep(0.01)
    (folder,) = (tmp_path / "runs").iterdir()
    (relay,) = [process for process in processes_of(folder) if "dpcfl relay" in command_line(process)]
    relay.kill()
    output, _ = run.communicate(timeout=90)
    assert run.returncode == 0, output
    assert last_models(folder) == last_models(finished_run)
    assert any("relay ended with code -9" in line["text"] for line in runlog.read(folder / "warnings.jsonl"))
    assert_nothing_left(folder)


def test_netem_runs_where_the_machine_allows_it_and_is_refused_before_anything_is_written_elsewhere(finished_run, tmp_path):
    settings = write_config(tmp_path / "c", network={"how": "netem", "default": {"latency_ms": 5}})
    done = dpcfl("run", settings, "--out", tmp_path / "runs")
    if lacking := problems():
        assert done.returncode == 2
        assert lacking[0].split(":")[0] in done.stderr
        assert [*(tmp_path / "runs").glob("*")] == []
    else:
        assert done.returncode == 0, done.stderr
        assert last_models(only_run(tmp_path / "runs")) == last_models(finished_run)


@pytest.mark.parametrize(
    ("network", "runtime", "message"),
    [
        ({"default": "cable"}, {}, "network.how is missing"),
        ({"clock": "virtual"}, {}, "runtime.federation must be 'in-process'"),
        ({"how": "netem"}, {"clients_per_worker": 4}, "runtime.clients_per_worker must be 1"),
        ({"how": "netem"}, {"transport": {"security": "none"}}, "runtime.transport.security must be 'curve'"),
        ({"how": "relay", "clients": {"8": "cable"}}, {}, "must be 0 to 7"),
        ({"how": "relay", "clients": {"2": {"latency_ms": 1500}}}, {}, "client 2 is 1500 ms: must be at most 1000"),
        ({"how": "relay", "default": "cabel"}, {}, "did you mean 'cable'?"),
    ],
)
def test_what_cannot_be_is_refused_with_the_field_and_what_is_allowed(tmp_path, network, runtime, message):
    done = dpcfl("run", write_config(tmp_path / "c", network=network, runtime=runtime), "--out", tmp_path / "runs")
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "runs").exists()


def test_the_section_is_no_part_of_the_signed_job_and_absent_from_a_configuration_without_links(finished_run):
    assert "\nnetwork:" not in (finished_run / "config.yaml").read_text()
    assert '"network"' not in (finished_run / "experiment.json").read_text()
