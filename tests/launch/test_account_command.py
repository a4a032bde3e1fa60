"""`dpcfl account` with options: the noise of a run from its numbers, and one sentence for each combination that cannot work."""

from __future__ import annotations

import json
import re

import pytest
from cli_cases import call
from conftest import ROOT

import dpcfl_net as dpcfl

RECORDS = ["--delta", "1e-4", "--records", "200", "--batch", "32"]
CLIENTS = ["--delta", "1e-4", "--clients", "100", "--per-round", "10", "--rounds", "20"]


def asked(capsys, *arguments) -> dict:
    done = call(capsys, "account", *arguments, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_noise_and_epsilon_are_inverse(capsys):
    noise = asked(capsys, "--epsilon", 3, *RECORDS, "--epochs", 2)["noise_multiplier"]
    back = asked(capsys, "--noise-multiplier", noise, *RECORDS, "--epochs", 2)
    assert back["epsilon_zero_out"] == pytest.approx(3, rel=1e-3)
    assert (back["target_epsilon"], back["steps"], back["sampling_rate"]) == (None, 14, 0.16)


@pytest.mark.parametrize("delta", ["1e-4", "1E-4", "0.0001", ".0001", "1.0e-04"])
def test_every_notation_of_a_number_is_read(capsys, delta):
    assert asked(capsys, "--noise-multiplier", "1e0", "--delta", delta, *RECORDS[2:], "--epochs", 1)["delta"] == 1e-4


@pytest.mark.parametrize(
    ("adjacency", "event"),
    [("zero-out", dpcfl.SampledGaussian(1.5, 0.1, 20)), ("replace-one", dpcfl.FixedSizeGaussian(1.5, 10, 100, 20))],
)
def test_clients_are_sampled_as_a_trusted_server_samples_them(capsys, adjacency, event):
    found = asked(capsys, "--noise-multiplier", 1.5, *CLIENTS, "--adjacency", adjacency)
    key = f"epsilon_{adjacency.replace('-', '_')}"
    assert found[key] == dpcfl.account([event], 1e-4, adjacency=adjacency)["epsilon"]


def test_random_allocation_counts_epochs_of_whole_batches(capsys):
    found = asked(capsys, "--noise-multiplier", 1.5, *RECORDS, "--epochs", 2, "--sampling", "allocation")
    assert (found["sampling"], found["sampling_rate"], found["steps"]) == ("allocation", 1 / 7, 14)
    for adjacency in ("zero-out", "replace-one"):
        spent = dpcfl.account([dpcfl.AllocatedGaussian(1.5, 7, 2)], float(found["delta"]), adjacency=adjacency)["epsilon"]
        assert found[f"epsilon_{adjacency.replace('-', '_')}"] == spent
    done = call(capsys, "account", "--noise-multiplier", 1.5, *RECORDS, "--epochs", 2, "--sampling", "allocation")
    assert "random allocation" in done.out
    assert "1 of 7 batches of each epoch" in done.out


def test_the_numbers_of_the_papers_have_no_bound_for_replacement(capsys):
    found = asked(capsys, "--noise-multiplier", 1.5, *CLIENTS, "--accountant", "rdp")
    assert found["epsilon_replace_one"] is None
    assert "no epsilon under replace-one" in found["notes"][0]
    event = dpcfl.SampledGaussian(1.5, 0.1, 20)
    assert found["epsilon_zero_out"] == dpcfl.account([event], 1e-4, accountant="rdp")["epsilon"]


def test_one_round_is_not_a_plural(capsys):
    done = call(capsys, "account", "--delta", 1e-5, "--epsilon", 1, "--clients", 10, "--rounds", 1)
    assert "1 (1 round)" in done.out


def test_the_table_states_what_was_computed(capsys):
    done = call(capsys, "account", "--noise-multiplier", 1.5, "--delta", 0.02, *RECORDS[2:], "--epochs", 2)
    assert "0.16 (32 of 200 records)" in done.out
    assert "14 (2 epochs of 7)" in done.out
    assert "replace-one" in done.out
    assert "note: delta is not below 1/200" in done.out


def test_the_table_never_shows_a_smaller_epsilon_than_was_computed(capsys):
    question = ["--noise-multiplier", 0.9234763, "--delta", "1e-4", "--records", 2000, "--batch", 32, "--epochs", 40]
    found = asked(capsys, *question)
    shown = re.findall(r"epsilon, .*?  (\S+) at delta", call(capsys, "account", *question).out)
    for key, text in zip(("epsilon_zero_out", "epsilon_replace_one"), shown, strict=True):
        assert found[key] <= float(text) <= found[key] * (1 + 1e-5)


@pytest.mark.parametrize(
    ("adjacency", "clips", "words"), [("zero-out", 1, "over the clip norm"), ("replace-one", 2, "over twice the clip norm")]
)
def test_the_noise_multiplier_says_what_it_is_relative_to(capsys, adjacency, clips, words):
    """A replaced client of a fixed sample moves a sum by 2 C; noise of z C instead of 2 z C would have a much larger epsilon."""
    question = ["--noise-multiplier", 1.5, *CLIENTS, "--adjacency", adjacency]
    assert asked(capsys, *question)["noise_over_clip"] == clips * 1.5
    assert f"1.5 (deviation of the noise {words}" in call(capsys, "account", *question).out


def test_a_file_and_the_answer_in_json_share_an_option(capsys):
    path = ROOT / "configs/account/rr_cluster_epsilon2.json"
    from_file = json.loads(call(capsys, "account", "--json", path).out)
    assert from_file["epsilon"] <= 2
    done = call(capsys, "account", "--json", "--noise-multiplier", 1.5, *RECORDS, "--epochs", 1)
    assert json.loads(done.out)["noise_multiplier"] == 1.5


@pytest.mark.parametrize(
    ("arguments", "sentences"),
    [
        ([], ["give the numbers of a run"]),
        (["--epsilon", 5], ["--delta is missing", "give --records"]),
        (["--epsilon", 5, "--noise-multiplier", 1, *RECORDS, "--epochs", 1], ["one of the two"]),
        ([*RECORDS, "--epochs", 1], ["one of the two"]),
        (["--epsilon", 5, *RECORDS], ["--records needs --epochs"]),
        (["--epsilon", 5, "--delta", 0.1, "--records", 20, "--epochs", 1], ["--records needs --batch"]),
        (["--epsilon", 5, *RECORDS, "--epochs", 1, "--per-round", 2], ["--per-round belongs to --clients"]),
        (["--epsilon", 5, "--delta", 0.1, "--records", 20, "--batch", 21, "--epochs", 1], ["--batch is 21", "--records, 20"]),
        (
            ["--epsilon", 5, *CLIENTS, "--records", 3, "--epochs", 1],
            ["give --records (privacy of one record", "one of the two"],
        ),
        (["--epsilon", 5, *CLIENTS, "--epochs", 1], ["--epochs belongs to --records"]),
        (["--epsilon", 5, "--delta", 0.1, "--clients", 20], ["--clients needs --rounds"]),
        (["--epsilon", 5, "--delta", 0.1, "--clients", 2, "--per-round", 3, "--rounds", 1], ["--per-round is 3"]),
        (["--epsilon", 5, *CLIENTS, "--accountant", "moments"], ["--accountant is 'moments'", "pld or rdp"]),
        (["--epsilon", 5, *CLIENTS, "--adjacency", "add"], ["--adjacency is 'add'"]),
        (
            ["--epsilon", 5, *RECORDS, "--epochs", 1, "--adjacency", "replace-one", "--accountant", "rdp"],
            ["rdp", "SampledGaussian"],
        ),
        (["--epsilon", 5, *CLIENTS, "--sampling", "allocation"], ["--sampling belongs to --records"]),
        (
            ["--epsilon", 5, *RECORDS, "--epochs", 1, "--sampling", "shuffle"],
            ["--sampling is 'shuffle'", "poisson or allocation"],
        ),
        (["--epsilon", 5, *RECORDS, "--epochs", 1, "--sampling", "allocation", "--accountant", "rdp"], ["AllocatedGaussian"]),
        (["--epsilon", "nan", *CLIENTS], ["--epsilon"]),
        (["--noise-multiplier", 0, *CLIENTS], ["--noise-multiplier", "above 0"]),
        (["--epsilon", 5, "--delta", 1, *CLIENTS[2:]], ["--delta"]),
        (["--epsilon", 5, "--delta", 0.1, "--records", 10**9, "--batch", 1, "--epochs", 2], ["more than 1,000,000,000 steps"]),
        (["--json", ROOT / "configs/account/rr_cluster_epsilon2.json", "--epsilon", 5], ["leave out --epsilon"]),
    ],
)
def test_what_cannot_work_is_explained(capsys, arguments, sentences):
    done = call(capsys, "account", *arguments)
    assert (done.code, done.out) == (2, "")
    assert [sentence for sentence in sentences if sentence not in done.err] == []
    assert len(done.err.splitlines()) == len([line for line in done.err.splitlines() if line.startswith("error: ")])
