"""Inversion of recorded updates: images and labels come back from raw ones, and not from those of DP-SGD."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, assert_nothing_left, dpcfl, only_run, write_config
from typer.testing import CliRunner

from dpcfl_net.attacks import pictures, reconstruction
from dpcfl_net.attacks.inversion import MATCHED, psnr, record_gradients
from dpcfl_net.attacks.label_inference import LabelReader, last_layer
from dpcfl_net.attacks.updates import Update, read_updates
from dpcfl_net.core.errors import ConfigError, DataMissing
from dpcfl_net.data.datasets import load
from dpcfl_net.data.partition import DataSettings, open_rows, plan_slices
from dpcfl_net.experiment import config as configuration
from dpcfl_net.experiment.build import make_job
from dpcfl_net.launch.cli.commands import app
from dpcfl_net.privacy.slots import DPSGDSlot
from dpcfl_net.report.page import write_report
from dpcfl_net.results.attack_results import AttackResult, read_result, results
from dpcfl_net.results.summary import read_run_job
from dpcfl_net.training import dpsgd, dpsgd_steps, models
from dpcfl_net.transport.keys import make_keys

ONE = {
    "data": {"dataset": "digits", "clients": [24], "shift": "none", "train_per_client": 1, "test_per_client": 10},
    "model": {"name": "cnn"},
    "rounds": 2,
    "local": {"epochs": 1, "batch_size": 1, "lr": 0.1, "clip": 1.0},
    "runtime": {"clients_per_worker": 24},
}
PROMISE = {"epsilon": 8, "delta": 1e-5}
RAW = {
    **ONE,
    "name": "raw",
    "privacy": {**PROMISE, "unit": "client", "trust": "trusted-server"},
    "algorithm": {"name": "dp-fedavg", "sampling_rate": 1.0},
}
NOISY = {**ONE, "name": "noisy", "privacy": {**PROMISE, "noise": "seeded"}, "algorithm": {"name": "global"}}


@pytest.mark.parametrize("shift", ["rotation", ["rotation", "inversion"], "noise", ["blur", "label-permutation"]])
def test_originals_are_the_images_that_the_clients_model_sees(shift):
    images, asked = load("digits"), DataSettings(clients=[1, 1], shift=shift, train_per_client=1, test_per_client=3)
    pieces = plan_slices(asked, images, 0)
    truth = reconstruction.Truth(images, pieces, [])
    x, _ = open_rows(images, pieces[1:])[0].batch(np.arange(1), 1)
    np.testing.assert_allclose(truth.originals([1]), truth.pictures(x.numpy()), atol=1e-6)
    assert not np.allclose(truth.mean_images([1]), truth.mean_images([0])) or shift == "noise"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> dict[str, Path]:
    """Two recorded runs, each of processes on loopback, on the same 24 records."""
    folders = {}
    for settings in (RAW, NOISY):
        out = tmp_path_factory.mktemp(str(settings["name"]))
        done = dpcfl("run", write_config(out / "c", **settings), "--out", out)
        assert done.returncode == 0, done.stderr + done.stdout
        folders[str(settings["name"])] = only_run(out)
        assert_nothing_left(only_run(out))
    return folders


@pytest.fixture(scope="module")
def attacked(recorded) -> AttackResult:
    """The command on both runs."""
    raw, noisy = recorded["raw"], recorded["noisy"]
    done = CliRunner().invoke(app, ["attack", "invert", str(raw), "--against", str(noisy), "--records", "1"])
    assert done.exit_code == 0, done.output
    found, compared = (read_result(folder / "attacks" / "invert.json") for folder in (raw, noisy))
    assert found == compared
    assert found.headline in done.output
    return found


def noiseless(folder: Path, clients: list[int], monkeypatch) -> reconstruction.Recording:
    """What clients of a DP-SGD run would have sent in round 1 had the one line that adds noise not been there."""
    job = read_run_job(folder)
    truth = reconstruction.read_truth(job, None)
    monkeypatch.setattr(dpsgd_steps, "gaussian_on_grid", lambda values, *_: values)
    found = {}
    for client in clients:
        (first, *_) = read_updates(folder, job, 1)[client]
        local, m = job.protocol.local, job.protocol.model
        module = models.build(m.name, tuple(m.input_shape), m.classes)
        trainer = dpsgd.Trainer(module, clip=local.clip, learning_rate=local.lr, batch_size=local.batch_size)
        piece = job.experiment.slices[client]
        data, _ = reconstruction.open_rows(truth.images, [truth.slices[piece]])
        trained, _ = trainer.train(first.model, data, DPSGDSlot("train", 1.0, 1), 1.0, b"sixteen bytes ok")
        found[piece] = [replace(first, change=trained - first.model)]
    return reconstruction.Recording(job, found, noisy=False)


@pytest.mark.scenario(34)
def test_inversion_recovers_the_image_without_noise_and_fails_with_it(evidence, recorded, attacked, monkeypatch):
    raw, noisy = attacked.facts["runs"]
    blind, chance = np.mean(attacked.facts["mean_image_psnr"]), attacked.facts["label_chance"]
    assert np.mean(noisy["psnr"]) < min(15, blind + 1)  # 7.2 dB with a deviation of 0.2 dB, against 11.9 dB
    evidence.got(f"DP-SGD at epsilon 8: {np.mean(noisy['psnr']):.1f} dB PSNR, {blind:.1f} for the data set's mean image")
    assert np.mean(raw["psnr"]) > 30
    assert raw["labels_right"] == 1
    assert chance == pytest.approx(0.1)
    evidence.control(f"raw updates: {np.mean(raw['psnr']):.1f} dB, all labels")
    assert max(raw["distance"]) < MATCHED < 0.5 < min(noisy["distance"])  # 0.98 with a deviation of 0.005

    unnoised = noiseless(recorded["noisy"], [0], monkeypatch)
    truth, slices = reconstruction.read_truth(unnoised.job, None), sorted(unnoised.updates)
    shown = truth.pictures(reconstruction.reconstruct(unnoised, slices).records)
    reached = psnr(shown, truth.originals(slices)).mean()
    assert reached > 30
    evidence.control(f"DP-SGD that clips and adds no noise: {reached:.1f} dB")


def test_updates_are_named_by_the_epsilons_of_all_clients(tmp_path):
    make_keys(tmp_path, 24)
    for own, epsilons in (({}, "8"), ({"0-3": 2, "23": 20}, "2 to 20")):
        privacy = {**PROMISE, "epsilon_by_client": own}
        job = make_job(configuration.resolve({**NOISY, "privacy": privacy}), tmp_path)
        assert reconstruction.Recording(job, {}, noisy=True).received == f"noisy updates of epsilon {epsilons}"


@pytest.mark.parametrize(
    ("right", "exchanged", "said"),
    [(6, 0.1, False), (7, 0.1, True), (7, 0.3, False), (10, 0.3, True)],
)
def test_labels_are_said_to_be_read_only_where_guesses_are_not_right_as_often(tmp_path, right, exchanged, said):
    """Six of ten labels are guessed with probability 1.5e-4, seven with 9e-6, and more often where many records have one label."""
    make_keys(tmp_path, 24)
    recording = reconstruction.Recording(make_job(configuration.resolve(NOISY), tmp_path), {}, noisy=True)
    outcome = reconstruction.ReconstructionResult(recording, right / 10, exchanged)
    truth = reconstruction.Truth(load("digits"), [], [np.array([label]) for label in range(10)])
    found = reconstruction.result([outcome], truth, list(range(10)), [], "no image was asked for")
    assert found.facts["label_chance"] == pytest.approx(0.1)
    assert ("more often than by chance" in " ".join(found.sentences)) is said


@pytest.mark.parametrize(("noise", "promised"), [("os", "epsilon 8"), ("seeded", "no finite epsilon")])
def test_a_trusted_server_with_seeded_noise_is_said_to_promise_no_epsilon(tmp_path, noise, promised):
    make_keys(tmp_path, 24)
    job = make_job(configuration.resolve({**RAW, "privacy": {**RAW["privacy"], "noise": noise}}), tmp_path)
    outcome = reconstruction.ReconstructionResult(reconstruction.Recording(job, {}, noisy=False), 0.5, 0.1)
    truth = reconstruction.Truth(load("digits"), [], [np.array([label]) for label in range(10)])
    found = reconstruction.result([outcome], truth, list(range(10)), [], "no image was asked for")
    assert f"raw promises {promised} for each client against everyone except the server" in " ".join(found.sentences)


def test_runs_are_matched_by_record_whatever_their_client_ids(recorded):
    raw, noisy = (reconstruction.read_recording(recorded[name]) for name in ("raw", "noisy"))
    assert raw.job.experiment.slices != noisy.job.experiment.slices
    assert sorted(raw.updates) == sorted(noisy.updates) == list(range(24))
    assert (raw.noisy, noisy.noisy) == (False, True)
    assert {len(own) for own in raw.updates.values()} == {1}
    assert {len(own) for own in noisy.updates.values()} == {2}
    truth = reconstruction.read_truth(raw.job, None)
    reader = LabelReader(raw.job.protocol)
    assert [int(reader.counts(raw.updates[k]).argmax()) for k in range(24)] == [int(own[0]) for own in truth.labels]


def test_an_update_is_the_gradient_of_its_record(recorded):
    run = reconstruction.read_recording(recorded["raw"])
    truth, m = reconstruction.read_truth(run.job, None), run.job.protocol.model
    x = (truth.originals([3]) - truth.images.mean) / truth.images.std
    (update,) = run.updates[3]
    expected = record_gradients(m, update.model[None])(torch.from_numpy(x).float(), torch.from_numpy(truth.labels[3]))
    assert np.allclose(update.gradient(run.job.protocol.local), expected[0].numpy(), atol=2e-6)
    assert (update.steps, update.noisy, update.round) == (1, False, 1)


def test_both_reports_show_the_grid_and_the_table(recorded, attacked):
    for folder in recorded.values():
        text = own_part(write_report(folder))
        assert "Reconstruction of records from updates" in text
        assert text.count('<image x="0.0" y="0.0"') == 3  # for narrow, middling and wide windows
        figure = json.loads(re.search(r"const figures = (.*);\n", text)[1])["attack-invert"]
        assert figure["data"][0]["source"].startswith("data:image/png;base64,")
        said = [note["text"] for note in figure["layout"]["annotations"]]
        assert "Reconstructed: noisy updates of epsilon 8, if the noise were secret" in said
        assert sum(word.endswith(" dB") for word in said) == 2
        assert ">raw: raw updates</td>" in text
        assert "src=" not in text


def test_a_report_draws_the_released_updates_of_an_untrusted_server_alone(recorded):
    drawn = {
        name: json.loads(re.search(r"const figures = (.*);\n", own_part(write_report(folder)))[1])
        for name, folder in recorded.items()
    }
    assert not [key for key in drawn["raw"] if key.startswith("updates")]
    updates = {t: read_updates(recorded["noisy"], read_run_job(recorded["noisy"]), 2) for t in (1, 2)}
    for t in (1, 2):
        rows = np.stack([updates[t][client][t - 1].change for client in range(24)]).astype(np.float64)
        points = [
            (x, y) for trace in drawn["noisy"][f"updates-{t}"]["data"] for x, y in zip(trace["x"], trace["y"], strict=True)
        ]
        variances = np.sort(np.linalg.svd(rows - rows.mean(0), compute_uv=False) ** 2)[::-1]
        assert np.sum(np.square(points), axis=0) == pytest.approx(variances[:2], rel=1e-4)


def test_hostile_or_damaged_results_do_no_harm(recorded, tmp_path):
    import shutil

    folder = tmp_path / "run"
    shutil.copytree(recorded["raw"], folder, ignore=shutil.ignore_patterns("transcript*", "keys", "addresses"))
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    figure = {"data": [{"type": "scatter", "name": evil}], "layout": {"title": {"text": evil}}, "height": 100}
    AttackResult("b", evil, evil, [evil], [evil], [[evil]], figure, evil).write(folder)
    (folder / "attacks" / "c.json").write_text('{"name": "c", "title": "t", "headline": "h", "rows": [["x"]]}')
    (folder / "attacks" / "d.json").write_text("{")
    (folder / "attacks" / "e.json").write_text(
        '{"name": "e", "title": "t", "headline": "h", "figure": {"height": "1;color:red"}}'
    )
    text = own_part(write_report(folder))
    assert "<script>alert" not in text
    assert "<img" not in text
    assert text.count("&lt;/script&gt;") >= 5
    notes: list[str] = []
    assert [found.name for found in results(folder, notes) if found.name != "invert"] == ["b"]
    assert [re.search(r"(\w)\.json", note)[1] for note in notes] == ["c", "d", "e"]
    assert all(note.replace("'", "&#39;") in text for note in notes)


@pytest.mark.parametrize("image", [(1, 8, 8), (3, 5, 7)])
def test_the_grid_is_a_png_of_the_images(image):
    import base64
    import io

    Image = pytest.importorskip("PIL.Image")
    values = np.linspace(0, 1, 2 * int(np.prod(image))).reshape(2, *image)
    figure = pictures.grid([pictures.Row("one", values, []), pictures.Row("two", values, ["a", "b < c"])])
    with Image.open(io.BytesIO(base64.b64decode(figure["data"][0]["source"].split(",")[1]))) as opened:
        pixels = np.asarray(opened)
    high, wide = (24, 24) if image[0] == 1 else (25, 35)
    head = round(pictures.HEAD * high)
    times = high // image[1]
    seen = pixels[head : head + high : times, :wide:times]
    assert np.array_equal(seen[..., :3], np.broadcast_to(np.rint(255 * values[0]).transpose(1, 2, 0), (*image[1:], 3)))
    assert set(np.unique(pixels[..., 3])) == {0, 255}
    assert not pixels[:head, :, 3].any()
    assert [note["text"] for note in figure["layout"]["annotations"]] == ["one", "two", "a", "b &lt; c"]


def test_psnr():
    flat = np.full((1, 1, 4, 4), 0.5)
    assert psnr(flat + 0.1, flat) == pytest.approx([20])
    assert psnr(flat, flat) == pytest.approx([100])


@pytest.mark.parametrize("name", ["linear", "cnn"])
def test_counts_of_labels_are_read_from_a_batch(tmp_path, name):
    """One step on a whole batch of three labels; equal counts of all ten would be right for 9 of 30."""
    records = 30
    job = job_of(tmp_path, model={"name": name}, data={**ONE["data"], "clients": [2], "train_per_client": records})
    m = job.protocol.model
    images = reconstruction.read_truth(job, None).images
    rows = np.flatnonzero(np.isin(images.train_y, [1, 4, 7]))[:records]
    model = models.initial(m.name, tuple(m.input_shape), m.classes, 0)
    x = torch.from_numpy((images.train_x[rows] / 255).astype(np.float32))
    each = record_gradients(m, np.tile(model, (records, 1)))(x, torch.from_numpy(images.train_y[rows].astype(np.int64)))
    change = -np.float32(job.protocol.local.lr) * each.mean(0).numpy()
    counts = LabelReader(job.protocol).counts([Update(0, 1, model, change, steps=1, noisy=False)])
    true = np.bincount(images.train_y[rows], minlength=10)
    assert counts.sum() == pytest.approx(records)
    assert np.minimum(counts, true).sum() > 25


def test_an_update_of_many_records_gives_counts_and_no_image(finished_run):
    found = reconstruction.attack(finished_run)
    assert found.figure is None
    assert found.facts["clients"] == 8
    assert any("Images were not searched: an update of small has 700 records" in said for said in found.sentences)
    assert 0.8 < found.facts["runs"][0]["labels_right"] <= 1


def test_a_run_of_few_clients_needs_no_number_of_images(finished_run, monkeypatch):
    read = reconstruction.read_recording

    def of_four(folder):
        found = read(folder)
        return replace(found, updates={client: found.updates[client] for client in range(4)})

    monkeypatch.setattr(reconstruction, "read_recording", of_four)
    assert reconstruction.attack(finished_run).facts["clients"] == 4


def test_mistakes_are_sentences(recorded, finished_run, tmp_path):
    for arguments, said in (
        ((recorded["raw"], None, 25), "records is 25: must lie in 1..24"),
        ((recorded["raw"], finished_run), "the runs differ in data, so no record is in both: data."),
        ((tmp_path,), "is not a run folder"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            reconstruction.attack(*arguments)
    bare = tmp_path / "bare"
    bare.mkdir()
    for part in ("protocol.json", "roster.jsonl", "experiment.json"):
        (bare / part).write_bytes((recorded["raw"] / part).read_bytes())
    for own, said in (
        ({}, "record the run with output.transcript=full runtime.federation=network runtime.aggregators=0"),
        ({"output": "off"}, "record the run with output.transcript=full"),
        (
            {"output": "off", "federation": "in-process"},
            "record the run with output.transcript=full runtime.federation=network",
        ),
        (
            {"output": "full"},
            "though its output.transcript is 'full': it was removed, or the coordinator, which writes it, has not started in this folder",
        ),
    ):
        runtime = {"federation": own.get("federation", "network"), "aggregators": 0}
        if own:
            (bare / "config.yaml").write_text(json.dumps({"output": {"transcript": own["output"]}, "runtime": runtime}))
        with pytest.raises(ConfigError, match=rf"has no transcript\.msgpack.* {re.escape(said)}$"):
            reconstruction.attack(bare)
    (bare / "transcript.msgpack").touch()
    with pytest.raises(ConfigError, match=r"from the transcript: it is full, and no client answered such a task$"):
        reconstruction.attack(bare)  # a run that ended before its first release
    template = read_run_job(recorded["raw"]).protocol.model
    for other in ({"task": "regression", "classes": 1}, {"layout": template.layout[:-2]}):
        with pytest.raises(ConfigError, match="last linear layer"):
            last_layer(template.model_copy(update=other))


def test_the_configurations_that_come_along_differ_in_who_adds_the_noise_alone():
    raw, noisy = (
        configuration.load(ROOT / "configs" / "threats" / f"invert_{name}.yaml", ["data.dataset=digits"])
        for name in ("raw", "dp")
    )
    for part in ("data", "model", "rounds", "local", "seed", "output"):
        assert getattr(raw, part) == getattr(noisy, part)
    assert raw.privacy.epsilon == noisy.privacy.epsilon
    assert (raw.privacy.trust, noisy.privacy.trust) == ("trusted-server", "untrusted-server")
    assert raw.output.transcript == "full"


@pytest.mark.data
@pytest.mark.slow
def test_mnist_as_the_configurations_have_it(tmp_path):
    """The figures of configs/threats/invert_raw.yaml and invert_dp.yaml."""
    try:
        load("mnist")
    except DataMissing as missing:
        pytest.skip(str(missing))
    folders = []
    for name in ("raw", "dp"):
        done = dpcfl("run", ROOT / "configs" / "threats" / f"invert_{name}.yaml", "--out", tmp_path / name)
        assert done.returncode == 0, done.stderr + done.stdout
        folders.append(only_run(tmp_path / name))
    found = reconstruction.attack(*folders)
    raw, noisy = found.facts["runs"]
    assert np.mean(raw["psnr"]) > 35
    assert np.mean(noisy["psnr"]) < 15
    assert raw["labels_right"] == 1


def job_of(tmp_path: Path, **changes):
    """A job in memory, of RAW with some sections changed."""
    settings = configuration.load(write_config(tmp_path, **{**RAW, **changes}))
    make_keys(tmp_path / "keys", sum(settings.data.clients))
    return make_job(settings, tmp_path / "keys")


def own_part(page: Path) -> str:
    """The page without its script."""
    return re.sub(r"<script>\n//.*?</script>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
