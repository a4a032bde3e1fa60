"""Natural partition: the records name their clients, in the user's files or from a function."""

from __future__ import annotations

import copy
import sys

import numpy as np
import pytest
from conftest import SMALL
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from simulate import simulate

from dpcfl_net.core.errors import ConfigError, DataMissing
from dpcfl_net.data import cache, natural, own
from dpcfl_net.data.partition import open_client, open_set, plan_slices
from dpcfl_net.data.settings import DataSettings
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.experiment.job_files import client_records
from dpcfl_net.transport.keys import make_keys

SIZES = {
    "writer A": 8,
    "writer B": 20,
    "writer C": 40,
    "writer D": 12,
    "writer E": 30,
}  # records of each client, test records included
NATURAL = {"dataset": "npz", "files": {"path": "own.npz"}, "shift": "none", "partition": "natural"}


def write_own(folder, sizes=SIZES, name="own.npz", **more):
    """Records whose first pixel is the number of their client, with clients in mixed order."""
    names = np.repeat(list(sizes), list(sizes.values()))
    rng = np.random.default_rng(0)
    names = rng.permutation(names)
    x = rng.integers(0, 256, (len(names), 6, 6), np.uint8)
    x[:, 0, 0] = np.searchsorted(sorted(sizes), names)
    arrays = {"x": x, "y": rng.integers(0, 3, len(names)), "client": names, "classes": 3, **more}
    np.savez(folder / name, **{key: value for key, value in arrays.items() if value is not None})
    return arrays


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_own(tmp_path)
    return tmp_path


def planned(root, clients, seed=0, **changes):
    asked = DataSettings.model_validate({**NATURAL, "clients": clients, **changes})
    return asked, plan_slices(asked, open_set(asked, root), seed)


def owner(asked, piece, root, part="train"):
    """The clients whose records a slice holds."""
    data = open_client(asked, piece, root, part)
    x, _ = data.batch(np.arange(len(data)), len(data))
    return {round(float(pixel) * 127.5 + 127.5) for pixel in x[:, 0, 0, 0]}


def test_every_slice_holds_the_records_of_one_client(root):
    asked, pieces = planned(root, [5])
    assert sorted(len(piece.train_rows) + len(piece.test_rows) for piece in pieces) == sorted(SIZES.values())
    for piece in pieces:
        (client,) = owner(asked, piece, root)
        assert owner(asked, piece, root, "test") == {client}
        assert len(piece.test_rows) == round(0.2 * list(SIZES.values())[client])
    assert len({owner(asked, piece, root).pop() for piece in pieces}) == 5


def test_clients_are_drawn_by_the_seed_and_small_ones_are_left_out(root):
    asked, pieces = planned(root, [2], min_per_client=16)
    large = {1, 2, 4}
    drawn = [{owner(asked, piece, root).pop() for piece in planned(root, [2], seed, min_per_client=16)[1]} for seed in range(8)]
    assert all(found < large for found in drawn)
    assert len(set(map(frozenset, drawn))) > 1  # 8 equal draws of 2 of 3 clients: 3 ** -7 if the seed did not matter
    assert [piece.train_rows.tolist() for piece in pieces] == [
        piece.train_rows.tolist() for piece in planned(root, [2], min_per_client=16)[1]
    ]
    with pytest.raises(ConfigError, match=r"data\.clients: 4 clients are requested, the records name 5, of which 3 have 16"):
        planned(root, [4], min_per_client=16)


def test_a_limit_and_a_least_size_of_one_number_make_equal_clients(root):
    _, pieces = planned(root, [4], train_per_client=9, min_per_client=9, test_per_client=2)
    assert [(len(piece.train_rows), len(piece.test_rows)) for piece in pieces] == [(9, 2)] * 4
    _, held = planned(root, [4], train_per_client=10, min_per_client=9, validation=0.2)
    assert {len(piece.validation_rows) for piece in held} == {2}


def test_shifted_clusters_share_out_the_clients(root):
    asked, pieces = planned(root, [2, 3], shift="label-flip")
    assert [piece.cluster for piece in pieces] == [0, 0, 1, 1, 1]
    assert [piece.label_shift for piece in pieces] == [0, 0, 1, 1, 1]
    assert {owner(asked, piece, root).pop() for piece in pieces} == set(range(5))
    assert asked.clusters_known
    assert not DataSettings.model_validate({**NATURAL, "clients": [5]}).clusters_known


@given(
    client=st.lists(st.integers(0, 6), min_size=1, max_size=60), fraction=st.floats(0.01, 0.99), seed=st.integers(0, 2**32)
)  # fmt: skip
@settings(max_examples=50)
def test_each_client_keeps_a_training_record_and_gives_a_test_record_if_it_can(client, fraction, seed):
    client = np.array(client, np.int32)
    chosen = natural.for_test(client, fraction, seed)
    for number in np.unique(client):
        tests, count = chosen[client == number].sum(), (client == number).sum()
        assert tests == min(max(1, round(fraction * count)), count - 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dataset": "digits", "files": None}, "needs records that name their clients"),
        ({"clients": [2, 3]}, r"clients must be one number, \[5\]"),
        ({"partition": "equal", "min_per_client": 3}, "min_per_client belongs to partition 'natural'"),
        ({"min_per_client": 9, "train_per_client": 8}, "must be at most train_per_client, 8"),
        ({"sizes": [10]}, "sizes belongs to partition 'equal'"),
        ({"files": None}, r"files is missing: dataset 'npz' needs it"),
        ({"dataset": "digits", "partition": "equal"}, "files belongs to dataset npz"),
        ({"files": {"path": "a", "test_fraction": 1.0}}, "less than 1"),
        ({"files": {"path": "a", "shape": [28, 28]}}, "at least 3"),
    ],
)
def test_contradictions_are_refused(changes, words):
    with pytest.raises(ValidationError, match=words):
        DataSettings.model_validate({**NATURAL, "clients": [5], **changes})


