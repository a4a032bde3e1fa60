"""Command lines that cannot work: the documented exit code, and one line for each problem with the path or the field."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_cases import call
from conftest import DPCFL, ROOT, dpcfl, write_config

import dpcfl_net
from dpcfl_net.core import runlog
from dpcfl_net.core.signing import read_operator_key
from dpcfl_net.experiment import config as configuration
from dpcfl_net.launch import cli, running
from dpcfl_net.launch.cli import run as runs
from dpcfl_net.launch.new_run import prepare
from dpcfl_net.report import page
from dpcfl_net.runtime.one_process import OneProcessSpec, run_in_one_process

SMALL = {
    "data": {"dataset": "digits", "clients": [1, 1], "train_per_client": 60, "test_per_client": 20},
    "rounds": 2,
    "local": {"batch_size": 30, "lr": 0.5},
    "algorithm": {"name": "global"},
    "output": {},
}
NOWHERE = "tcp://127.0.0.1:1"


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Path]:
    """Good things to spoil, and bad ones to give: by the word that a command line below has in braces."""
    base = tmp_path_factory.mktemp("bad")
    config, run = write_config(base / "c", **SMALL), base / "run"
    runs.write_job(config, [], base / "job", None)
    prepare(run, configuration.load(config, ["runtime.federation=in-process"]))
    run_in_one_process(OneProcessSpec(run, read_operator_key(run / "operator.pub"), run / "ledgers"))
    runs.report(run)
    (run / "transcript.msgpack").touch()  # of a run over a network, before its first message
    files = {
        "empty": b"", "binary": bytes(range(256)), "latin": "name: é".encode("latin-1"), "list": b"[1]", "number": b"7",
        "deep": b"[" * 100_000, "digits": b"9" * 5000, "large": b"# " + b"x" * (1 << 20), "file": b"x", "object": b"{}",
        "key": b"0" * 64, "nan": b'{"events": [], "delta": NaN}',
    }  # fmt: skip
    for name, content in files.items():
        (base / name).write_bytes(content)
    (base / "folder").mkdir()
    (base / "sweep").mkdir()
    (base / "sweep/sweep.json").write_text('{"axes": {}, "cells": []}')
    (base / "prepared").mkdir()
    (base / "prepared/.preparing").touch()
    os.mkfifo(base / "fifo")
    (base / "loop").symlink_to("loop")
    named = {name: base / name for name in (*files, "folder", "sweep", "prepared", "fifo", "loop", "job", "missing")}
    return {
        **named, "base": base, "config": config, "run": run, "keys": base / "job/keys",
        "operator": base / "job/operator.pub", "protocol": base / "job/protocol.json", "below": base / "file/below",
        "device": Path("/dev/zero"), "full": Path("/dev/full"), "proc": Path("/proc/nowhere"),
    }  # fmt: skip


UNREADABLE = {
    "folder": "is a folder, not a file",
    "fifo": "is a named pipe, not a file",
    "device": "is a device, not a file",
    "loop": "too many symbolic links",
    "binary": "not UTF-8 text",
    "latin": "not UTF-8 text",
}
# (command line, exit code, what stderr says)
Case = tuple[str, int, list[str]]
CONFIGURATIONS: list[Case] = [
    (f"{command} {{{what}}} {more}", 2, [f"{{{what}}}", words])
    for command, more in (
        ("run", "--dry-run"),
        ("sweep", "seed=0:2 --dry-run"),
        ("job", "--out {base}/x"),
        ("launch", "--dry-run"),
    )
    for what, words in {
        **{name: said for name, said in UNREADABLE.items() if name != "loop"},
        "missing": "no such configuration file",
        "below": "no such configuration file",
        "loop": "no such configuration file",
        "empty": "must hold a mapping",
        "list": "must hold a mapping",
        "deep": "nested more than 32 deep",
        "digits": "a number of 5,000 digits",
        "large": "larger than 1,048,576 bytes",
    }.items()
]
DOCUMENTS: list[Case] = [
    *((f"account --json {{{what}}}", 2, [f"{{{what}}}", words]) for what, words in UNREADABLE.items()),
    ("account --json {missing}", 2, ["cannot read {missing}: no such file"]),
    ("account --json {below}", 2, ["{below}", "a part of this path is a file"]),
    ("account --json {empty}", 2, ["{empty} is not JSON", "in line 1"]),
    ("account --json {list}", 2, ["{list} must hold a JSON object", "got [1]"]),
    ("account --json {number}", 2, ["{number} must hold a JSON object", "got 7"]),
    ("account --json {deep}", 2, ["{deep} is not readable JSON", "nested too deeply"]),
    ("account --json {digits}", 2, ["{digits} is not readable JSON", "too many digits"]),
    ("account --json {object}", 2, ["events: must be a list"]),
    ("account --json {nan}", 2, ["{nan} is not JSON: NaN is no number of JSON"]),
    *(
        (f"launch {{config}} --on ssh --hosts {{{what}}} --dry-run", 2, [f"{{{what}}}", words])
        for what, words in {
            **UNREADABLE,
            "missing": "no such file",
            "empty": "must hold a mapping",
            "list": "must hold a mapping",
        }.items()
    ),
    ("launch {config} --on ssh --hosts {object} --dry-run", 2, ["{object}: hosts is missing"]),
    ("diff {folder} {protocol}", 2, ["{folder} is not a run folder: it holds no protocol.json"]),
    ("diff {protocol} {folder}", 2, ["{folder} is not a run folder: it holds no protocol.json"]),
    ("diff {fifo} {protocol}", 2, ["cannot read {fifo}: is a named pipe"]),
    ("diff {missing} {protocol}", 2, ["cannot read {missing}: no such file"]),
    ("diff {empty} {protocol}", 3, ["job-invalid: {empty}"]),
    ("diff {binary} {protocol}", 3, ["job-invalid: {binary}"]),
    ("diff {deep} {protocol}", 3, ["job-invalid: {deep}"]),
    ("diff {object} {protocol}", 3, ["job-invalid: {object}", "run: Field required", "more"]),
]
COORDINATOR = "coordinator {protocol} --bind tcp://127.0.0.1:0 --keys {keys} --out {base}/out"
WORKER = f"worker {{job}} --connect {NOWHERE} --keys {{keys}} --ledgers {{base}}/ledgers"
OBSERVER = "observer {job} --bind tcp://127.0.0.1:0 --keys {keys} --out {base}/out"
KEYS: list[Case] = [
    (f"{command} --operator-key {{{what}}}", 2, [f"{{{what}}}", words])
    for command in ("verify {run}", COORDINATOR, f"{WORKER} --client 0", OBSERVER)
    for what, words in {
        "missing": "no such file",
        "folder": "is a folder, not a file",
        "fifo": "is a named pipe, not a file",
        "binary": "not UTF-8 text",
        "file": "does not hold an operator's public key, 64 hex digits",
    }.items()
] + [
    (f"{COORDINATOR} --operator-key {{key}}", 3, ["operator-signature: protocol.json"]),
    (f"{WORKER} --client 0 --operator-key {{key}}", 3, ["operator-signature: protocol.json"]),
    (f"{OBSERVER} --operator-key {{key}}", 3, ["operator-signature: protocol.json"]),
    (f"{WORKER} --client 99 --operator-key {{operator}}", 2, ["--client is 99", "clients 0 to 1"]),
    (f"{WORKER} --client 2 --operator-key {{operator}}", 2, ["--client is 2", "clients 0 to 1"]),
    (
        COORDINATOR.replace("{keys}", "{folder}") + " --operator-key {operator}",
        2,
        ["{folder}/coordinator/coordinator.public: no such file"],
    ),
    (
        COORDINATOR.replace("{keys}", "{missing}") + " --operator-key {operator}",
        2,
        ["{missing}/coordinator/coordinator.public: no such file"],
    ),
    (
        OBSERVER.replace("{keys}", "{file}") + " --operator-key {operator}",
        2,
        ["{file}/observer/observer.public", "a part of this path"],
    ),
    (COORDINATOR.replace("{protocol}", "{folder}") + " --operator-key {operator}", 2, ["cannot read {folder}: is a folder"]),
    (COORDINATOR.replace("{protocol}", "{missing}") + " --operator-key {operator}", 2, ["cannot read {missing}: no such file"]),
    (COORDINATOR.replace("{protocol}", "{empty}") + " --operator-key {operator}", 3, ["job-invalid: {empty}"]),
    (
        WORKER.replace("{job}", "{folder}") + " --client 0 --operator-key {operator}",
        2,
        ["{folder}/protocol.json: no such file"],
    ),
    (
        WORKER.replace("{job}", "{file}") + " --client 0 --operator-key {operator}",
        2,
        ["{file}/protocol.json", "a part of this path"],
    ),
]
ADDRESSES: list[Case] = [
    *(
        (COORDINATOR.replace("tcp://127.0.0.1:0", address) + " --operator-key {operator}", 2, [words])
        for address, words in {
            "127.0.0.1:5700": "'--bind': an address must look like tcp://host:port",
            "tcp://127.0.0.1": "an address must look like tcp://host:port",
            "tcp://127.0.0.1:99999": "a port up to 65535",
            "tcp://127.0.0.1:-1": "an address must look like tcp://host:port",
            "ipc:///tmp/socket": "an address must look like tcp://host:port",
            "tcp://nowhere.invalid:0": "cannot listen on tcp://nowhere.invalid:0",
        }.items()
    ),
    (
        f"{COORDINATOR} --observer tcp://x --operator-key {{operator}}",
        2,
        ["'--observer': an address must look like tcp://host:port"],
    ),
    (
        f"{WORKER} --client 0 --operator-key {{operator}} --connect x",
        2,
        ["'--connect': an address must look like tcp://host:port"],
    ),
    (f"{COORDINATOR} --observer tcp://*:5700 --operator-key {{operator}}", 2, ["cannot connect to 'tcp://*:5700'"]),
    (
        OBSERVER.replace("tcp://127.0.0.1:0", "nowhere") + " --operator-key {operator}",
        2,
        ["an address must look like tcp://host:port"],
    ),
]
OUTPUTS: list[Case] = [
    *(
        (f"{command} {{{what}}}", 2, [f"{{{what}}}", words])
        for command in (
            "run {config} --out", "job {config} --out", "keygen --clients 2", "sweep {config} seed=0,1 --out",
            "launch {config} --out", "quickstart --config {config} --out", "reproduce em-fdro/prop41 --out",
        )
        for what, words in {"file": "not a folder", "below": "is a file, not a folder", "proc": "no such file or folder"}.items()
    ),
    ("coordinator {protocol} --bind tcp://127.0.0.1:0 --keys {keys} --operator-key {operator} --out {file}", 2, ["{file}"]),
    ("observer {job} --bind tcp://127.0.0.1:0 --keys {keys} --operator-key {operator} --out {file}", 2, ["{file}"]),
    (f"worker {{job}} --client 0 --connect {NOWHERE} --keys {{keys}} --operator-key {{operator}} --ledgers {{file}}", 2, ["{file}"]),
    *(
        (f"{command} {{{what}}}", code, [f"{{{what}}}", words])
        for command in ("compare {run} --csv", "launch {config} --on slurm --sbatch")
        for what, code, words in (
            ("folder", 2, "is a folder, not a file"), ("below", 2, "a part of this path is a file"),
            ("proc", 2, "no such file or folder"), ("full", 4, "no space left on the device"), ("fifo", 2, "no process reads"),
            ("loop", 2, "too many symbolic links"),
        )
    ),
    *(
        (f"compare {{run}} --page {{{what}}}", 2, [f"{{{what}}}", words])
        for what, words in {
            "folder": "is not a regular file", "fifo": "is not a regular file", "full": "is not a regular file",
            "below": "a part of this path is a file", "proc": "no such file or folder",
        }.items()
    ),
]  # fmt: skip
FOLDERS: list[Case] = [
    *(
        (f"{command} {{{what}}}", 2, [f"{{{what}}}", words])
        for command, words in {
            "report": "is not a run folder", "verify": "is not a run folder", "compare": "is not a run folder",
            "audit": "is not a run folder", "inspect": "is not a run folder", "attack nan-oracle": "is not a run folder",
            "attack selections": "is not a run folder", "attack invert": "is not a run folder",
            "run --resume": "is not a run folder",
            "launch --on ray --resume": "is not a run folder",
        }.items()
        for what in ("missing", "folder", "file")
    ),
    ("launch --on ray --resume {run}", 2, ["{run} has no placement.json", "use dpcfl run --resume {run}"]),
    ("attack invert {run}", 2, ["{run}: no update of global can be read from the transcript: it must be full: output.transcript=full"]),
    ("attack selections {run}", 2, ["{run}: no choice of a cluster by algorithm global"]),
    ("attack nan-oracle {run}", 2, ["{run} is of global", "dpcfl run threats/nan_oracle"]),
    ("audit {run}", 2, ["{run} was not audited"]),
    ("compare {run} {folder}", 2, ["{folder} is not a run folder"]),
    *((f"{command} {{sweep}}", 2, ["{sweep} is a sweep, not a run folder: give the folder of one of its runs", "for its table: dpcfl compare {sweep}"])
      for command in ("verify", "export", "clients", "run --resume", "trace", "watch --once", "inspect")),
    ("inspect {job}", 2, ["{job} has no transcript.msgpack, though its output.transcript is 'headers': it was removed, or the coordinator, which writes"]),
    ("inspect {prepared}", 2, ["the preparation of the run {prepared} did not finish: it holds no protocol.json", "start the run again"]),
    ("run --resume {prepared}", 2, ["the preparation of the run {prepared} did not finish: it holds no config.yaml"]),
    ("verify {job}", 3, ["FAILS  ledgers", "no ledger in {job}", "resume the run, then verify it"]),
]  # fmt: skip
NUMBERS: list[Case] = [
    ("keygen {base}/k --clients 0", 2, ["--clients", "1"]),
    ("keygen {base}/k --clients -5", 2, ["--clients"]),
    ("keygen {base}/k --clients 1000000000", 2, ["--clients", "10000"]),
    ("keygen {base}/k --clients many", 2, ["--clients is 'many': must be a valid integer; see `dpcfl keygen --help`"]),
    ("account --epsilon 5,0 --delta 1e-4", 2, ["--epsilon is '5,0': must be a valid number; see `dpcfl account --help`"]),
    ("keygen {base}/k", 2, ["Missing option '--clients'"]),
    (f"{WORKER} --operator-key {{operator}} --client -1", 2, ["--client"]),
    (f"{WORKER} --operator-key {{operator}} --client 1e9", 2, ["--client"]),
    (f"{WORKER} --operator-key {{operator}} --client 0 --orphan-timeout nan", 2, ["--orphan-timeout", "above 0"]),
    (f"{WORKER} --operator-key {{operator}} --client 0 --orphan-timeout inf", 2, ["--orphan-timeout", "at most 1,000,000"]),
    (f"{WORKER} --operator-key {{operator}} --client 0 --budget-epsilon -1", 2, ["--budget-epsilon", "above 0"]),
    (f"{WORKER} --operator-key {{operator}} --client 0 --budget-delta 2", 2, ["--budget-delta", "between 0 and 1"]),
    (f"{WORKER} --operator-key {{operator}} --client 0 --budget-epsilon 3", 2, ["--budget-delta None", "both or none"]),
    (f"{WORKER} --operator-key {{operator}} --client 0 --max-epsilon nan", 2, ["--max-epsilon", "above 0"]),
    (f"{WORKER} --operator-key {{operator}} --client 0 --max-delta inf", 2, ["--max-delta", "between 0 and 1"]),
    (f"{COORDINATOR} --operator-key {{operator}} --quorum nan", 2, ["--quorum"]),
    (f"{COORDINATOR} --operator-key {{operator}} --quorum 2", 2, ["--quorum", "1"]),
    (f"{COORDINATOR} --operator-key {{operator}} --round-timeout inf", 2, ["--round-timeout", "at most 1,000,000"]),
    (f"{COORDINATOR} --operator-key {{operator}} --join-timeout 0", 2, ["--join-timeout", "above 0"]),
    (f"{OBSERVER} --operator-key {{operator}} --evaluate-every 0", 2, ["--evaluate-every"]),
    ("inspect {run} --client -1", 2, ["--client"]),
    ("inspect {run} --client 99", 2, ["--client is 99: must be 0 to "]),
    ("inspect {run} --round x", 2, ["--round"]),
    ("inspect {run} --round 99", 2, ["--round is 99: must be 0 to "]),
    ("configs quickstart", 2, ["unexpected extra argument", "see `dpcfl configs --help`"]),
    ("report {run} --jsn", 2, ["No such option: --jsn", "see `dpcfl report --help`"]),
    ("inspect {run} --limit 0", 2, ["--limit"]),
    ("attack invert {run} --records 0", 2, ["--records"]),
    ("bench live --clients 1000000000", 2, ["--clients"]),
    ("bench gpu --slots-per-gpu 0", 2, ["--slots-per-gpu"]),
    ("bench dpsgd --repeats 0", 2, ["--repeats"]),
    ("doctor --clients 0", 2, ["--clients"]),
    ("launch {config} --ports 5700", 2, ["--ports is '5700'", "two numbers from 0 to 65535"]),
    ("launch {config} --ports 1,99999", 2, ["--ports is '1,99999'", "two numbers from 0 to 65535"]),
    ("launch {config} --ports -1,2", 2, ["--ports is '-1,2'", "two numbers from 0 to 65535"]),
    ("launch {config} --on slurm --sbatch {base}/s --nodes 0", 2, ["--nodes"]),
    ("launch {config} --on slurm --sbatch {base}/s --cpus 99999999", 2, ["--cpus"]),
    ("launch {config} --on slurm --sbatch {base}/s --time soon", 2, ["--time is 'soon'", "2:00:00"]),
    ("launch {config} --on ray --cpus-per-worker nan --dry-run", 2, ["--cpus-per-worker is nan", "above 0"]),
    ("launch {config} --on ray --gpus-per-worker inf --dry-run", 2, ["--gpus-per-worker inf", "at most 10,000"]),
    ("sweep {config} seed=0:1000000000 --dry-run", 2, ["axis 'seed=0:1000000000'", "must be at most 5,000"]),
    ("sweep {config} seed=0:100 rounds=2:102 --dry-run", 2, ["10,000 combinations", "must be at most 5,000"]),
    ("run {config} rounds=1000000000000 --dry-run", 2, ["rounds is 1000000000000", "less than or equal to 100000"]),
    (
        "run {config} privacy.delta=1e-310 --dry-run",
        2,
        ["privacy.delta is 1e-310: must be 0 or at least 2.23e-308 in magnitude"],
    ),
    ("run {config} local.lr=1e-10 --dry-run", 2, ["local.lr is 1e-10: must be greater than or equal to 0.000000001"]),
    ("run {config} local.pace=constant local.deadline_s=1e-4 --dry-run", 2, ["local.deadline_s is 0.0001: must be greater"]),
    ("run {config} privacy.epsilon=1e300 --dry-run", 2, ["privacy.epsilon is 1e+300", "less than or equal to 100000"]),
    *(
        (
            f"job {{config}} {more} --keys {{keys}} --out {{base}}/x",
            2,
            [f"{{keys}}/{lacks} is missing", f"dpcfl keygen NEW_FOLDER {made}\n"],
        )
        for more, lacks, made in (
            ("data.clients=[2,1]", "client_0002/client_0002.public", "--clients 3"),
            ("runtime.aggregators=2", "aggregator_0000/aggregator_0000.public", "--clients 2 --aggregators 2"),
            ("privacy.trust=secure-aggregation", "client_0000/client_0000.identity.public", "--clients 2 --identities"),
        )
    ),
    ("job {config} data.clients=[1000000000] --out {base}/x", 2, ["data.clients is [1000000000]", "at most 1,000,000"]),
]
NAMES: list[Case] = [
    ("fly", 2, ["No such command 'fly'"]),
    ("data fetch imagenet", 2, ["unknown data set 'imagenet'", "allowed: mnist, "]),
    ("data fly", 2, ["No such command 'fly'"]),
    ("run {config} --fast", 2, ["No such option", "--fast"]),
    (
        "run {config} --privacy.epsilon=3",
        2,
        ["No such option: --privacy.epsilon; a setting has no dashes: privacy.epsilon=VALUE"],
    ),
    ("sweep {config} --privacy.epsilon 3,5", 2, ["a setting has no dashes: privacy.epsilon=VALUE"]),
    ("report {run} --privacy.epsilon=3", 2, ["No such option: --privacy.epsilon; see `dpcfl report --help`"]),
    ("run", 2, ["give a configuration"]),
    ("run {config} --resume {run}", 2, ["--resume takes no configuration"]),
    (
        "run {config} --debug output.transcript=full",
        2,
        ["--debug sets output.transcript to 'off': leave 'full' out of the overrides"],
    ),
    ("run {config} rounds", 2, ["override 'rounds' is not key=value"]),
    ("run {config} =5", 2, ["override '=5' is not key=value"]),
    ("run {config} privacy..epsilon=5", 2, ["override 'privacy..epsilon=5' is not key=value"]),
    ("run {config} a.b.c.d.e.f.g.h.i=5", 2, ["is not key=value"]),
    ("run {config} rounds.more=5", 2, ["'rounds' is a value, not a section"]),
    ("run {config} data.clients=[1,", 2, ["override 'data.clients=[1,' is not YAML"]),
    ("run {config} seed=1e400", 2, ["override 'seed=1e400'", "beyond the largest number"]),
    ("run {config} algorithm.name=gobal", 2, ["algorithm.name is 'gobal'", "did you mean 'global'?"]),
    ("run {config} name=../../x", 2, ["name is '../../x'", "without slashes"]),
    ("run {config} --out=", 2, ["argument --out= is empty"]),
    ("sweep {config} seed", 2, ["axis 'seed' is not key=value,value"]),
    ("sweep {config} seed=0,0", 2, ["has a value twice"]),
    ("sweep {config} local.lr=1,0.5,1e0", 2, ["axis 'local.lr=1,0.5,1e0' has a value twice"]),
    ("sweep {config} local.lr=snan,snan", 2, ["axis 'local.lr=snan,snan' has a value twice"]),
    ("sweep {config} seed=0,1 seed=2,3", 2, ["axis 'seed' is given twice"]),
    ("sweep {config} algorithm.name=global,gobal --dry-run", 2, ["did you mean 'global'?", "(cell algorithm.name=gobal)"]),
    ("launch {config} --on cloud", 2, ["--on is 'cloud'", "local, ray, slurm or ssh"]),
    ("launch {config} --on ssh", 2, ["--hosts FILE belongs to --on ssh"]),
    ("launch {config} --sbatch {base}/s", 2, ["--sbatch belongs to --on slurm"]),
    ("launch {config} --on slurm --dry-run", 2, ["--on slurm works inside an allocation"]),
    ("coordinator {protocol}", 2, ["Missing option"]),
    ("bench flying", 2, ["unknown benchmark 'flying'", "must be one of dpsgd, resnet", "all, live, gpu"]),
    ("bench gpu --quick --markdown {base}/tables.md", 2, ["--quick, --markdown: only for rows"]),
    ("bench live --clients 50", 2, ["--sampled is 100: must be at most --clients, here 50"]),
    ("bench live --slots-per-gpu 2", 2, ["--slots-per-gpu: only for gpu, not for live"]),
    ("bench dpsgd --clients 20 --sampled 5", 2, ["--clients, --sampled: only for live, not for dpsgd"]),
    ("bench dpsgd --against jax", 2, ["--against is 'jax'", "opacus, flower, pfl, sklearn, grpc"]),
    ("reproduce", 2, ["give one or more figures"]),
    ("reproduce r-dpcfl/fgi3", 2, ["unknown figure 'r-dpcfl/fgi3'", "did you mean 'r-dpcfl/fig3'?"]),
    ("reproduce em-fdro/prop41 --scale huge", 2, ["--scale is 'huge'", "laptop or paper"]),
]


def changed(**fields: Any) -> Callable[[bytes], bytes]:
    """A JSON object with some fields changed, in the one form that is signed."""
    return lambda data: json.dumps({**json.loads(data), **fields}, sort_keys=True, separators=(",", ":")).encode()


def first_line(**fields: Any) -> Callable[[bytes], bytes]:
    """JSON lines whose first one has some fields changed."""

    def change(data: bytes) -> bytes:
        first, _, rest = data.partition(b"\n")
        return json.dumps({**json.loads(first), **fields}).encode() + b"\n" + rest

    return change


def settings(data: bytes) -> bytes:
    return data.replace(b"ledger:", b"book:")


# (command, file of the run folder, its content, exit code, what is said; of `verify` on stdout where it is exit code 3)
DAMAGED: list[tuple[str, str, bytes | Callable[[bytes], bytes] | None, int, list[str]]] = [
    ("report", "experiment.json", None, 2, ["{damaged}/experiment.json: no such file"]),
    ("report", "protocol.json", None, 2, ["{damaged} is not a run folder", "protocol.json"]),
    ("verify", "protocol.json", None, 2, ["{damaged} is not a run folder", "protocol.json"]),
    ("verify", "operator.pub", None, 2, ["{damaged}/operator.pub: no such file"]),
    ("verify", "operator.pub", b"\xff", 2, ["{damaged}/operator.pub: not UTF-8 text"]),
    ("verify", "operator.pub", b"0" * 64, 3, ["FAILS  job signed by the operator"]),
    ("verify", "protocol.json", b"{}", 3, ["FAILS  job signed by the operator", "job-invalid"]),
    ("verify", "roster.jsonl", b"", 3, ["FAILS  job signed by the operator", "roster: {damaged}/roster.jsonl is not the roster"]),
    ("report", "roster.jsonl", None, 2, ["{damaged}/roster.jsonl: no such file"]),
    ("verify", "protocol.json.sig", b"", 3, ["FAILS  job signed by the operator", "operator-signature"]),
    ("verify", "experiment.json", b"[", 3, ["FAILS  job signed by the operator", "job-invalid"]),
    ("verify", "config.yaml", settings, 3, ["FAILS  config.yaml is the configuration of the signed job: {damaged}/config.yaml: unknown"]),
    ("verify", "config.yaml", lambda data: data.replace(b"rounds: 2", b"rounds: 3"), 3,
     ["FAILS  config.yaml is the configuration of the signed job: rounds: 3 here, 2 there"]),
    ("verify", "transcript.msgpack", b"\xc1" * 9, 3, ["FAILS  transcript: hash chain whole", "transcript-broken"]),
    ("verify", "clusters.jsonl", first_line(assignment=[0]), 2, ["{damaged}/clusters.jsonl is damaged", "assigns 1 of 2 clients"]),
    ("report", "clusters.jsonl", first_line(round="x"), 0, ["warning: {damaged}/clusters.jsonl: 1 damaged line left out"]),
    ("report", "protocol.json", b"", 3, ["job-invalid: {damaged}/protocol.json"]),
    ("report", "protocol.json", b"\xff\xfe", 3, ["job-invalid: {damaged}/protocol.json"]),
    ("report", "protocol.json", b"[" * 100_000, 3, ["job-invalid: {damaged}/protocol.json"]),
    ("report", "protocol.json", changed(rounds=1), 3, ["job-invalid: {damaged}/protocol.json: rounds"]),
    ("report", "protocol.json", changed(roster=[]), 3, ["job-invalid"]),
    ("report", "protocol.json", changed(algorithm="gobal"), 3, ["algorithm: the job's algorithm.name is 'gobal'"]),
    ("report", "protocol.json", changed(options={"x": 1}), 3, ["algorithm: the job's options of global: x"]),
    ("report", "experiment.json", b"null", 3, ["job-invalid: {damaged}/experiment.json"]),
    ("report", "experiment.json", changed(seed=9), 3, ["experiment-hash: {damaged}/experiment.json"]),
    ("report", "metrics.jsonl", first_line(round=None), 0, ["warning: {damaged}/metrics.jsonl: 1 damaged line left out"]),
    ("report", "metrics.jsonl", first_line(bytes_up="x"), 0, ["warning: {damaged}/metrics.jsonl: 1 damaged line left out"]),
    ("report", "metrics.jsonl", first_line(view=1), 0, ["warning: {damaged}/metrics.jsonl: 1 damaged line left out"]),
    ("report", "metrics.jsonl", b'{"a": 1}\n', 0, ["warning: {damaged}/metrics.jsonl: 1 damaged line left out"]),
    ("report", "metrics.jsonl", None, 0, ["warning: {damaged}/metrics.jsonl has 0 of the 2 rounds in run.json", "are left as they are"]),
    ("report", "run.json", b"[]", 0, ["warning: {damaged}/run.json is damaged", "must hold a JSON object"]),
    ("report", "run.json", b'{"state": "fin', 0, ["warning: {damaged}/run.json is not JSON"]),
    ("report", "run.json", changed(state=1), 0, ["warning: {damaged}/run.json is damaged: state is 1, must be text"]),
    ("report", "run.json", changed(wall_s="x"), 0, ["warning: {damaged}/run.json is damaged: wall_s is 'x', must be a number"]),
    ("report", "run.json", changed(privacy=[]), 0, ["warning: {damaged}/run.json is damaged: privacy is []"]),
    ("report", "ledgers/client_0000/journal", b"x", 0, ["warning: ledger-broken: {damaged}/ledgers/client_0000/journal"]),
    ("report", "ledgers/client_0000/ledger.jsonl", b"{}\n", 0, ["warning: ledger-broken: {damaged}/ledgers/client_0000/ledger.jsonl, line 0"]),
    ("compare", "run.json", b"{", 2, ["{damaged}: run.json is damaged"]),
    ("compare", "run.json", None, 2, ["{damaged} is not a run folder: it needs run.json"]),
    ("compare", "run.json", changed(state="running"), 2, ["{damaged} is interrupted after 2 rounds"]),
    ("compare", "run.json", changed(seed="x"), 2, ["{damaged}/run.json is damaged: seed is 'x'"]),
    ("compare", "run.json", changed(name=None), 2, ["{damaged}/run.json is damaged: name is None"]),
    ("compare", "config.yaml", b"a: [", 2, ["{damaged}: config.yaml is damaged"]),
    ("compare", "config.yaml", b"privacy: {epsilon: many}", 2, ["{damaged}/config.yaml, privacy is damaged: epsilon is 'many'"]),
    ("compare --fairness", "config.yaml", settings, 2, ["{damaged}/config.yaml is damaged: it has no section ledger"]),
    ("run --resume", "config.yaml", b"a: [", 2, ["{damaged}/config.yaml is not YAML"]),
    ("run --resume", "config.yaml", b"{}", 2, ["algorithm.name is missing"]),
    ("launch --on ray --resume", "placement.json", b"[]", 2, ["{damaged}/placement.json is damaged"]),
    ("launch --on ray --resume", "placement.json", b'{"on": "ray", "run": "x", "placed": 3}', 2, ["placed is 3, must be a list"]),
    ("inspect", "transcript.msgpack", b"\xc1" * 9, 3, ["transcript-broken: {damaged}/transcript.msgpack"]),
    ("report", "sweep.json", b"{", 2, ["{damaged} is not a sweep: it holds no readable sweep.json"]),
    ("report", "sweep.json", b'{"axes": {}, "cells": [1]}', 2, ["{damaged}/sweep.json is damaged: cell is 1, must be an object"]),
    ("compare", "sweep.json", b'{"axes": [], "cells": []}', 2, ["{damaged}/sweep.json is damaged: axes is []"]),
    ("compare", "sweep.json", b'{"axes": {}, "cells": [{}]}', 2, ["{damaged}/sweep.json, cells is damaged: folder is None"]),
]  # fmt: skip

TABLE = CONFIGURATIONS + DOCUMENTS + KEYS + ADDRESSES + OUTPUTS + FOLDERS + NUMBERS + NAMES


def test_there_are_many_cases():
    assert len(TABLE) + len(DAMAGED) >= 160
    assert len({line for line, _, _ in TABLE}) == len(TABLE)


def check(done: Any, code: int, words: list[str], places: dict[str, Any]) -> None:
    said = done.err or done.out
    assert done.code == code, said
    assert "Traceback" not in said
    assert [word for word in words if word.format(**places) not in said] == [], said
    assert all(line.startswith("error: ") or done.out for line in done.err.splitlines()), said


def test_diff_takes_folders_for_their_protocols(places, capsys):
    """Two runs are folders; it asked for files."""
    assert call(capsys, "diff", places["job"], places["protocol"]).out == "the same\n"
    check(call(capsys, "diff", places["job"], places["run"]), 3, ["roster: client 0: public_key"], places)


@pytest.mark.timeout(120, func_only=True)
@pytest.mark.parametrize(("line", "code", "words"), TABLE, ids=[line for line, _, _ in TABLE])
def test_a_bad_command_line_is_a_sentence(line, code, words, places, capsys):
    check(call(capsys, *(word.format(**places) for word in line.split())), code, words, places)


def test_a_coordinator_says_where_it_listens_and_who_is_missing(places, capsys):
    """It said nothing until the clients had joined or their time was over."""
    line = COORDINATOR + " --join-timeout 5.2 --pause 0 --operator-key {operator}"
    done = call(capsys, *(word.format(**places) for word in line.split()))
    listening, waiting, failed = done.err.splitlines()
    assert "listening at tcp://127.0.0.1:" in listening
    assert waiting.endswith("0 of 2 clients have joined: waiting up to 5.2 s for clients [0, 1]")
    assert (done.code, failed) == (4, "error: clients [0, 1] did not join within 5.2 s")


@pytest.mark.timeout(120, func_only=True)
@pytest.mark.parametrize(
    ("command", "name", "content", "code", "words"),
    DAMAGED,
    ids=[f"{command} {name} {number}" for number, (command, name, *_) in enumerate(DAMAGED)],
)
def test_a_damaged_run_folder_is_a_sentence(command, name, content, code, words, places, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(places["run"], folder)
    path = folder / name
    new = content(path.read_bytes()) if callable(content) else content
    if new is None:
        path.unlink()
    else:
        path.write_bytes(new)
    check(call(capsys, *command.split(), folder), code, words, {"damaged": folder})


CHANGED: list[tuple[str, str, str]] = [  # (text of config.yaml, its replacement, what is said)
    ("rounds: 2", "rounds: 5", "rounds: 5 here, 2 there"),
    ("lr: 0.5", "lr: 0.2", "local.lr: 0.2 here, 0.5 there"),
    ("seed: 0", "seed: 1", "seed: 1 here, 0 there"),
    ("name: digits-cnn", "name: linear", "model.name: 'linear' here, 'digits-cnn' there"),
    ("aggregators: 0", "aggregators: 2", "runtime.aggregators: other groups of clients here than there"),
    ("epsilon_by_client: {}", "epsilon_by_client: {1: 2}", "epsilon of client 1: 2.0 here, None there"),
    ("ledger:", "availability: {clients: {0: [[2, 2]]}}\nledger:", "availability of client 0: [(2, 2)] here, None there"),
]


@pytest.mark.parametrize(("old", "new", "said"), CHANGED, ids=[new for _, new, _ in CHANGED])
def test_a_run_does_not_resume_with_settings_that_its_signed_job_does_not_have(old, new, said, places, tmp_path, capsys):
    """It resumed with those of the job, and its page showed the others."""
    folder = tmp_path / "run"
    shutil.copytree(places["run"], folder)
    (folder / "run.json").unlink()
    path = folder / "config.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    check(call(capsys, "run", "--resume", folder), 2, [f"{path} is not the configuration of the signed job: {said}"], {})
    path.write_text(text.replace("quorum: 1.0", "quorum: 0.5"))  # not a part of the job
    assert call(capsys, "run", "--resume", folder).code == 0


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("account --json {fifo}", 2, ["cannot read {fifo}: is a named pipe"]),
        ("verify {run} --operator-key {binary}", 2, ["cannot read {binary}: not UTF-8 text"]),
        ("compare {run} --csv {full}", 4, ["{full}: no space left on the device"]),
    ],
)
def test_a_process_of_its_own_says_the_same(line, code, words, places):
    done = dpcfl(*(word.format(**places) for word in line.split()), timeout=120)
    assert done.returncode == code
    assert len(done.stderr.splitlines()) == 1
    assert [word for word in words if word.format(**places) not in done.stderr] == []


def test_a_full_disk_under_the_output_is_told_and_a_reader_that_left_is_not():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*DPCFL, "schema"], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (4, "error: output: no space left on the device\n")
    gone, unread = os.pipe()
    os.close(gone)
    with os.fdopen(unread, "w") as pipe:
        done = subprocess.run([*DPCFL, "schema"], stdout=pipe, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_full_disk_under_the_errors_too_leaves_the_exit_code():
    with Path("/dev/full").open("w") as full:
        for words, code in ((["schema"], 4), (["verify", "nowhere"], 2)):
            assert subprocess.run([*DPCFL, *words], stdout=full, stderr=full, cwd=ROOT, check=False).returncode == code


def test_a_full_disk_under_report_and_errors_leaves_what_a_run_says_after_the_warning(monkeypatch, capsys, tmp_path):
    config = write_config(tmp_path, rounds=2, model={"name": "linear"}, algorithm={"name": "global"})
    stopped = dpcfl_net.run(config, tmp_path, "in-process", callbacks=[lambda metrics: False], progress=False)

    def full(folder):
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    monkeypatch.setattr(page, "write_report", full)
    with Path("/dev/full").open("w", buffering=1) as errors, monkeypatch.context() as during:
        during.setattr(sys, "stderr", errors)
        with pytest.raises(SystemExit) as ended:
            cli.main(["run", "--resume", str(stopped.path)])
    assert ended.value.code == 4
    assert f"run folder: {stopped.path}\nreport:     not written" in capsys.readouterr().out


def test_a_run_whose_page_cannot_be_written_still_says_where_it_is(monkeypatch, capsys, tmp_path):
    config = write_config(tmp_path, rounds=2, model={"name": "linear"}, algorithm={"name": "global"})
    stopped = dpcfl_net.run(config, tmp_path, "in-process", callbacks=[lambda metrics: False], progress=False)
    (stopped.path / "report.html").mkdir()
    done = call(capsys, "run", "--resume", stopped.path)
    assert done.code == 4
    assert f"warning: cannot write {stopped.path}/report.html: it exists and is not a regular file" in done.err
    assert f"run folder: {stopped.path}\nreport:     not written" in done.out


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_of_the_help_that_left_is_not_told(unbuffered):
    gone, unread = os.pipe()
    os.close(gone)
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with os.fdopen(unread, "w") as pipe:
        done = subprocess.run([*DPCFL], stdout=pipe, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment, check=False)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize("step", ["prepare", "update"])
def test_a_run_whose_reader_has_left_is_interrupted(step, places, tmp_path, monkeypatch):
    def leave(self: running.Quiet, shown: object) -> None:
        raise SystemExit(1)  # as rich does after a broken pipe

    monkeypatch.setattr(running.Quiet, step, leave)
    folder, settings = tmp_path / "run", configuration.load(places["config"], ["runtime.federation=in-process"])
    folder.mkdir()
    with pytest.raises(SystemExit):
        running.run_in(folder, settings, running.Quiet(), running.RunOptions(in_calling_process=True))
    if step == "prepare":
        assert not folder.exists()  # it has no job that could be resumed
    else:
        assert json.loads((folder / "run.json").read_text())["state"] == "interrupted"


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("a bug"), KeyError("a bug"), OSError(9, "Bad file descriptor"), ValueError("x")]
)
def test_a_bug_shows_its_traceback(error, places, monkeypatch):
    """An error of the operating system without a path is not a user error."""

    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr(runs, "dry_run", broken)
    with pytest.raises(type(error)):
        cli.main(["run", str(places["config"]), "--dry-run"])


def test_ctrl_c_is_no_error(places, monkeypatch, capsys):
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "dry_run", stopped)
    done = call(capsys, "run", places["config"], "--dry-run")
    assert (done.code, done.err) == (130, "")


def test_control_characters_of_a_message_do_not_reach_the_terminal(capsys):
    done = call(capsys, "run", "\x1b[31mred\nsecond line.yaml")
    assert (done.code, done.err) == (2, "error: no such configuration file: ?[31mred second line.yaml\n")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the latter in the C locale
def test_a_character_that_the_terminal_lacks_is_a_question_mark(places, monkeypatch, errors):
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii", errors=errors))
    with pytest.raises(SystemExit) as left:
        cli.main(["watch", str(places["run"]), "--once"])
    assert (left.value.code, b" ? global" in printed.getvalue()) == (0, True)


def test_a_run_folder_without_ledgers_has_no_damaged_one(places, tmp_path, capsys):
    """Its clients never began, or keep their ledgers on their machines."""
    folder = tmp_path / "run"
    shutil.copytree(places["run"], folder)
    shutil.rmtree(folder / "ledgers/client_0001")
    assert "warning" not in call(capsys, "report", folder).out
    for path in (folder / "ledgers/client_0000").iterdir():  # control: an emptied ledger is damaged
        path.unlink() if path.is_file() else shutil.rmtree(path)
    assert "client_0000/journal is missing" in call(capsys, "report", folder).out


def test_a_line_that_a_crash_cut_is_left_out_and_not_continued(places, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(places["run"], folder)
    metrics = folder / "metrics.jsonl"
    rounds = json.loads((folder / "run.json").read_text())["rounds_done"]
    metrics.write_bytes(metrics.read_bytes() + b'{"view":"server","rou')
    book = runlog.Lines(metrics)
    book.write({"view": "server", "round": 9, "bytes_up": 1, "bytes_down": 1})
    book.close()
    assert call(capsys, "report", folder).code == 0
    assert rounds == 2
    assert json.loads((folder / "run.json").read_text())["rounds_done"] == 9
    assert "damaged line left out" in (folder / "report.html").read_text()


NOT_UTF8 = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


def test_a_name_that_is_not_in_the_encoding_of_the_system_is_a_sentence(tmp_path):
    """A configuration is UTF-8 on every system, and its name becomes that of a folder: it ended with a traceback."""
    config = write_config(tmp_path, **SMALL, name="läuf")
    done = subprocess.run(
        [*DPCFL, "run", config, "--out", tmp_path / "out"], capture_output=True, text=True, env=NOT_UTF8, check=False
    )
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("preparing: ")]  # of a step that takes long
    assert line.startswith("error: ")
    assert line.endswith("is not ASCII, the encoding of this system: set PYTHONUTF8=1")
