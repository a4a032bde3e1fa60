"""docs/reference/run-folder.md lists every field of every record that runs write, and its worked example holds."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import typing
from pathlib import Path
from typing import Any

import independent_reader
import msgpack
import pytest
import record_tables
import yaml
from api_runs import TINY
from conftest import dpcfl as command
from independent_ledger import canonical, sha256
from independent_signatures import signed
from pydantic import BaseModel
from record_tables import PAGE, Row, Table, compare, problems_of, table
from wire_page import rows, section

import dpcfl_net as dpcfl
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.roster import ClientEntry, Roster, RosterReference
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.experiment.job_files import Experiment
from dpcfl_net.privacy.events.base import event_types
from dpcfl_net.privacy.ledger import entries
from dpcfl_net.results.attack_results import AttackResult
from dpcfl_net.transport import messages, transcript
from dpcfl_net.transport.messages import Header

FOUR = {"dataset": "digits", "clients": [4], "train_per_client": 50, "test_per_client": 20, "shift": "none"}
PRIVATE = {"privacy": {"epsilon": 5, "delta": 1e-4}}
BY_CLIENT = {"epsilon": 10, "delta": 0.01, "unit": "client"}
LINEAR = {"model": {"name": "linear"}, "local": {"batch_size": 16, "lr": 0.1}}
KINDS: dict[str, dict[str, Any]] = {
    "first round": {
        "data": {**FOUR, "clients": [2, 2], "shift": "rotation"}, "algorithm": {"name": "r-dpcfl", "clusters": 2}, **LINEAR,
    },
    "compressed, a relay and a schedule": {
        "privacy": {**PRIVATE["privacy"], "epsilon_by_client": {"1": 3}}, "algorithm": {"name": "global"}, "communication": {"down": "float16", "up": {"form": "top-k", "fraction": 0.1}},
        "network": {"how": "relay", "default": "fiber"}, "availability": {"clients": {"1": [[1, 2]]}},
    },
    "personal models": {
        **PRIVATE, "algorithm": {"name": "mr-mtl"}, "output": {"transcript": "headers", "personal_models": True},
    },
    "trusted server": {
        "data": {**FOUR, "clients": [6, 6], "shift": "rotation"}, **LINEAR,
        "privacy": {**BY_CLIENT, "trust": "trusted-server"},
        "algorithm": {"name": "rr-cluster", "clusters": 2, "min_cluster_size": 2, "sampling_rate": 0.5, "guarantee": "expected"},
    },
    "released labels": {
        "data": {**FOUR, "clients": [6, 6], "shift": "rotation"}, **LINEAR,
        "privacy": {**BY_CLIENT, "trust": "trusted-server", "adjacency": "replace-one"},
        "algorithm": {"name": "rr-cluster", "clusters": 2, "min_cluster_size": 2, "sampling_rate": 0.5, "sampling": "fixed"},
        "runtime": {"federation": "in-process"}, "output": {"transcript": "off"},
    },
    "asynchronous": {
        **PRIVATE, **LINEAR, "data": FOUR, "rounds": 5, "runtime": {"federation": "network"},
        "algorithm": {"name": "global", "asynchronous": {"buffer": 2, "participations": 4}},
    },
    "aggregators": {
        **PRIVATE, **LINEAR, "data": FOUR, "algorithm": {"name": "global"}, "runtime": {"aggregators": 2},
        "output": {"transcript": "off"},
    },
    "audited": {**PRIVATE, "algorithm": {"name": "global"}, "audit": {"canaries": 20}},
    "virtual time": {
        **PRIVATE, "runtime": {"federation": "in-process"}, "network": {"clock": "virtual", "default": "4g"},
        "output": {"transcript": "off"},
    },
    "secure sums": {
        "data": FOUR, "model": {"name": "linear"}, "local": {"batch_size": 16, "lr": 0.1, "deadline_s": 0.3},
        "privacy": {**BY_CLIENT, "trust": "secure-aggregation"}, "algorithm": {"name": "dp-fedavg", "sampling_rate": 0.5},
    },
}  # fmt: skip
SEEN = {  # tables of which a run of two clients over the network has records
    "protocol.json", "roster.jsonl", "experiment.json", "run.json", "metrics.jsonl", "clusters.jsonl", "messages.jsonl", "spans.jsonl",
    "checkpoints/round_NNNNN/state.msgpack", "models/*.safetensors", "ledger.jsonl", "releases/K.answer", "transcript.msgpack",
}  # fmt: skip


def test_every_field_of_a_run_is_on_the_page(by_network: dpcfl.Run):
    problems, used = compare(by_network.path)
    assert problems == []
    assert {title.split("`")[1] for title in used} == SEEN
    files = {str(path.relative_to(by_network.path).parts[0]) for path in by_network.path.rglob("*") if path.is_file()}
    assert files - listed_files() == set(), "the page does not list a file"


def test_the_page_names_what_spans_are_of(by_network: dpcfl.Run):
    spans = [json.loads(line) for line in RunFolder(by_network.path).spans.read_text().splitlines()]
    about = rows(PAGE.read_text().partition("### `spans.jsonl`")[2], "field")
    steps = {span["what"] for span in spans if span["who"] == "launcher" and span["round"] == 0}
    assert steps
    assert "a step of the preparation, of the launcher in round 0" in about["what"][2]
    assert {span["what"] for span in spans} - steps - set(re.findall(r"\w+", about["what"][2])) == set()
    assert {span["who"].split()[0] for span in spans} - set(re.findall(r"\w+", about["who"][2])) == set()


def test_the_line_of_a_link_has_the_fields_of_the_table():
    (shown,) = re.findall(r"```json\n(.*elapsed_s.*)\n```", (PAGE.parents[1] / "how-to" / "network.md").read_text())
    assert set(json.loads(shown)) == set(table("links.jsonl").rows)


def listed_files() -> set[str]:
    """Names of files and folders in the page's first tables."""
    listed = set(re.findall(r"^\| (.*?) \|", PAGE.read_text().partition("## Conventions")[0], re.MULTILINE))
    return {name.strip().partition("/")[0] for cell in listed for name in cell.split(",")}