def test_unset_keys_leave_the_job_as_it_was():
    assert not {"files", "min_per_client", "sizes"} & set(DataSettings().model_dump(mode="json"))


def document(root, **data):
    return {
        **copy.deepcopy(SMALL),
        "data": {**NATURAL, "clients": [5], "root": str(root), **data},
        "model": {"name": "linear"},
        "local": {"batch_size": 4, "lr": 0.1},
        "rounds": 2,
        "privacy": {"epsilon": 100, "delta": 1e-3, "unit": "client", "trust": "trusted-server"},
        "algorithm": {"name": "dp-fedavg", "sampling_rate": 1.0},
    }


def test_a_run_has_each_clients_own_number_and_its_public_part_names_no_client(root):
    make_keys(root / "keys", 5)
    resolved = config.resolve(document(root))
    job = make_job(resolved, root / "keys")
    records = {entry.id: entry.records for entry in job.protocol.roster}
    assert sorted(records.values()) == [6, 10, 16, 24, 32]
    assert {client: len(client_records(job, client, str(root), "train")) for client in records} == records
    public = job.protocol.model_dump_json()
    assert not [secret for secret in ("own.npz", str(root), resolved.data.sha256, "natural", *SIZES) if secret in public]
    state = simulate(job, root / "run", data_root=str(root))
    assert np.isfinite(state.models).all()


def test_records_without_clients_and_a_lost_file_are_named(root):
    write_own(root, client=None)
    with pytest.raises(ConfigError, match="the records of 'npz' do not name their clients"):
        config.resolve(document(root))
    with pytest.raises(DataMissing, match=rf"data\.files\.path is 'lost\.npz': there is no file or folder {root}/lost\.npz"):
        config.resolve(document(root, files={"path": "lost.npz"}))


def test_a_changed_file_is_read_again_and_pinned_records_stay(root):
    first = config.resolve(document(root)).data
    write_own(root, {**SIZES, "writer E": 50})
    second = config.resolve(document(root)).data
    assert first.sha256 != second.sha256
    assert open_set(first, str(root)).sizes == (88, 22)
    assert open_set(second, str(root)).sizes == (104, 26)


def test_a_damaged_copy_is_made_again_with_its_clients(root):
    asked = DataSettings.model_validate({**NATURAL, "clients": [5]})
    whole = open_set(asked, root)
    (copy_of_clients,) = cache.folder().glob("images/own-*/train_client.npy")
    copy_of_clients.unlink()
    pinned = asked.model_copy(update={"sha256": whole.sha256})
    assert np.array_equal(open_set(pinned, root).owners[0], whole.owners[0])


def test_a_function_may_name_the_clients_too(root, monkeypatch):
    (root / "own_clients.py").write_text(
        "import numpy as np\n"
        "def load(root):\n"
        "    x, y = np.arange(24, dtype=np.float32).reshape(12, 2), np.arange(12) % 2\n"
        "    who = np.array(['b', 'a', 'c'] * 4, object)\n"  # as pandas keeps text
        "    return dict(train_x=x, train_y=y, test_x=x, test_y=y, train_client=who, test_client=who, classes=2, mean=0.0, std=1.0)\n"
    )
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "path", [str(root), *sys.path])
    asked = DataSettings(dataset="own_clients:load", partition="natural", clients=[3], shift="none")
    pieces = plan_slices(asked, open_set(asked, root), 0)
    assert sorted(sorted(set(piece.train_rows % 3)) for piece in pieces) == [[0], [1], [2]]
    (root / "own_clients.py").write_text(
        (root / "own_clients.py").read_text().replace("test_client=who", "test_client=who[:5]")
    )
    monkeypatch.delitem(sys.modules, "own_clients")
    own._content.cache_clear()
    with pytest.raises(
        ConfigError, match=r"test_client must be whole numbers or text, one for each of 12 records, got <U1 \(5,\)"
    ):
        open_set(asked, root)


def test_records_without_the_name_of_their_client_are_refused(tmp_path):
    """They were one large client, of all whose name was missing."""
    x, names = np.arange(24, dtype=np.float32).reshape(12, 2), np.array(["b", "", "c"] * 4)
    asked = {"dataset": "npz", "files": {"path": "own.npz"}, "partition": "natural", "clients": [2], "shift": "none"}
    said = "4 of 12 records have an empty name of their client, the first is record 1, counted from 0"
    whole = {"x": x, "y": np.arange(12) % 2, "client": names, "classes": 2}
    split = {f"{part}_{key}": whole[key] for part in ("train", "test") for key in ("x", "y", "client")}
    for arrays, where in ((whole, "'own.npz': 4"), (split, "train_client: 4"), (split, "test_client: 4")):
        np.savez(tmp_path / "own.npz", **{"classes": 2, **arrays})
        with pytest.raises(ConfigError, match=where) as error:
            open_set(DataSettings(**asked), tmp_path)
        assert said in str(error.value)
