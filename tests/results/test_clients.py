"""Clients of a run by the names that they have in the user's data."""

import json
import shutil

import numpy as np
import pytest
from conftest import dpcfl as command

import dpcfl_net as dpcfl
from dpcfl_net.data.partition import client_names, open_set, plan_slices
from dpcfl_net.data.settings import DataSettings

HOSPITALS = {"Aarhus": 20, "Basel": 30, "Cork": 40}


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory):
    """A run on three hospitals whose features give their hospital away."""
    folder = tmp_path_factory.mktemp("hospitals")
    owner = np.repeat(list(HOSPITALS), list(HOSPITALS.values()))
    rng = np.random.default_rng(0)
    order = rng.permutation(len(owner))
    x = (np.unique(owner, return_inverse=True)[1][:, None] + np.zeros((1, 2))).astype(np.float32)
    np.savez(folder / "hospitals.npz", x=x[order], y=rng.integers(0, 2, len(owner)), client=owner[order], classes=2)
    config = {
        "name": "hospitals",
        "data": {
            "dataset": "npz", "root": str(folder), "files": {"path": "hospitals.npz"}, "partition": "natural", "clients": [3],
            "shift": "none", "validation": 0.25,
        },
        "model": {"name": "linear"},
        "rounds": 2,
        "local": {"batch_size": 8},
        "privacy": {"epsilon": 5, "delta": 1e-3},
        "algorithm": {"name": "global"},
    }  # fmt: skip
    return folder, dpcfl.run(config, folder / "runs", "in-process", progress=False)


def test_each_client_has_the_name_of_its_records(hospitals):
    _, run = hospitals
    from dpcfl_net.experiment.job_files import client_records

    found = run.clients()
    assert sorted(one.name for one in found) == sorted(HOSPITALS)
    for one in found:
        x, _ = client_records(run.job, one.client, run.config.data.root, "train").batch(np.arange(1), 1)
        assert list(HOSPITALS)[int(x[0, 0])] == one.name
        assert one.train_records + one.validation_records + one.test_records == HOSPITALS[one.name]
        assert one.test_records == HOSPITALS[one.name] // 5
        assert one.validation_records
        assert one.train_records == run.job.protocol.client(one.client).records
    last = run.rounds[-1]
    assert [one.accuracy for one in found] == list(last.accuracy_by_client)
    assert [one.cluster for one in found] == list(last.assignment)
    assert {one.true_cluster for one in found} == {None}
    assert max(one.epsilon_spent for one in found) == pytest.approx(run.privacy.epsilon_spent)


def test_no_file_of_the_run_holds_a_name(hospitals):
    _, run = hospitals
    run.report()
    for path in (each for each in run.path.rglob("*") if each.is_file()):
        assert not [name for name in HOSPITALS if name.encode() in path.read_bytes()], path


def test_the_command_prints_the_names_and_refuses_changed_data(hospitals):
    folder, run = hospitals
    shown = command("clients", run.path)
    assert all(name in shown.stdout for name in HOSPITALS)
    assert shown.stdout.endswith(
        "\ntraining, validation and test: records; cluster: the server's; accuracy: at the last evaluation; epsilon: spent so far\n"
    )
    listed = json.loads(command("clients", run.path, "--json").stdout)
    assert [one["name"] for one in listed] == [one.name for one in run.clients()]
    other = folder / "other"
    other.mkdir(exist_ok=True)
    arrays = dict(np.load(folder / "hospitals.npz"))
    np.savez(other / "hospitals.npz", **{**arrays, "client": np.roll(arrays["client"], 1)})
    refused = command("clients", run.path, "--data-root", other)
    assert refused.returncode == 2
    assert "sha256" in refused.stderr


def test_speaking_roles_have_the_names_of_play_and_speaker(tmp_path):
    plays = tmp_path / "Shakespeare" / "plays"
    plays.mkdir(parents=True)
    text = {"CATE": "Now is the winter. " * 30, "ANNE": "To be or not. " * 90, "BEN": "All the world. " * 60}
    (plays / "storm.txt").write_text("\n\n".join(f"{name}:\n{speech}" for name, speech in text.items()))
    settings = DataSettings(dataset="shakespeare", clients=[2], shift="none", partition="roles")
    images = open_set(settings, tmp_path)
    names = client_names(settings, images, plan_slices(settings, images, seed=0), tmp_path)
    assert names == ["storm: ANNE", "storm: BEN"]


def test_equal_slices_have_no_names(in_process):
    found = in_process.clients()
    assert {one.name for one in found} == {None}
    assert [one.true_cluster for one in found] == in_process.job.experiment.true_clusters


def test_the_page_says_where_the_names_are(hospitals, in_process, tmp_path):
    _, run = hospitals
    unnamed = dpcfl.open_run(shutil.copytree(in_process.path, tmp_path / "run"))
    assert "Their names: dpcfl clients RUN." in run.report().read_text()
    assert "dpcfl clients RUN" not in unnamed.report().read_text()