def test_the_page_lists_every_name_of_a_run_folder():
    own = {path.name for name, path in vars(RunFolder("run")).items() if name != "path"}
    assert own - listed_files() == set()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_other_runs_is_on_the_page(kind: str, tmp_path: Path):
    settings = {key: value for key, value in TINY.items() if key != "privacy"} | PRIVATE | KINDS[kind]
    config = tmp_path / "c.yaml"
    config.write_text(yaml.safe_dump(settings))
    faults = tmp_path / "chaos.yaml"
    faults.write_text("seed: 1\nprocesses: [{kill: client 0, at: {round: 2}}]\n")
    chaos = ["--chaos", faults] if kind == "personal models" else []
    done = command("run", config, "--out", tmp_path / "out", *chaos)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "out").iterdir()
    after = {"audited": ["audit", folder], "asynchronous": ["compare", folder, "--fairness"]}.get(kind)
    # An audit accuses a sound run once in a thousand.
    assert after is None or command(*after).returncode in ((0, 3) if kind == "audited" else (0,))
    problems, used = compare(folder)
    assert problems == []
    wanted = {
        "first round": "first_round.npz", "audited": "attacks/*.json", "trusted server": "labels of a trusted server", "released labels": "labels of a trusted server",
        "personal models": "warnings.jsonl", "compressed, a relay and a schedule": "links.jsonl", "asynchronous": "fairness",
    }.get(kind, "run.json")  # fmt: skip
    assert [title for title in used if wanted in title], used
    read = independent_reader.verify(folder)
    assert read.problems == []
    assert (read.signatures > 0) == (kind == "secure sums")


