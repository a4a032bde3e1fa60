"""The generated pages of the reference are those of the present code."""

from __future__ import annotations

import difflib

import pytest
from pages import ROOT
from reference_pages.all_pages import generated

NAMES = ("configuration-keys.md", "commands.md", "python-api.md")


@pytest.fixture(scope="module")
def written() -> dict[str, str]:
    return generated()


@pytest.mark.parametrize("name", NAMES)
def test_a_generated_page_is_current(name: str, written: dict[str, str]):
    there = (ROOT / "docs" / "reference" / name).read_text()
    changed = list(
        difflib.unified_diff(there.splitlines(), written[name].splitlines(), "the page", "the code", lineterm="", n=0)
    )
    assert not changed, "write the pages again with `make reference`:\n" + "\n".join(changed[:20])


def test_every_generated_page_is_compared(written: dict[str, str]):
    assert set(written) == set(NAMES)


def test_every_key_command_and_public_name_is_on_its_page(written: dict[str, str]):
    import dpcfl_net as dpcfl
    from dpcfl_net.algorithms.base import registry
    from dpcfl_net.experiment.config_schema import Config

    keys = written["configuration-keys.md"]
    for name, field in Config.model_fields.items():
        inner = getattr(field.annotation, "model_fields", {})
        assert all(f"| `{name}.{key}" in keys for key in inner) if inner else f"| `{name}`" in keys, name
    for name, algorithm in registry().items():
        part = keys.partition(f"\n### {name}\n")[2].partition("\n###")[0]
        assert part
        assert all(f"| `{key}" in part for key in algorithm.Options.model_fields), name
    for line in ("## dpcfl attack invert", "| `--dry-run` |", "dpcfl compare RUN|SWEEP... [OPTIONS]"):
        assert line in written["commands.md"]
    assert [name for name in dpcfl.__all__ if f"### {name}\n" not in written["python-api.md"]] == ["__version__"]


def test_the_keys_of_every_command_with_json_are_documented():
    from doc_commands import program

    rows = (ROOT / "docs" / "how-to" / "commands.md").read_text().partition("\n## JSON\n")[2].partition("\n## ")[0].splitlines()
    named = {name.split()[0] for row in rows if row.startswith("| ") for name in row.split("|")[1].split(",") if name.strip()}

    def has_json(command: object) -> bool:
        below = getattr(command, "commands", {}).values()
        return any(map(has_json, below)) or any("--json" in parameter.opts for parameter in command.params)

    assert {name for name, command in program().commands.items() if has_json(command)} == named - {"command", "---"}


def test_a_switch_has_the_names_that_the_parser_knows(written: dict[str, str]):
    from doc_commands import program

    for line in written["commands.md"].splitlines():
        if line.startswith("## dpcfl "):
            command = program()
            for word in line.split()[2:]:
                command = command.commands[word]
            known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        elif line.startswith("| `--"):
            names = {name.strip("` ") for name in line.split("|")[1].split(",")}
            assert names <= known
            known -= names
        elif line.startswith("<!--"):
            break
