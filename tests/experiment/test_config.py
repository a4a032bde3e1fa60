"""Configurations: every mistake named at once, overrides, resolved copies that are configurations again."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import ROOT, SMALL, write_config
from hypothesis import given, settings
from hypothesis import strategies as st

from dpcfl_net.algorithms.base import registry
from dpcfl_net.algorithms.client_level import ClientLevel
from dpcfl_net.core.errors import ConfigError, DataMissing
from dpcfl_net.experiment import config, config_schema
from dpcfl_net.experiment.packaged import packaged, packaged_names


def problems(**changes) -> list[str]:
    document = copy.deepcopy(SMALL)
    for dotted, value in changes.items():
        *path, last = dotted.split("__")
        at = document
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    with pytest.raises(ConfigError) as caught:
        config.resolve(document)
    return caught.value.problems


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"privacy__delta": 1.0}, ["privacy.delta is 1.0", "less than 1"]),
        ({"privacy__delta": 0}, ["privacy.delta is 0", "greater than 0"]),
        ({"privacy__epsilon": 0}, ["privacy.epsilon is 0", "greater than or equal to 0.000000001"]),
        ({"privacy__epsilon": -2.5}, ["privacy.epsilon is -2.5"]),
        ({"privacy__epsilon": float("nan")}, ["privacy.epsilon is nan"]),
        ({"rounds": 1}, ["rounds is 1", "greater than or equal to 2"]),
        ({"rounds": "many"}, ["rounds is 'many'", "valid integer"]),
        ({"algorithm__clusters": 9}, ["algorithm.clusters is 9", "number of clients, 8"]),
        ({"local__batch_size": 701}, ["local.batch_size is 701", "700 records"]),
        ({"local__lr": 0}, ["local.lr is 0"]),
        ({"data__train_per_client": 5000}, ["data.train_per_client", "718"]),
        ({"data__clients": []}, ["data.clients"]),
        ({"data__dataset": "fashion_mnist"}, ["data.dataset is 'fashion_mnist'", "did you mean 'fashion-mnist'"]),
        ({"model__name": "cn"}, ["model.name is 'cn'", "did you mean 'cnn'"]),
        ({"algorithm__name": "r-dpcf"}, ["algorithm.name is 'r-dpcf'", "did you mean 'r-dpcfl'"]),
        ({"algorithm__epsilonn": 5}, ["unknown key 'algorithm.epsilonn', did you mean 'privacy.epsilon'?"]),
        ({"privacy__epsilonn": 5}, ["unknown key 'privacy.epsilonn', did you mean 'privacy.epsilon'?"]),
        ({"algorithms__golbal": {}}, ["unknown algorithm 'algorithms.golbal'", "did you mean 'global'"]),
        ({"runtime__slots": 0}, ["runtime.slots is 0"]),
        ({"ledger__scope": "dataset", "privacy": {"epsilon": 5, "delta": 1e-4}}, ["ledger.root is missing"]),
        ({"privacy__noise": "none"}, ["privacy.noise is 'none'", "'os' or 'seeded'"]),
        ({"privacy__adjacency": "add"}, ["'zero-out' or 'replace-one'"]),
    ],
)
def test_every_mistake_is_named(changes, words):
    found = problems(**changes)
    assert len(found) == 1, found
    assert [word for word in words if word not in found[0]] == []


def test_all_mistakes_come_at_once():
    found = problems(rounds=0, privacy__delta=3, privacy__epsilo=1, local__clip=-1, algorithm__windows=2)
    assert len(found) == 5


def test_impossible_settings_come_at_once_too():
    found = problems(algorithm__clusters=9, local__batch_size=9999, model__name="cnnn")
    assert len(found) == 3


def test_replace_one_by_rdp_is_refused():
    assert "pld" in problems(privacy__adjacency="replace-one", privacy__accountant="rdp")[0]


def test_overrides_and_sections_by_algorithm(tmp_path):
    document = {**SMALL, "algorithm": {"name": "r-dpcfl"}}
    document["algorithms"] = {"r-dpcfl": {"clusters": 4}, "local": {"local": {"lr": 0.05}}}
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(document))
    assert config.load(path).options.clusters == 4
    assert config.load(path, ["algorithm.clusters=auto"]).options.clusters == "auto"
    local = config.load(path, ["algorithm.name=local", "privacy.epsilon=3"])
    assert (local.local.lr, local.privacy.epsilon) == (0.05, 3)
    assert config.load(path).local.lr == 0.5
    with pytest.raises(ConfigError, match="key=value"):
        config.load(path, ["privacy.epsilon"])
    with pytest.raises(ConfigError, match="'rounds' is a value"):
        config.load(path, ["rounds.more=3"])


def test_an_override_that_another_section_outweighs_is_refused_and_names_it(tmp_path):
    document = {**SMALL, "algorithm": {"name": "r-dpcfl", "clusters": 3}}
    document["algorithms"] = {"r-dpcfl": {"local": {"lr": 0.05}}, "local": {"local": {"lr": 0.2}}}
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(ConfigError) as caught:
        config.load(path, ["local.lr=0.7", "algorithms.r-dpcfl.clusters=4", "local.batch_size=16"])
    assert caught.value.problems == [
        "local.lr is 0.7: it has no effect, since algorithms.r-dpcfl.local.lr is 0.05; set algorithms.r-dpcfl.local.lr",
        "algorithms.r-dpcfl.clusters is 4: it has no effect, since algorithm.clusters is 3; set algorithm.clusters",
    ]
    with pytest.raises(ConfigError, match=r"algorithms\.local\.local\.lr is 0\.2"):
        config.load(config.load(path), {"algorithm": "local", "local.lr": 0.7})
    assert config.load(path, ["algorithms.r-dpcfl.local.lr=0.7", "algorithm.clusters=4"]).local.lr == 0.7
    assert config.load(path, ["local.lr=0.05"]).local.lr == 0.05
    assert config.load(path, ["algorithm=global", "local.lr=0.7"]).local.lr == 0.7


def test_an_option_of_the_source_that_an_override_leaves_without_effect_has_its_default():
    document = {
        **SMALL,
        "algorithm": {"name": "r-dpcfl", "max_clusters": 6},
        "algorithms": {"r-dpcfl": {"selection": {"budget_fraction": 0.01}}},
    }
    for source in (document, config.load(document)):
        assert config.load(source, ["algorithm.clusters=2"]).options.max_clusters == 8
        one = config.load(source, {"algorithm.clusters": 1, "algorithm.selection.rounds_fraction": 0.1})
        assert (one.options.max_clusters, one.options.selection.budget_fraction) == (8, 0.03)
        assert config.load(source, ["seed=3"]).options.max_clusters == 6
        with pytest.raises(ConfigError, match=r"max_clusters is 7: must be 8 \(the default\) with clusters 2"):
            config.load(source, ["algorithm.clusters=2", "algorithm.max_clusters=7"])


def test_missing_data_are_the_problem_and_not_an_option_that_an_override_leaves_without_effect(tmp_path, monkeypatch):
    monkeypatch.delenv("DPCFL_DATA", raising=False)
    data = {"dataset": "mnist", "root": str(tmp_path), "clients": [2, 2]}
    document = {**SMALL, "data": data, "algorithm": {"name": "r-dpcfl", "max_clusters": 6}}
    with pytest.raises(DataMissing):
        config.load(document, ["algorithm.clusters=2"])


def test_an_option_without_effect_in_the_source_is_refused_with_any_override():
    document = {**SMALL, "algorithm": {"name": "r-dpcfl", "clusters": 2, "max_clusters": 6}}
    for changes in ([], ["seed=3"], ["algorithm.clusters=3"]):
        with pytest.raises(ConfigError, match=r"max_clusters is 6: must be 8 \(the default\) with clusters"):
            config.load(document, changes)


def test_an_override_names_the_section_of_an_own_algorithm(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_study").mkdir()
    (tmp_path / "own_study" / "rounds.py").write_text(
        "from dpcfl_net.algorithms import base, global_model\n"
        "class Own(global_model.Global):\n"
        "    class Options(base.Options):\n"
        "        share: float = 0.5\n"
    )
    name = "own_study.rounds:Own"
    document = {**SMALL, "algorithm": {"name": name}, "algorithms": {name: {"share": 0.1, "local": {"lr": 0.05}}}}
    for changes in (
        [f"algorithms.{name}.share=0.2", f"algorithms.{name}.local.lr=0.7"],
        {"algorithms": {name: {"share": 0.2, "local": {"lr": 0.7}}}},
    ):
        found = config.load(document, changes)
        assert (found.algorithm["share"], found.local.lr) == (0.2, 0.7)
    with pytest.raises(ConfigError, match=r"did you mean 'algorithm\.share'"):
        config.load(document, [f"algorithms.{name}.shar=0.2"])


def test_numbers_with_an_exponent_are_numbers_in_a_file_and_on_the_command_line(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({**SMALL, "local": {}}).replace("local: {}", "local: {lr: 1e-1}"))
    found = config.load(path, ["privacy.delta=1e-5", "output.transcript=off"])
    assert (found.local.lr, found.privacy.delta, found.output.transcript) == (0.1, 1e-5, "off")


def test_in_process_turns_the_transcript_off_where_nothing_else_was_said(tmp_path):
    path = write_config(tmp_path, output={"keep_checkpoints": 3})
    found = config.load(path, ["runtime.federation=in-process"])
    assert (found.output.transcript, found.output.keep_checkpoints) == ("off", 3)
    assert config.load(path).output.transcript == "headers"
    for said in ("headers", "full"):
        with pytest.raises(ConfigError, match=r"output\.transcript must be off"):
            config.load(path, ["runtime.federation=in-process", f"output.transcript={said}"])


@pytest.mark.parametrize(
    ("changes", "section", "default"),
    [
        ({"runtime": {"federation": "in-process"}}, "output", "transcript"),
        ({"runtime": {"aggregators": 2}}, "output", "transcript"),
        ({"privacy": {"trust": "secure-aggregation"}}, "privacy", "secure_aggregation"),
    ],
)
def test_a_default_that_depends_on_another_setting_follows_it_where_a_loaded_configuration_is_changed(
    tmp_path, changes, section, default
):
    path = write_config(tmp_path, output={})
    before, changed = config.load(path), config.load(path, changes)
    assert getattr(getattr(changed, section), default) != getattr(getattr(before, section), default)
    back = {name: {key: getattr(getattr(before, name), key) for key in keys} for name, keys in changes.items()}
    assert config.load(changed, back) == before
    assert config.load(changed, {"rounds": changed.rounds + 1}).rounds == changed.rounds + 1


def test_a_written_setting_stays_where_a_loaded_configuration_is_changed(tmp_path):
    path = write_config(tmp_path, runtime={"federation": "in-process"}, output={"transcript": "off"})
    assert config.load(config.load(path), {"runtime.federation": "network"}).output.transcript == "off"


def complaints(path, overrides=()) -> list[str]:
    try:
        config.load(path, overrides)
    except ConfigError as error:
        return error.problems
    return []


SAMPLE_LEVEL = sorted(name for name, algorithm in registry().items() if not issubclass(algorithm, ClientLevel))


@pytest.mark.parametrize("file", ["quickstart.yaml", "r_dpcfl/fmnist_rotation.yaml"])
@pytest.mark.parametrize("name", SAMPLE_LEVEL)
def test_every_sample_level_algorithm_runs_by_its_name_alone(name, file):
    problems = complaints(ROOT / "configs" / file, [f"algorithm.name={name}"])
    if name == "em-fdro":  # draws its clients by their loss on records that only it sets aside
        assert [problem for problem in problems if "data: {validation: 0.1}" in problem or "is not in" in problem] == problems
        problems = complaints(ROOT / "configs" / file, [f"algorithm.name={name}", "data.validation=0.1"])
    assert not [problem for problem in problems if "is not in" not in problem]


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "a: [", "\x00"])
def test_files_that_are_no_configuration(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        config.load(path)


def test_missing_file_and_missing_data_say_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="no such configuration file"):
        config.load(tmp_path / "none.yaml")
    monkeypatch.setenv("DPCFL_DATA", str(tmp_path))
    (found,) = problems(data={"dataset": "mnist", "clients": [2, 2]}, model={"name": "cnn"})
    assert str(tmp_path) in found
    assert "dpcfl data fetch mnist" in found


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_configuration_is_valid(path):
    assert not [problem for problem in complaints(path) if "is not in" not in problem]  # only data may be missing


sizes = st.lists(st.integers(1, 4), min_size=1, max_size=4)
documents = st.builds(
    lambda clients, rounds, lr, clip, epsilon, delta, adjacency, batch, seed: {
        **SMALL,
        "seed": seed,
        "data": {"dataset": "digits", "clients": clients},
        "rounds": rounds,
        "local": {"lr": lr, "clip": clip, "batch_size": batch},
        "privacy": {"epsilon": epsilon, "delta": delta, "adjacency": adjacency},
        "algorithm": {"name": "r-dpcfl", "clusters": sum(clients)},
    },
    sizes, st.integers(2, 300), st.floats(1e-6, 10), st.floats(1e-3, 100), st.floats(0.01, 50), st.floats(1e-9, 0.5),
    st.sampled_from(["zero-out", "replace-one"]), st.integers(1, 64), st.integers(0, 2**31),
)  # fmt: skip


@given(documents)
@settings(max_examples=60)
def test_a_resolved_configuration_is_a_configuration(document):
    first = config.resolve(document)
    text = yaml.safe_dump(first.model_dump(mode="json", exclude={"algorithms"}))
    assert config.resolve(yaml.safe_load(text)) == first


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "r-dpcfl", "clusters": 2},
        {"name": "f-cdpfl", "clusters": 2},
        {"name": "em-fdro", "clients_per_round": 2, "mode": "paper"},
        {"name": "rr-cluster", "clusters": 2, "min_cluster_size": 0, "sampling_rate": 1.0},
    ],
    ids=lambda algorithm: algorithm["name"],
)
def test_a_resolved_configuration_may_list_options_without_effect_at_their_defaults(algorithm):
    privacy = {"epsilon": 5, "delta": 1e-2}
    if algorithm["name"] == "rr-cluster":
        privacy |= {"unit": "client", "trust": "trusted-server", "adjacency": "replace-one"}
    first = config.resolve({**SMALL, "data": {"dataset": "digits", "clients": [2, 2], "validation": 0.1},
                            "privacy": privacy, "algorithm": algorithm})  # fmt: skip
    listed = {
        **first.model_dump(mode="json", exclude={"algorithms"}),
        "algorithm": {"name": algorithm["name"], **first.options.model_dump()},
    }
    assert len(listed["algorithm"]) > len(algorithm)
    assert config.resolve(listed).options == first.options


def test_schema_names_every_algorithms_options():
    schema = config_schema.schema()
    *sections, name_alone = schema["properties"]["algorithm"]["anyOf"]
    assert (name_alone["type"], set(name_alone["examples"])) == ("string", set(registry()))
    titles = {option["title"] for option in sections}
    assert titles == set(registry())
    r_dpcfl = next(o for o in schema["properties"]["algorithm"]["anyOf"] if o["title"] == "r-dpcfl")
    expected = {
        "asynchronous",
        "clusters",
        "max_clusters",
        "clustering",
        "secure_from",
        "selection",
        "warm_start",
        "weights",
        "name",
    }
    assert expected == set(r_dpcfl["properties"])


def test_an_option_of_another_algorithm_says_whose_it_is(tmp_path):
    with pytest.raises(ConfigError) as refused:
        config.load(
            write_config(tmp_path), ["algorithm.name=global", "algorithm.clustering.space=full", "algorithm.min_cluster_size=4"]
        )
    assert any(
        "unknown key 'algorithm.min_cluster_size', an option of rr-cluster" in problem for problem in refused.value.problems
    )


def test_a_configuration_is_found_by_path_or_by_name(tmp_path, monkeypatch):
    names = packaged_names()
    assert {"quickstart", "r_dpcfl/fmnist_rotation"} <= set(names)
    assert config.find("quickstart").name == config.find("configs/quickstart.yaml").name == "quickstart.yaml"
    monkeypatch.chdir(tmp_path)
    assert config.find("configs/quickstart.yaml") == config.find("quickstart")
    own = write_config(tmp_path)
    own.rename(tmp_path / "quickstart.yaml")
    assert config.find("quickstart.yaml") == Path("quickstart.yaml"), "a file takes precedence over a name"
    with pytest.raises(ConfigError, match="no such configuration file: quikstart; did you mean 'quickstart'"):
        config.find("quikstart")


def test_the_first_line_of_every_packaged_configuration_is_a_whole_sentence():
    """`dpcfl configs` prints it."""
    assert [name for name, description in packaged().items() if not description.endswith(".")] == []


def test_overrides_are_texts_or_mappings_with_dotted_or_nested_keys():
    texts = config.load(SMALL, ["privacy.epsilon=3", "data.clients=[2, 2]", "rounds=3"])
    dotted = config.load(SMALL, {"privacy.epsilon": 3, "data": {"clients": (2, 2)}, "rounds": np.int64(3)})
    assert texts == dotted
    assert dotted.privacy.delta == SMALL["privacy"]["delta"], "a nested mapping is merged"
    assert SMALL["rounds"] == 6, "the document is copied"
    with pytest.raises(ConfigError, match="'rounds' is a value, not a section"):
        config.load(SMALL, {"rounds": {"more": 5}})
    with pytest.raises(ConfigError, match="is not a dotted key"):
        config.load(SMALL, {"privacy..epsilon": 5})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("rounds=3", "rounds=4"),
        ("algorithm=global", "algorithm.name=local"),
        ("privacy.epsilon=3", "privacy={epsilon: 4}"),
        ("privacy.epsilon=3", "privacy={delta: 1.0e-5}"),
        ("privacy={epsilon: 4, delta: 1.0e-5}", "privacy.epsilon=3"),
    ],
)
def test_overrides_that_contradict_each_other_are_refused_and_both_named(first, second):
    """The last one won, without a word."""
    with pytest.raises(ConfigError) as caught:
        config.load(SMALL, [first, "seed=1", second])
    assert caught.value.problems == [f"overrides {first!r} and {second!r} contradict each other: give one of them"]
    assert config.load(SMALL, ["rounds=3", "rounds=3", "local={lr: 0.1, clip: 1.0, batch_size: 8}", "local.lr=0.1"]).rounds == 3
    with pytest.raises(ConfigError, match=r"'privacy\.epsilon=3' and 'privacy\.epsilon=4' contradict"):
        config.load(SMALL, {"privacy.epsilon": 3, "privacy": {"epsilon": 4}})


def test_a_name_alone_stands_for_a_section(tmp_path):
    short = write_config(tmp_path, algorithm="mr-mtl", model="digits-cnn")
    assert config.load(short) == config.load(write_config(tmp_path / "x", algorithm={"name": "mr-mtl"}))
    longer = config.load(short, ["algorithm.name=local", "seed=3"])
    assert longer == config.load(short, ["algorithm=local", "seed=3"]) == config.load(short, {"algorithm": "local", "seed": 3})
    assert config.load(short, ["algorithm.lam=0.2"]).algorithm == {"name": "mr-mtl", "lam": 0.2}
    assert config.load(config.load(short), {"algorithm": "rc-dpfl"}).algorithm["name"] == "rc-dpfl"
    assert config.load(short, ["model=linear"]).model.name == "linear"
    named = {**SMALL, "model": "linear", "algorithm": "global"}
    assert config.resolve(named) == config.load(named)
    with pytest.raises(ConfigError, match=r"algorithm\.name is 'globl': .*did you mean 'global'\?"):
        config.load(short, ["algorithm=globl"])
    with pytest.raises(ConfigError, match="algorithm is 3: must be a section"):
        config.load(short, ["algorithm=3"])


def test_another_algorithm_drops_the_options_that_it_does_not_have(tmp_path):
    own = write_config(tmp_path, algorithm={"name": "r-dpcfl", "clusters": 4, "clustering": {"space": "full"}})
    assert config.load(own, ["algorithm=km-cdpfl"]).algorithm["clusters"] == 4
    assert config.load(own, ["algorithm=global"]).algorithm == {"name": "global"}
    assert config.load(own, ["algorithm=r-dpcfl"]).algorithm["clustering"]["space"] == "full"
    wrong = write_config(tmp_path / "x", algorithm={"name": "r-dpcfl", "clusterz": 4})
    with pytest.raises(ConfigError, match=r"unknown key 'algorithm\.clusterz'"):
        config.load(wrong, ["algorithm=global"])
    with pytest.raises(ConfigError, match=r"unknown key 'algorithm\.clusters', an option of"):
        config.load(own, ["algorithm.clusters=3", "algorithm=global"])


def test_an_option_is_accepted_by_its_earlier_name_but_not_by_both(tmp_path):
    path = write_config(tmp_path, algorithm={"name": "em-fdro", "drawn": 3}, data={**SMALL["data"], "validation": 0.1})
    assert (
        config.load(path).algorithm["clients_per_round"]
        == config.load(path, ["algorithm.drawn=3"]).algorithm["clients_per_round"]
        == 3
    )
    with pytest.raises(ConfigError) as refused:
        config.load(path, ["algorithm.clients_per_round=2"])
    assert refused.value.problems == ["algorithm.drawn is the earlier name of clients_per_round: give one of the two"]


def test_a_large_roster_has_many_clients_per_process_unless_it_says_otherwise(tmp_path):
    assert [config.group_size(n) for n in (1, 1999, 2000, 3200, 100_000)] == [1, 1, 100, 100, 3125]
    data = {"dataset": "regression", "clients": [1000] * 3, "shift": "line", "train_per_client": 6, "test_per_client": 1}
    privacy = {"epsilon": 5, "delta": 1e-5, "unit": "client", "trust": "trusted-server"}
    trusted = {"privacy": privacy, "algorithm": {"name": "dp-fedavg"}}
    for runtime, expected in (({}, 100), ({"clients_per_worker": 7}, 7)):
        document = {"data": data, "model": {"name": "linear"}, "runtime": runtime, "local": {"batch_size": 6}, **trusted}
        assert config.load(write_config(tmp_path, **document)).runtime.clients_per_worker == expected


def test_an_assignment_to_a_configuration_says_how_to_change_it():
    found = config.load(SMALL)
    for part, name in ((found, "rounds"), (found.local, "lr"), (found.options, "clusters"), (found.privacy, "epsilonn")):
        with pytest.raises(
            AttributeError, match=f"{name} of .* cannot be assigned: .* dpcfl.load\\(config, {{'local.lr': 0.1}}\\)"
        ):
            setattr(part, name, 3)
        with pytest.raises(AttributeError, match=f"{name} of .* cannot be deleted: configurations and jobs do not change"):
            delattr(part, name)
    assert config.load(found, {"local.lr": 0.1}).local.lr == 0.1