def fields_of(model: type[BaseModel], prefix: str = "") -> set[str]:
    """Dotted names of a model's fields, as in the tables."""
    names: set[str] = set()
    for name, about in model.model_fields.items():
        names.add(prefix + name)
        listed = typing.get_origin(about.annotation) is list
        named = RosterReference if about.annotation is Roster else about.annotation  # what the file says of the roster
        for inner in (named, *typing.get_args(about.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                names |= fields_of(inner, f"{prefix}{name}{'[]' if listed else ''}.")
    return names


@pytest.mark.parametrize(
    ("title", "model"), [("protocol.json", Protocol), ("roster.jsonl", ClientEntry), ("experiment.json", Experiment)]
)
def test_the_tables_of_the_job_are_its_models(title: str, model: type[BaseModel]):
    assert set(table(title).rows) == fields_of(model)


def test_the_tables_of_the_ledger_are_its_entries():
    for kind, fields in entries.FIELDS.items():
        rows = table(f"ledger.jsonl: {kind}").rows
        assert {name for name in rows if "." not in name} == {"sequence", "type", "prev", *fields}
    rows = table("ledger.jsonl: debit").rows
    for name, event in event_types().items():
        own = {field for field, row in rows.items() if name in re.findall(r"\w+", row.present)}
        assert own == {f"events[].{field.name}" for field in dataclasses.fields(event)}, name


def test_the_table_of_attacks_is_its_result():
    assert set(table("attacks/*.json").rows) == set(AttackResult.__dataclass_fields__)


def test_the_comparison_finds_what_the_page_lacks():
    rows = {"a": Row("object", "always"), "a.b": Row("text", "always"), "c": Row("map", "sometimes"),
            "d": Row("list of objects", "always"), "d[].e": Row("text", "always")}  # fmt: skip
    found = Table("x", "x.json", {}, rows)
    assert problems_of({"a": {"b": ""}, "c": {"any": 1}, "d": [{"e": ""}]}, found) == []
    assert problems_of({"a": {}, "d": [{"e": "", "f": 1}, {}], "g": 1}, found) == [
        "x: the page does not list g", "x: a.b is not in every record", "x: the page does not list d[].f",
        "x: d[].e is not in every record",
    ]  # fmt: skip
    assert problems_of({"a": {"b": ""}}, found) == ["x: d is not in every record"]


def test_the_worked_example_holds():
    text = PAGE.read_text().partition("## Worked example")[2]
    signature, ledger, hashes, content, request, answer, pair = re.findall(r"```\w+\n(.*?)```", text, re.DOTALL)
    key, experiment, stated = signature.split("\n")[:3]
    assert signed(key, experiment.encode(), bytes.fromhex(stated))
    assert f"`{sha256(experiment.encode())}`" in text
    lines = [line.encode() for line in ledger.splitlines(keepends=True)]
    assert [sha256(line) for line in lines] == hashes.split()
    assert all(canonical(json.loads(line)) + b"\n" == line for line in lines)
    assert [json.loads(line)["prev"] for line in lines] == ["0" * 64, *hashes.split()[:-1]]
    assert sha256(request.strip().encode()) == json.loads(lines[1])["id"] == json.loads(answer)["id"]
    assert json.loads(request)[-1] == content.strip()
    document = json.loads(answer)
    assert document.pop("check") == sha256(canonical(document))
    assert f"`blake3` `{document['release'][3]}`" in text
    row = ["update", "f4", [650], 2600]
    head = b"\x92" + msgpack.packb([row]) + independent_reader.bin_head(row[3])
    assert document["release"][:3] == [len(head) + row[3], row[3], sha256(head)]
    body, digest = msgpack.unpackb(bytes.fromhex(pair))
    start = hashlib.sha256(b"dpcfl-transcript-1").digest()
    assert f"`{start.hex()}`" in text
    assert hashlib.sha256(start + body).digest() == digest
    assert f"{len(body)} bytes of body" in text
    number, _, direction, peer, header, payload = msgpack.unpackb(body)
    assert (number, direction, peer, payload) == (0, "up", "client 0", None)
    assert (msgpack.unpackb(header)["kind"], msgpack.unpackb(header)["client"]) == ("HELLO", 0)


def test_recorded_messages_have_the_fields_of_their_kind(by_network: dpcfl.Run):
    found = rows(section("Kinds"), "kind")
    required = {field.name for field in dataclasses.fields(Header) if field.default is dataclasses.MISSING}
    seen: set[str] = set()
    for record in transcript.read(by_network.path / "transcript.msgpack"):
        header = messages.unpack_strict(record.header)
        direction, named, _ = found[header["kind"]]
        assert direction in ("both", record.direction)
        assert set(header) - required <= set(re.findall(r"`(\w+)`", named)), header
        seen.add(header["kind"])
    assert {"HELLO", "WELCOME", "TASK", "CHUNK", "RESULT", "HEARTBEAT", "ACK", "BYE"} <= seen


def test_every_table_says_when_a_field_is_there():
    for found in record_tables.tables():
        assert found.rows, found.title
        assert all(row.kind and row.present for row in found.rows.values()), found.title
