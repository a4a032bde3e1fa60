"""The `network` section: links by default, group and client, and its errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from dpcfl_net.core import yaml_file
from dpcfl_net.core.config_messages import sentences
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.experiment.network_settings import NetworkSettings, compute_factors, links_of
from dpcfl_net.transport.links.link import Link
from dpcfl_net.transport.links.presets import preset
from dpcfl_net.transport.links.schedule import Schedule, Step

GROUPS = [2, 2, 2, 2]


def section(folder: Path, text: str) -> NetworkSettings:
    path = folder / "network.yaml"
    path.write_text(text)
    return NetworkSettings.model_validate(yaml_file.load(path), strict=True)


def links(**given: Any) -> list[Link]:
    return [schedule.link for schedule in links_of(NetworkSettings.model_validate(given), GROUPS)]


def test_the_default_is_no_emulation() -> None:
    settings = NetworkSettings()
    assert (settings.how, settings.clock) == ("off", "real")
    assert links_of(settings, GROUPS) == [Schedule()] * 8


def test_a_client_s_fields_are_over_its_group_s_and_the_default_s(tmp_path: Path) -> None:
    settings = section(
        tmp_path,
        """
        how: relay
        default: 4g
        groups: [lte, null, {preset: 3g, loss: 0.01}]
        clients:
          3: {latency_ms: 200, jitter_ms: 20, up_mbps: 0.5}
          5: {on_s: 60, off_s: 30, resets_per_hour: 2}
          7: satellite
        """,
    )
    lossy = Link(latency_s=0.15, up_bps=768e3, down_bps=1.6e6, loss=0.01)
    assert [schedule.link for schedule in links_of(settings, GROUPS)] == [
        preset("lte"),
        preset("lte"),
        preset("4g"),
        Link(latency_s=0.2, jitter_s=0.02, up_bps=0.5e6, down_bps=9e6),
        lossy,
        Link(**{**vars(lossy), "on_s": 60.0, "off_s": 30.0, "resets_per_hour": 2.0}),
        preset("4g"),
        preset("satellite"),
    ]
    assert NetworkSettings.model_validate_json(settings.model_dump_json()) == settings


def test_groups_may_be_given_by_number() -> None:
    assert links(groups={2: "3g"}) == [Link()] * 4 + [preset("3g")] * 2 + [Link()] * 2


def test_a_trace_is_over_the_links(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("client,from_s,to_s,up_bps,down_bps,latency_s\n6,0,10,0,1e6,\n")
    found = links_of(NetworkSettings(default="3g", trace=str(trace)), GROUPS)  # type: ignore[arg-type]
    assert found[6] == Schedule(preset("3g"), (Step(0, 10, 0, 1e6, None),))
    assert found[5] == Schedule(preset("3g"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"default": "5g"}, "network.default.preset is '5g': must be one of datacenter, fiber, cable, lte, 4g, 3g, satellite"),
        ({"groups": ["3g"] * 5}, "network.groups.4: must be 0 to 3, as data.clients has 4 groups"),
        ({"clients": {8: "3g"}}, "network.clients.8: must be 0 to 7, as data.clients has 8 clients"),
        ({"clients": {1: {"jitter_ms": 5}}}, "network.clients.1.jitter_ms is 5: must be 0 to latency_ms, which is 0"),
        ({"groups": {0: {"off_s": 5}}}, "network.groups.0.off_s is 5: needs on_s"),
        ({"trace": "/nowhere.csv"}, "network.trace: cannot read /nowhere.csv: no such file"),
        (
            {"how": "netem", "clients": {2: {"on_s": 5, "off_s": 5}}},
            "network.how is 'netem': it cannot make the link of client 2, since it has off times; must be 'relay'",
        ),
    ],
)
def test_problems_name_the_field(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        links(**given)
    (problem,) = error.value.problems
    assert problem.startswith(said)


def test_all_problems_are_listed() -> None:
    with pytest.raises(ConfigError) as error:
        links(default="5g", groups=["4g", "wifi"], clients={99: "3g"}, trace="/nowhere.csv")
    assert len(error.value.problems) == 4


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"how": "tc"}, "network.how is 'tc': must be 'off', 'relay' or 'netem'"),
        ({"default": {"latency_ms": -1}}, "network.default.latency_ms is -1: must be greater than or equal to 0"),
        ({"default": {"loss": 0.9}}, "network.default.loss is 0.9: must be less than or equal to 0.5"),
        ({"default": {"up": 3}}, "unknown key 'network.default.up'"),
        ({"default": 3}, "network.default is 3: must be a section of keys and values"),
        ({"clients": {"x": "3g"}}, "network.clients.x.[key] is 'x': must match"),
        ({"groups": {"0": {"up_mbps": "fast"}}}, "network.groups.0.up_mbps is 'fast': must be a valid number"),
    ],
)
def test_wrong_values_are_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as error:
        NetworkSettings.model_validate(given)
    (problem,) = sentences(error.value, lambda _: "", "network")
    assert problem.startswith(said)


def test_the_factor_of_a_client_s_device_is_resolved_like_its_link() -> None:
    given = {
        "default": {"compute_factor": 2.0}, "groups": {"1": {"compute_factor": 3.0}, "2": "4g", "3": {"latency_ms": 5.0}},
        "clients": {"2": {"compute_factor": 4.0}, "3": {"latency_ms": 1.0}, "4": {"preset": "3g", "compute_factor": 5.0}},
    }  # fmt: skip
    settings = NetworkSettings.model_validate(given)
    assert compute_factors(settings, GROUPS) == {0: 2.0, 1: 2.0, 2: 4.0, 3: 3.0, 4: 5.0, 6: 2.0, 7: 2.0}
    assert compute_factors(NetworkSettings(), GROUPS) == {}
