"""Configurations that are wrong in one place each: the command names the field and what is allowed, in one line, at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from cli_cases import call

# Every value is YAML text, so that a case can hold what no dumper would write.
GOOD: dict[str, Any] = {
    "name": "good",
    "seed": "0",
    "data": {"dataset": "digits", "clients": "[2, 2]", "shift": "rotation"},
    "model": {"name": "digits-cnn"},
    "rounds": "6",
    "local": {"epochs": "1", "batch_size": "32", "lr": "0.5", "clip": "1.0"},
    "privacy": {"epsilon": "5", "delta": "1e-4"},
    "algorithm": {"name": "r-dpcfl"},
}
CLIENT_LEVEL = {
    "privacy.unit": "client", "privacy.trust": "trusted-server", "privacy.adjacency": "replace-one",
    "algorithm.name": "dp-fedavg", "algorithm.sampling_rate": "1.0",
}  # fmt: skip

# (field, value, what the message says is allowed)
NUMBERS = [
    ("seed", "-1", "greater than or equal to 0"),
    ("seed", "9223372036854775808", "less than 9223372036854775808"),
    ("seed", "1.5", "valid integer"),
    ("rounds", "1", "greater than or equal to 2"),
    ("rounds", "0", "greater than or equal to 2"),
    ("rounds", "-3", "greater than or equal to 2"),
    ("rounds", "1000000000000", "less than or equal to 100000"),
    ("rounds", "1e12", "valid integer"),
    ("rounds", "6.5", "valid integer"),
    ("rounds", ".inf", "valid integer"),
    ("rounds", ".nan", "valid integer"),
    ("rounds", "true", "valid integer"),
    ("rounds", "null", "valid integer"),
    ("rounds", "many", "valid integer"),
    ("rounds", "1:30", "valid integer"),
    ("rounds", "[6]", "valid integer"),
    ("rounds", "{a: 6}", "valid integer"),
    ("local.epochs", "0", "greater than or equal to 1"),
    ("local.epochs", "1000000000", "less than or equal to 10000"),
    ("local.batch_size", "0", "greater than or equal to 1"),
    ("local.batch_size", "1000000000000000000", "less than or equal to 10000000"),
    ("local.batch_size", "719", "must not exceed the 718 records"),
    ("local.lr", "0", "greater than or equal to 0.000000001"),
    ("local.lr", "-0.1", "greater than or equal to 0.000000001"),
    ("local.lr", "1e-400", "greater than or equal to 0.000000001"),
    ("local.lr", "1e7", "less than or equal to 1000000"),
    ("local.lr", ".inf", "finite number"),
    ("local.lr", ".nan", "finite number"),
    ("local.lr", "1:30", "valid number"),
    ("local.lr", "fast", "valid number"),
    ("local.clip", "0", "greater than or equal to 0.000000001"),
    ("local.clip", "1e10", "less than or equal to 1000000000"),
    ("local.clip", ".inf", "finite number"),
    ("local.momentum", "1", "less than 1"),
    ("local.momentum", "-0.1", "greater than or equal to 0"),
    ("local.momentum", "0.9", "must be 0"),
    ("local.weight_decay", "-1", "greater than or equal to 0"),
    ("local.weight_decay", "1e9", "less than or equal to 1000000"),
    ("privacy.epsilon", "0", "greater than or equal to 0.000000001"),
    ("privacy.epsilon", "-5", "greater than or equal to 0.000000001"),
    ("privacy.epsilon", "1e300", "less than or equal to 100000"),
    ("privacy.epsilon", ".inf", "for a baseline with almost no noise: privacy.epsilon=10000 runtime.max_epsilon=10000"),
    ("privacy.epsilon", "inf", "for a baseline with almost no noise"),
    ("privacy.epsilon", "null", "must be a number from 0.000000001 to 100,000"),
    ("privacy.epsilon", ".nan", "finite number"),
    ("privacy.epsilon", "five", "valid number"),
    ("privacy.delta", "0", "greater than 0"),
    ("privacy.delta", "1", "less than 1"),
    ("privacy.delta", ".nan", "finite number"),
    ("privacy.delta", "1e-4x", "valid number"),
    ("privacy.delta", "'1e-4'", "is '1e-4': must be a valid number; write it without quotes"),
    ("rounds", "'6'", "must be a valid integer; write it without quotes"),
    ("rounds", "6\xa0", r"is '6\xa0': must be a valid integer" + "\n"),
    ("rounds", "\N{FULLWIDTH DIGIT SIX}", "must be a valid integer\n"),
    ("data.clients", "[1000000000]", "at most 1,000,000"),
    ("data.clients", "[]", "at least 1"),
    ("data.clients", "[0, 2]", "from 1 on"),
    ("data.clients", "[-1]", "from 1 on"),
    ("data.clients", "[1.5]", "valid integer"),
    ("data.clients", "4", "must be a list"),
    ("data.clients", "[1438, 2]", "cannot share 1437 training images"),
    ("data.train_per_client", "0", "greater than or equal to 1"),
    ("data.train_per_client", "719", "the largest possible is 718"),
    ("data.train_per_client", "1000000000000", "less than or equal to 100000000"),
    ("data.test_per_client", "361", "more than the 360 test images"),
    ("data.validation", "1", "less than 1"),
    ("data.validation", ".nan", "finite number"),
    ("data.validation", "0.0001", "takes 0 of a client's 718"),
    ("data.alpha", "1e-9", "greater than or equal to 0.001"),
    ("data.noise", "1e7", "less than or equal to 1000000"),
    ("runtime.slots", "0", "greater than or equal to 1, or 'auto'"),
    ("runtime.slots", "1.5", "valid integer, or 'auto'"),
    ("runtime.slots", "1000000000", "less than or equal to 10000, or 'auto'"),
    ("runtime.slots_per_gpu", "0", "greater than or equal to 1"),
    ("runtime.gpu_memory_fraction", "1.5", "less than or equal to 1"),
    ("runtime.round_timeout_s", ".inf", "finite number"),
    ("runtime.round_timeout_s", "0", "greater than 0"),
    ("runtime.join_timeout_s", ".nan", "finite number"),
    ("runtime.join_timeout_s", "1e9", "less than or equal to 1000000"),
    ("runtime.orphan_timeout_s", "-1", "greater than 0"),
    ("runtime.quorum", "0", "greater than 0"),
    ("runtime.quorum", "1.5", "less than or equal to 1"),
    ("runtime.max_restarts", "-1", "greater than or equal to 0"),
    ("runtime.max_restarts", "1000000", "less than or equal to 1000"),
    ("runtime.max_live_workers", "0", "greater than or equal to 1"),
    ("runtime.max_live_workers", "1000000000", "less than or equal to 10000"),
    ("runtime.clients_per_worker", "10000000", "less than or equal to 1000000"),
    ("output.keep_checkpoints", "0", "greater than or equal to 1"),
    ("output.evaluate_every", "1000000", "less than or equal to 100000"),
    ("audit.canaries", "-1", "greater than or equal to 0"),
    ("audit.canaries", "1000000000000", "less than or equal to 1000000"),
    ("audit.client", "-1", "greater than or equal to 0, or 'all'"),
    ("ledger.budget", "{epsilon: .inf, delta: 1e-3}", "ledger.budget.epsilon is inf: must be a finite number"),
    ("ledger.budget", "{epsilon: 5, delta: 1}", "ledger.budget.delta is 1: must be less than 1"),
    ("algorithm.clusters", "0", "must be 1 to the number of clients, 4"),
    ("algorithm.clusters", "5", "must be 1 to the number of clients, 4"),
    ("algorithm.clusters", "1e18", "valid integer, or 'auto'"),
    ("algorithm.max_clusters", "65", "less than or equal to 64"),
    ("algorithm.selection.rounds_fraction", "0.6", "less than or equal to 0.5"),
    ("algorithm.selection.budget_fraction", ".nan", "finite number"),
]

# (field, value, words): what is no number.
WORDS = [
    ("name", "''", ["name is ''", "1 to 100 bytes"]),
    ("name", "..", ["name is '..'", "without slashes"]),
    ("name", "../../etc", ["name is '../../etc'", "without slashes"]),
    ("name", "a/b", ["name is 'a/b'", "without slashes"]),
    ("name", "a\\b", ["name is", "without slashes"]),
    ("name", '"a\\tb"', ["name is", "control characters"]),
    ("name", '"a\\0b"', ["null character"]),
    ("name", "-rf", ["name is '-rf'", "not starting with"]),
    ("name", "' x'", ["name is ' x'", "outer spaces"]),
    ("name", "x" * 101, ["name is 'xxx", "1 to 100 bytes"]),
    ("name", "2024", ["name is 2024", "put it in quotes"]),
    ("name", "null", ["name is null", "must be text"]),
    ("name", "[a]", ["name is ['a']", "must be text"]),
    ("data.dataset", "fashion_mnist", ["data.dataset is 'fashion_mnist'", "did you mean 'fashion-mnist'?"]),
    ("data.dataset", "mnits", ["must be one of digits", "did you mean 'mnist'?"]),
    ("data.dataset", "imagenet", ["data.dataset is 'imagenet'", "must be one of digits, mnist"]),
    ("data.dataset", "nosuch:load", ["data.dataset is 'nosuch:load'", "no module 'nosuch'"]),
    ("data.dataset", "numpy:nothing", ["data.dataset is 'numpy:nothing'", "has no 'nothing'"]),
    ("data.dataset", "os:system", ["data.dataset is 'os:system'", "os is a module of Python; name a function of your own"]),
    ("model.name", "subprocess:call", ["model.name is 'subprocess:call'", "subprocess is a module of Python"]),
    ("algorithm.name", "os.path:join", ["algorithm.name is 'os.path:join'", "os is a module of Python"]),
    ("data.dataset", "'json:'", ["data.dataset is 'json:'", "package.module:function"]),
    ("data.dataset", "3", ["data.dataset is 3", "must be text"]),
    ("data.clients", "[2, 2, 2, 2, 2]", ["at most 4 different clusters", "clients has 5"]),
    ("data.alpha", "0.3", ["alpha belongs to partition 'dirichlet'"]),
    ("data.shift", "rotate", ["data.shift is 'rotate'", "'rotation'"]),
    ("data.partition", "iid", ["data.partition is 'iid'", "'equal', 'dirichlet', 'roles' or 'natural'"]),
    ("data.sha256", "abc", ["data.sha256 is 'abc'", "must match ^[0-9a-f]{64}$"]),
    ("data.root", "5", ["data.root is 5", "must be text"]),
    ("data.root", "''", ["data.root is ''", "must have at least 1 character"]),
    ("ledger.root", "''", ["ledger.root is ''", "must have at least 1 character"]),
    ("data", "digits", ["data is 'digits'", "a section of keys and values"]),
    ("model.name", "cn", ["model.name is 'cn'", "did you mean 'cnn'?"]),
    ("model.name", "digits_cnn", ["did you mean 'digits-cnn'?"]),
    ("model.name", "char-lstm", ["model.name is 'char-lstm'"]),
    ("algorithm.name", "r-dpfcl", ["algorithm.name is 'r-dpfcl'", "did you mean 'r-dpcfl'?"]),
    ("algorithm.name", "R_DPCFL", ["did you mean 'r-dpcfl'?"]),
    ("algorithm.name", "gobal", ["did you mean 'global'?"]),
    ("algorithm.name", "dpifca", ["did you mean 'dp-ifca'?"]),
    ("algorithm.name", "sgd", ["algorithm.name is 'sgd'", "must be one of dp-fedavg"]),
    ("algorithm.name", "numpy:ndarray", ["must be a class derived from"]),
    ("algorithm.name", "dp-ifca", ["algorithm.clusters is missing", "algorithms: {dp-ifca: {clusters: 4}}", "algorithm.clusters=4"]),
    ("algorithm", "7", ["algorithm is 7", "a section of keys and values"]),
    ("algorithm", "{clusters: 4}", ["algorithm.name is missing", "must be one of dp-fedavg"]),
    ("local.sampling", "shuffle", ["local.sampling is 'shuffle'", "'poisson' or 'allocation'"]),
    ("algorithm.clustering.space", "pca", ["algorithm.clustering.space is 'pca'", "'spectral'"]),
    ("algorithm.warm_start", "yes", ["algorithm.warm_start is 'yes'", "must be true or false"]),
    ("algorithm.warm_start", "on", ["algorithm.warm_start is 'on'", "must be true or false"]),
    ("q", "5", ["unknown key 'q': must be one of name, seed, data"]),
    ("local.b", "5", ["unknown key 'local.b': must be one of epochs, batch_size, lr"]),
    ("algorithm.cluster", "4", ["unknown key 'algorithm.cluster'", "did you mean 'algorithm.clusters'?"]),
    ("algorithm.epsilonn", "5", ["unknown key 'algorithm.epsilonn'", "did you mean 'privacy.epsilon'?"]),
    ("algorithm.tilt", "5", ["unknown key 'algorithm.tilt'", "an option of em-fdro"]),
    ("algorithm.zzz", "5", ["unknown key 'algorithm.zzz'", "must be one of asynchronous, weights, clusters, max_clusters"]),
    ("algorithms", "[r-dpcfl]", ["algorithms is ['r-dpcfl']", "a section of keys and values"]),
    ("algorithms.golbal", "{}", ["unknown algorithm 'algorithms.golbal'", "did you mean 'global'?"]),
    ("algorithms.local", "5", ["algorithms.local is 5", "a section of keys and values"]),
    ("algorithms.local.local", "5", ["algorithms.local.local is 5", "a section of keys and values"]),
    ("algorithms.local.local.lr", "-1", ["algorithms.local.local.lr is -1", "greater than or equal to 0.000000001"]),
    ("algorithms.local.local.rl", "1", ["unknown key 'algorithms.local.local.rl'", "did you mean 'algorithms.local.local.lr'?"]),
    ("algorithms.dp-ifca.clusters", "0", ["algorithms.dp-ifca.clusters is 0", "greater than or equal to 1"]),
    ("rouds", "5", ["unknown key 'rouds'", "did you mean 'rounds'?"]),
    ("epsilon", "5", ["unknown key 'epsilon'", "did you mean 'privacy.epsilon'?"]),
    ("Privacy", "{}", ["unknown key 'Privacy'", "did you mean 'privacy'?"]),
    ("privacy.detla", "1e-5", ["unknown key 'privacy.detla'", "did you mean 'privacy.delta'?"]),
    ("local.learning_rate", "0.1", ["unknown key 'local.learning_rate'", "must be one of epochs, batch_size, lr"]),
    ("privacy", "5", ["privacy is 5", "a section of keys and values"]),
    ("privacy.unit", "smaple", ["privacy.unit is 'smaple'", "'sample' or 'client'"]),
    ("privacy.adjacency", "add", ["privacy.adjacency is 'add'", "'zero-out' or 'replace-one'"]),
    ("privacy.accountant", "gdp", ["privacy.accountant is 'gdp'", "'pld' or 'rdp'"]),
    ("privacy.noise", "none", ["privacy.noise is 'none'", "'os' or 'seeded'"]),
    ("privacy.trust", "trusted-server", ["privacy.trust 'trusted-server'", "works with unit sample and trust untrusted-server"]),
    ("runtime.federation", "inprocess", ["runtime.federation is 'inprocess'", "'network' or 'in-process'"]),
    ("runtime.device", "tpu", ["runtime.device is 'tpu'", "auto|cpu|cuda"]),
    ("runtime.gpus", "[0]", ["runtime.gpus.0 is 0", "put it in quotes"]),
    ("runtime.transport.security", "tls", ["runtime.transport.security is 'tls'", "'curve' or 'none'"]),
    ("runtime.transport", "curve", ["runtime.transport is 'curve'", "a section of keys and values"]),
    ("output.transcript", "no", ["output.transcript is 'no'", "'off', 'headers' or 'full'"]),
    ("output.transcript", "all", ["output.transcript is 'all'", "'off', 'headers' or 'full'"]),
    ("ledger.scope", "dataset", ["ledger.root is missing", "needs a folder"]),
    ("ledger.budget", "5", ["ledger.budget is 5", "a section of keys and values"]),
    ("ledger.budget", "{epsilon: 5, delta: 1e-3}", ["belong to scope dataset"]),
    ("ledger.budget", "{epsilon: 5}", ["ledger.budget.delta is missing"]),
]  # fmt: skip

# (changes, words): settings that each pass alone.
TOGETHER = [
    ({"network.clock": "virtual"}, ["network.clock is 'virtual'", "runtime.federation must be 'in-process', got 'network'"]),
    (
        {"network.clock": "virtual", "runtime.federation": "in-process", "network.cores": "0"},
        ["network.cores is 0", "greater than or equal to 1"],
    ),
    (
        {"network.clock": "virtual", "runtime.federation": "in-process", "network.clients": "{9: {compute_factor: 2.0}}"},
        ["network.clients.9", "must be 0 to 3"],
    ),
    (
        {"network.how": "relay", "network.clients": "{2: {compute_factor: 2.0}}"},
        ["network.clients.2.compute_factor is 2", "belongs to network.clock virtual"],
    ),
    ({"network.how": "relay", "runtime.federation": "in-process"}, ["network.how is 'relay'", "must be 'network'"]),
    ({"network.default": "4g"}, ["network.how is missing", "'relay' or 'netem'", "network.clock 'virtual'"]),
    ({"network.how": "relay", "network.cores": "2"}, ["network.cores is 2", "belongs to network.clock virtual"]),
    ({"network.how": "relay", "network.clients": "{9: 4g}"}, ["network.clients.9", "must be 0 to 3"]),
    ({"network.how": "relay", "network.trace": "~nobody-here/a.csv"}, ["network.trace", "~nobody-here is not a known home folder"]),
    ({"ledger.scope": "dataset", "ledger.root": "~nobody-here/book"}, ["ledger.root", "~nobody-here is not a known home folder"]),
    ({"data.dataset": "mnist", "data.root": "~nobody-here/data"}, ["data.root", "~nobody-here is not a known home folder"]),
    (
        {"data.dataset": "npz", "data.files": "{path: ~nobody-here/a.npz}"},
        ["data.files.path", "~nobody-here is not a known home folder"],
    ),
    ({"network.how": "relay", "network.trace": "nowhere.csv"}, ["network.trace", "nowhere.csv"]),
    ({"rounds": "100000"}, ["rounds is 100000", "must be at most 500,000"]),
    (
        {"data.sizes": "[300, 32, 32, 32]", "local.epochs": "10000"},
        ["local.epochs 10000", "a client of 300 records", "must be at most 500,000"],
    ),
    (
        {"data.clients": "[400, 400]", "rounds": "5000", "local.batch_size": "1"},
        ["rounds is 5000", "times 800 clients", "must be at most 2,000,000"],
    ),
    ({"runtime.federation": "in-process", "output.transcript": "headers"}, ["output.transcript must be off"]),
    ({"runtime.federation": "in-process", "runtime.device": "cuda"}, ["runtime.device is 'cuda'", "must be auto or cpu, and empty"]),
    (
        {"network.clock": "virtual", "runtime.federation": "in-process", "algorithm": "{name: global, asynchronous: {buffer: 2}}"},
        ["network.clock is 'virtual'", "must be null, since it has separate virtual `durations`"],
    ),
    (
        {"availability.clients": "{3: [[1, 5]]}", "algorithm": "{name: global, asynchronous: {buffer: 2}}"},
        ["must be null, since asynchronous clients have no common rounds"],
    ),
    ({"runtime.gpus": "[GPU-1]", "runtime.device": "cpu"}, ["runtime.gpus is ['GPU-1']", "must be cuda or auto"]),
    ({"privacy.adjacency": "replace-one", "privacy.accountant": "rdp"}, ["privacy.accountant is 'rdp'", "no bound under replace-one, use 'pld'"]),
    ({"algorithm.name": "em-fdro", "algorithm.clients_per_round": "2"}, ["data.validation is 0", "data: {validation: 0.1}", "data.validation=0.1"]),
    ({"algorithm.name": "em-fdro", "data.validation": "0.1"}, ["algorithm.clients_per_round is 20", "at most the number of clients, 4"]),
    ({"algorithm.name": "dp-ifca", "algorithm.clusters": "9"}, ["algorithm.clusters is 9", "at most the number of clients, 4"]),
    (
        {"algorithm.clusters": "2", "algorithm.max_clusters": "6"},
        ["algorithm.max_clusters is 6: must be 8 (the default) with clusters 2, where it has no effect"],
    ),
    (
        {"algorithm.clusters": "1", "algorithm.selection.rounds_fraction": "0.2"},
        ["algorithm.selection.rounds_fraction is 0.2: must be 0.1 (the default) with clusters 1, where it has no effect"],
    ),
    (
        {"rounds": "2", "algorithm.selection.budget_fraction": "0.01"},
        ["algorithm.selection.budget_fraction is 0.01: must be 0.03 (the default) with rounds 2, where it has no effect"],
    ),
    (
        {"algorithm.name": "rc-dpfl", "algorithm.clusters": "2", "algorithm.max_clusters": "6"},
        ["algorithm.max_clusters is 6: must be 8 (the default) with clusters 2"],
    ),
    (
        {"algorithm.name": "f-cdpfl", "algorithm.clusters": "2", "algorithm.budget_fraction": "0.02"},
        ["algorithm.budget_fraction is 0.02: must be 0.01 (the default) with select argmin, where it has no effect"],
    ),
    ({"algorithm.name": "mr-mtl", "algorithm.lam": "100"}, ["algorithm.lam is 100", "below 2"]),
    ({"audit.canaries": "5", "output.transcript": "off"}, ["audit.canaries is 5", "must be 'full'"]),
    ({"audit.canaries": "5", "output.transcript": "full", "audit.client": "9"}, ["audit.client is 9", "must be 0 to 3, or all"]),
    ({"data.evaluate": "validation"}, ["evaluate is 'validation'", "data.validation=0.2"]),
    ({"data.partition": "dirichlet", "data.shift": "none"}, ["alpha belongs to partition 'dirichlet'"]),
    ({"data.partition": "roles", "data.shift": "none"}, ["'roles'", "'shakespeare'"]),
    ({"data.dataset": "regression"}, ["'line'", "'regression'"]),
    (
        {**CLIENT_LEVEL, "privacy.adjacency": "zero-out", "algorithm.sampling_rate": "0.1"},
        ["algorithm.sampling_rate is 0.1", "less than one of 4 clients"],
    ),
    (
        {"algorithm.name": "dp-fedavg", "algorithm.sampling_rate": "1.0"},
        ["privacy.unit is 'sample'", "works with unit client and trust trusted-server"],
    ),
    ({**CLIENT_LEVEL, "algorithm.sampling_rate": "0.3"}, ["algorithm.sampling_rate is 0.3", "not a whole number"]),
    ({**CLIENT_LEVEL, "algorithm.server_lr": ".inf"}, ["algorithm.server_lr is inf", "finite number"]),
    ({"privacy.epsilon": "1e-300"}, ["privacy.epsilon is 1e-300", "greater than or equal to 0.000000001"]),
    ({"privacy.delta": "1e-300"}, ["delta 1e-300", "use a larger one"]),
    ({"algorithm.selection": "{rounds_fraction: 0.5, budget_fraction: 0.9}"}, ["privacy.epsilon is 5", "the selections and labels alone spend"]),
]  # fmt: skip

LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join(['*' + old] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
# (text of the file, words)
TEXTS = [
    ("", ["must hold a mapping"]),
    ("just words", ["must hold a mapping"]),
    ("- a\n- b\n", ["must hold a mapping"]),
    ("7", ["must hold a mapping"]),
    ("{}", ["algorithm.name is missing", "name is missing", "data is missing", "rounds is missing", "privacy is missing"]),
    ("a: [1, 2", ["is not YAML", "in line 1"]),
    ("a: 1\n  b: 2\n", ["is not YAML", "in line 2"]),
    ("a:\n\t- 1\n", ["is not YAML: a tab where YAML allows only spaces in line 2"]),
    ("a: @b", ["is not YAML", "in line 1"]),
    ("a: 'b", ["is not YAML"]),
    ("\0", ["is not YAML", "character #x0000"]),
    ("a: \x1b[31m", ["is not YAML", "character #x001b"]),
    ("name: a\nseed: 1\nname: b\n", ["line 3", "key 'name' is given twice, first in line 1"]),
    ("privacy: {epsilon: 1, delta: 1e-4, epsilon: 2}", ["line 1", "key 'epsilon' is given twice"]),
    ("name: a\n---\nname: b\n", ["line 2", "a second document begins"]),
    ("a: *b", ["line 1", "alias *b"]),
    ("a: &a [*a]", ["line 1", "alias *a"]),
    (LAUGHS, ["more than 50,000 values, aliases expanded"]),
    ("a: " + "[" * 100_000, ["line 1", "nested more than 32 deep"]),
    ("\n".join(f"{' ' * k}a:" for k in range(60)), ["nested more than 32 deep"]),
    ("a: !!python/object/apply:os.system [x]", ["line 1", "tag", "is not allowed"]),
    ("a: !secret x", ["line 1", "tag '!secret' is not allowed"]),
    ("? [a]\n: b\n", ["line 1", "a key must be text"]),
    ("<<: 5", ["line 1", "<< must be followed by a mapping"]),
    ("# " + "x" * (1 << 20), ["larger than 1,048,576 bytes"]),
    ("seed: " + "1" * 200, ["line 1", "a number of 200 digits; at most 100"]),
    ("seed: 1e999", ["line 1", "'1e999' is beyond the largest number"]),
]


def changed(changes: Mapping[str, str]) -> str:
    """GOOD with some dotted keys changed, as YAML in one line for each key at the top."""
    tree: dict[str, Any] = {name: dict(part) if isinstance(part, dict) else part for name, part in GOOD.items()}
    for dotted, text in changes.items():
        *path, last = dotted.split(".")
        at = tree
        for part in path:
            at = at.setdefault(part, {})
        at[last] = text
    return "".join(f"{name}: {_written(part)}\n" for name, part in tree.items())


def _written(part: Any) -> str:
    return (
        "{" + ", ".join(f"{name}: {_written(value)}" for name, value in part.items()) + "}" if isinstance(part, dict) else part
    )


CASES = [
    *(pytest.param(changed({field: value}), 1, [field, words], id=f"{field}={value:.20}") for field, value, words in NUMBERS),
    *(pytest.param(changed({field: value}), 1, words, id=f"{field}={value:.20}") for field, value, words in WORDS),
    *(pytest.param(changed(changes), 1, words, id=" ".join(changes)) for changes, words in TOGETHER),
    *(pytest.param(text, len(words) if text == "{}" else 1, words, id=f"text {text:.20}") for text, words in TEXTS),
]


def test_there_are_many_cases_and_the_base_of_all_is_good(tmp_path, capsys):
    assert len(CASES) >= 150
    assert len({case.values[0] for case in CASES}) == len(CASES)
    path = tmp_path / "good.yaml"
    path.write_text(changed({}))
    assert call(capsys, "run", path, "--dry-run").code == 0


@pytest.mark.timeout(120, func_only=True)
@pytest.mark.parametrize(("text", "problems", "words"), CASES)
def test_a_bad_configuration_is_refused_by_name(text, problems, words, tmp_path, capsys):
    path = tmp_path / "bad.yaml"
    path.write_text(text, encoding="utf-8")
    done = call(capsys, "run", path, "--dry-run")
    assert done.code == 2, done.err
    lines = done.err.splitlines()
    assert len(lines) == problems, done.err
    assert all(line.startswith("error: ") and len(line) < 1_000 for line in lines), done.err
    assert [word for word in words if word not in done.err] == [], done.err
    assert done.out == ""


def test_unknown_data_sets_and_models_are_reported_with_the_other_mistakes_and_a_data_set_alone_with_its_files(
    tmp_path, capsys
):
    path = tmp_path / "bad.yaml"
    path.write_text(changed({"data.dataset": "csv", "data.files": "{path: x}"}))
    (line,) = call(capsys, "run", path, "--dry-run").err.splitlines()
    assert line.startswith("error: data.dataset is 'csv': must be one of digits, ")
    path.write_text(changed({"data.dataset": "mnits", "data.nois": "1", "rounds": "1", "model.name": "cnnn"}))
    *_, line, last = lines = call(capsys, "run", path, "--dry-run").err.splitlines()
    assert len(lines) == 4
    assert "did you mean 'mnist'?" in line
    assert "did you mean 'cnn'?" in last


def test_all_mistakes_of_a_file_come_at_once(tmp_path, capsys):
    path = tmp_path / "bad.yaml"
    path.write_text(changed({"rounds": "1", "privacy.detla": "1", "local.lr": ".nan", "algorithm.cluster": "2"}))
    assert len(call(capsys, "run", path, "--dry-run").err.splitlines()) == 4
