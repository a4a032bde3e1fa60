"""Image sets and what clients see of them: files, shared cache, slices, batches."""

from __future__ import annotations

import gzip
import io
import pwd
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from dpcfl_net.core.atomic import DRAFT
from dpcfl_net.core.errors import ConfigError, DataMissing
from dpcfl_net.data import cache, datasets, download
from dpcfl_net.data.datasets import fetch, load
from dpcfl_net.data.partition import open_client, plan_slices, records_per_client
from dpcfl_net.data.records import ClientData
from dpcfl_net.data.settings import DataSettings

RAW = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + b"".join(side.to_bytes(4, "big") for side in array.shape) + array.tobytes()


def write_mnist(root, n_train=50, n_test=20, packed=True):
    rng = np.random.default_rng(n_train)
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    arrays = []
    for stem, count in zip(RAW, (n_train, n_train, n_test, n_test), strict=True):
        values = rng.integers(0, 10, count) if "labels" in stem else rng.integers(0, 256, (count, 28, 28))
        arrays.append(values.astype(np.uint8))
        data = idx(arrays[-1])
        (raw / (stem + ".gz" * packed)).write_bytes(gzip.compress(data) if packed else data)
    return arrays


def write_cifar(root, stems=("cifar10_train_20k", "cifar10_test_4k"), seed=0):
    rng = np.random.default_rng(seed)
    (root / "CIFAR10").mkdir(parents=True, exist_ok=True)
    out = {}
    for stem, count in zip(stems, (30, 12), strict=True):
        out[stem] = rng.integers(0, 256, (count, 32, 32, 3), np.uint8), rng.integers(0, 10, count).astype(np.uint8)
        np.savez(root / "CIFAR10" / f"{stem}.npz", x=out[stem][0], y=out[stem][1], index=np.arange(count))
    return out


def test_digits_need_no_files(tmp_path):
    images = load("digits", tmp_path / "nowhere")
    assert images.sizes == (1437, 360)
    assert (images.input_shape, images.classes, images.mean, images.std) == ((1, 8, 8), 10, 0.0, 1.0)
    assert images.train_x.dtype == np.uint8
    assert images.train_x.max() == 255

    from sklearn.datasets import load_digits

    theirs = np.rint(load_digits().data * 255 / 16).astype(np.uint8)
    ours = np.concatenate([images.train_x, images.test_x]).reshape(-1, 64)
    assert sorted(map(bytes, ours)) == sorted(map(bytes, theirs))
    assert np.bincount(images.test_y, minlength=10).min() > 20


@pytest.mark.parametrize("packed", [True, False])
def test_idx_files_are_read_exactly(tmp_path, packed):
    train_x, train_y, test_x, test_y = write_mnist(tmp_path, packed=packed)
    images = load("mnist", tmp_path)
    for ours, theirs in (
        (images.train_x[:, 0], train_x),
        (images.train_y, train_y),
        (images.test_x[:, 0], test_x),
        (images.test_y, test_y),
    ):
        assert np.array_equal(ours, theirs)
        assert not ours.flags.writeable
    assert (images.mean, images.std) == (0.1307, 0.3081)


def test_npz_files_are_read_exactly_and_the_whole_set_comes_first(tmp_path):
    written = write_cifar(tmp_path)
    images = load("cifar10", tmp_path)
    assert images.input_shape == (3, 32, 32)
    assert np.array_equal(images.test_x.transpose(0, 2, 3, 1), written["cifar10_test_4k"][0])
    written = write_cifar(tmp_path, ("cifar10_train", "cifar10_test"), seed=1)
    assert np.array_equal(load("cifar10", tmp_path).train_x.transpose(0, 2, 3, 1), written["cifar10_train"][0])


def test_the_root_comes_before_the_variable_before_the_cache_folder(tmp_path, monkeypatch):
    places = [tmp_path / "given", tmp_path / "variable", tmp_path / "cache" / "dpcfl_net" / "data"]
    for count, place in enumerate(places, start=40):
        write_mnist(place, n_train=count)
    monkeypatch.setenv("DPCFL_DATA", str(places[1]))
    assert load("mnist", places[0]).sizes[0] == 40
    assert load("mnist").sizes[0] == 41
    monkeypatch.delenv("DPCFL_DATA")
    assert load("mnist").sizes[0] == 42


def test_missing_data_says_where_and_how(tmp_path, monkeypatch):
    monkeypatch.setenv("DPCFL_DATA", str(tmp_path / "empty"))
    with pytest.raises(DataMissing) as caught:
        load("fashion-mnist")
    for word in (str(tmp_path / "empty"), "FashionMNIST/raw", "dpcfl data fetch fashion-mnist", "DPCFL_DATA"):
        assert word in str(caught.value)
    with pytest.raises(ConfigError, match="digits, mnist"):
        load("mnits")


def damages(path):
    data = path.read_bytes()
    plain = gzip.decompress(data) if path.suffix == ".gz" else None
    yield data[: len(data) // 2]
    yield b""
    yield b"<html>not found</html>"
    if plain is not None:
        yield gzip.compress(plain[:-1])
        yield gzip.compress(plain + b"\0")
        yield gzip.compress(b"\0\0\x0d" + plain[3:])
        yield gzip.compress(plain[:6])
        yield data[:-12] + bytes(12)


def test_damaged_files_are_named(tmp_path):
    write_mnist(tmp_path)
    write_cifar(tmp_path)
    for name, path in (
        *(("mnist", tmp_path / "MNIST" / "raw" / f"{stem}.gz") for stem in RAW),
        ("cifar10", tmp_path / "CIFAR10" / "cifar10_test_4k.npz"),
    ):
        whole = path.read_bytes()
        for bad in damages(path):
            path.write_bytes(bad)
            with pytest.raises(ConfigError, match=path.name):
                load(name, tmp_path)
        path.write_bytes(whole)
        load(name, tmp_path)


def test_an_npz_of_python_objects_is_not_unpickled(tmp_path):
    write_cifar(tmp_path)
    path = tmp_path / "CIFAR10" / "cifar10_train_20k.npz"
    np.savez(path, x=np.array([{"a": 1}], dtype=object), y=np.zeros(1, np.uint8))
    with pytest.raises(ConfigError, match=path.name):
        load("cifar10", tmp_path)


def test_images_and_labels_that_do_not_fit_are_refused(tmp_path):
    write_mnist(tmp_path)
    labels = tmp_path / "MNIST" / "raw" / f"{RAW[1]}.gz"
    for bad in (np.zeros(49, np.uint8), np.full(50, 10, np.uint8), np.zeros((50, 1), np.uint8)):
        labels.write_bytes(gzip.compress(idx(bad)))
        with pytest.raises(ConfigError, match="damaged"):
            load("mnist", tmp_path)


def spoilt_images():
    """(images, labels) of no MNIST file: another size, another rank, a record more or less, and the two exchanged."""
    labels = np.zeros(20, np.uint8)
    for shape in ((20, 14, 14), (20, 28), (20,), (20, 28, 28, 1), (20, 28, 27), (0, 28, 28), (21, 28, 28)):
        yield np.zeros(shape, np.uint8), labels
    yield np.zeros((20, 28, 28), np.uint8), np.zeros((20, 28, 28), np.uint8)
    yield np.zeros((20, 28, 28), np.uint8), np.zeros((), np.uint8)


@pytest.mark.parametrize("part", [0, 2], ids=["train", "test"])
def test_images_of_another_size_or_rank_are_a_damaged_file(tmp_path, part):
    """Training and test images of two sizes would fail in the middle of a run, or in the observer after it."""
    write_mnist(tmp_path, n_train=20, n_test=20)
    paths = [tmp_path / "MNIST/raw" / f"{stem}.gz" for stem in RAW[part : part + 2]]
    kept = [path.read_bytes() for path in paths]
    for arrays in spoilt_images():
        for path, array in zip(paths, arrays, strict=True):
            path.write_bytes(gzip.compress(idx(array)))
        with pytest.raises(ConfigError, match=rf"damaged data file {tmp_path}/MNIST/raw/{RAW[part].split('-')[0]}-"):
            load("mnist", tmp_path)
    for path, content in zip(paths, kept, strict=True):
        path.write_bytes(content)
    load("mnist", tmp_path)


@pytest.mark.parametrize("stem", ["cifar10_train_20k", "cifar10_test_4k"])
@pytest.mark.parametrize("shape", [(4, 16, 16, 3), (4, 3, 32, 32), (4, 32, 32), (4, 32, 32, 1), (0, 32, 32, 3)])
def test_cifar_images_of_another_size_or_rank_are_a_damaged_file(tmp_path, stem, shape):
    write_cifar(tmp_path)
    path = tmp_path / "CIFAR10" / f"{stem}.npz"
    np.savez(path, x=np.zeros(shape, np.uint8), y=np.zeros(shape[0], np.uint8))
    with pytest.raises(ConfigError, match=f"damaged data file {path}"):
        load("cifar10", tmp_path)
    np.save(path.with_suffix(""), np.zeros(3))
    path.with_suffix(".npy").rename(path)
    with pytest.raises(ConfigError, match=f"damaged data file {path}: not an npz file"):
        load("cifar10", tmp_path)


def test_a_changed_file_is_read_again_and_a_damaged_copy_is_made_again(tmp_path):
    write_mnist(tmp_path)
    assert load("mnist", tmp_path).sizes == (50, 20)
    write_mnist(tmp_path, n_train=51)
    first = load("mnist", tmp_path)
    assert first.sizes == (51, 20)
    for copy in cache.folder().glob("images/mnist-*/train_x.npy"):
        with open(copy, "r+b") as file:
            file.truncate(1000)
    expected = write_mnist(tmp_path / "same", n_train=51)[0]
    assert np.array_equal(load("mnist", tmp_path).train_x[:, 0], expected)


def test_many_processes_may_start_at_once_and_share_one_copy(tmp_path):
    write_mnist(tmp_path, n_train=2000)
    code = (
        f"from dpcfl_net.data.datasets import load; i = load('mnist', {str(tmp_path)!r}); print(i.sizes, int(i.train_x.sum()))"
    )
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(6)]
    said = {process.communicate(timeout=60)[0] for process in running}
    assert [process.returncode for process in running] == [0] * 6
    assert len(said) == 1
    assert len(list(cache.folder().glob("images/*/*.npy"))) == 4
    assert not list(cache.folder().glob(f"images/*/.*{DRAFT}"))


def test_only_one_decodes_while_others_wait():
    times = []

    def decode():
        times.append(time.monotonic())
        time.sleep(0.2)
        return {key: np.arange(5, dtype=np.uint8) for key in cache.KEYS}

    with ThreadPoolExecutor(4) as pool:
        found = [job.result() for job in [pool.submit(cache.arrays, "set", "identity", decode) for _ in range(4)]]
    assert len(times) == 1
    assert all(np.array_equal(each["test_y"], np.arange(5)) for each in found)


def test_an_unwritable_cache_is_a_clear_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot write decoded images to .*; set XDG_CACHE_HOME to"):
        load("digits")


def test_a_user_without_a_home_is_told_which_variables_help(monkeypatch):
    """A container may run under a number that /etc/passwd lacks."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    with pytest.raises(ConfigError, match="no home folder: set HOME, or XDG_CACHE_HOME"):
        cache.folder()


def test_settings_refuse_what_cannot_be():
    assert DataSettings(dataset="digits", clients=[2, 3]).true_clusters == [0, 0, 1, 1, 1]
    for bad in (
        {"clients": []},
        {"clients": [2, 0]},
        {"clients": [1] * 5},
        {"shift": "shear"},
        {"train_per_client": 0},
        {"dataste": "digits"},
        {"train_per_client": "10"},
    ):
        with pytest.raises(ValidationError):
            DataSettings(**bad)
    assert all(field.description for field in DataSettings.model_fields.values())


@pytest.mark.parametrize(
    ("dataset", "clients", "sizes", "expected"),
    [
        ("mnist", [3, 6, 6, 6], (60_000, 10_000), (8_000, 1_666)),
        ("cifar10", [3, 6, 6, 6], (50_000, 10_000), (6_666, 1_666)),
        ("cifar10", [3, 6, 6, 6], (20_000, 4_000), (2_666, 666)),
        ("mnist", [2, 2], (60_000, 10_000), (8_000, 1_666)),
        ("mnist", [10, 10], (60_000, 10_000), (6_000, 1_000)),
        ("digits", [2, 2, 2, 2], (1_437, 360), (718, 180)),
    ],
)
def test_default_sizes(dataset, clients, sizes, expected):
    assert records_per_client(DataSettings(dataset=dataset, clients=clients), sizes) == expected


def test_impossible_sizes_name_the_field_and_the_largest_possible():
    settings = DataSettings(dataset="digits", clients=[2, 4], train_per_client=360, test_per_client=361)
    with pytest.raises(ConfigError) as caught:
        plan_slices(settings, load("digits"), 0)
    assert len(caught.value.problems) == 2
    for word in ("data.train_per_client", "359", "data.test_per_client", "360"):
        assert word in str(caught.value)
    largest = settings.model_copy(update={"train_per_client": 359, "test_per_client": 360})
    assert [len(piece.train_rows) for piece in plan_slices(largest, load("digits"), 0)] == [359] * 6
    with pytest.raises(ConfigError, match=r"data\.clients"):
        plan_slices(DataSettings(clients=[2000]), load("digits"), 0)


def test_slices_are_disjoint_within_a_cluster_and_follow_the_seed():
    settings = DataSettings(dataset="digits", clients=[2, 4], train_per_client=300)
    slices = plan_slices(settings, load("digits"), 7)
    assert [s.cluster for s in slices] == [0, 0, 1, 1, 1, 1]
    assert [s.quarter_turns for s in slices] == [0, 0, 1, 1, 1, 1]
    for cluster in (0, 1):
        own = [s for s in slices if s.cluster == cluster]
        for rows, size in (([s.train_rows for s in own], 300), ([s.test_rows for s in own], 90)):
            assert {len(r) for r in rows} == {size}
            assert len(np.unique(np.concatenate(rows))) == size * len(own)
    again, other = plan_slices(settings, load("digits"), 7), plan_slices(settings, load("digits"), 8)
    assert all(np.array_equal(a.train_rows, b.train_rows) for a, b in zip(slices, again, strict=True))
    assert not np.array_equal(np.sort(slices[0].train_rows), np.sort(other[0].train_rows))


def test_test_slices_overlap_only_when_asked_for():
    slices = plan_slices(DataSettings(clients=[2, 2], test_per_client=360), load("digits"), 0)
    assert all(np.array_equal(np.sort(s.test_rows), np.arange(360)) for s in slices)
    slices = plan_slices(DataSettings(clients=[2, 2], test_per_client=200), load("digits"), 0)
    assert all(len(np.unique(s.test_rows)) == 200 for s in slices)
    assert len(np.intersect1d(slices[0].test_rows, slices[1].test_rows)) == 40


def test_label_flip_and_no_shift():
    flipped = plan_slices(DataSettings(clients=[1, 1, 1], shift="label-flip"), load("digits"), 0)
    assert [(s.quarter_turns, s.label_shift) for s in flipped] == [(0, 0), (0, 1), (0, 2)]
    plain = plan_slices(DataSettings(clients=[1, 1, 1], shift="none"), load("digits"), 0)
    assert {(s.quarter_turns, s.label_shift) for s in plain} == {(0, 0)}


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_a_batch_is_the_turned_normalised_padded_records(tmp_path, turns):
    train_x, train_y, *_ = write_mnist(tmp_path)
    rows = np.array([9, 3, 40, 12, 0])
    data = ClientData(load("mnist", tmp_path), "train", rows, quarter_turns=turns, label_shift=3)
    assert (len(data), data.input_shape) == (5, (1, 28, 28))
    take = np.array([4, 1, 2])
    x, y = data.batch(take, 8)
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((8, 1, 28, 28), torch.float32, (8,), torch.int64)
    assert x.is_contiguous()
    for slot, row in enumerate(rows[take]):
        expected = (np.rot90(train_x[row], turns) / 255 - 0.1307) / 0.3081
        assert np.allclose(x[slot, 0].numpy(), expected, atol=1e-6)
        assert y[slot] == (int(train_y[row]) + 3) % 10
    assert not x[3:].any()
    assert not y[3:].any()
    assert data.labels().tolist() == [(int(train_y[row]) + 3) % 10 for row in rows]
    empty_x, empty_y = data.batch(np.array([], np.int64), 4)
    assert (empty_x.shape, empty_x.any().item(), empty_y.any().item()) == ((4, 1, 28, 28), False, False)
    with pytest.raises(ValueError, match="fit"):
        data.batch(take, 2)


def test_colour_images_turn_whole(tmp_path):
    x = write_cifar(tmp_path)["cifar10_test_4k"][0]
    batch, _ = ClientData(load("cifar10", tmp_path), "test", np.arange(12), quarter_turns=1).batch(np.arange(12), 12)
    assert np.allclose(batch[5].numpy().transpose(1, 2, 0), np.rot90(x[5]) / 127.5 - 1, atol=1e-6)


def test_a_client_opens_its_own_part():
    settings = DataSettings(clients=[1, 1])
    images = load("digits")
    piece = plan_slices(settings, images, 0)[1]
    train, test = open_client(settings, piece), open_client(settings, piece, part="test")
    assert (len(train), len(test)) == (1437, 360)
    assert np.array_equal(test.labels(), images.test_y[piece.test_rows])
    with pytest.raises(ConfigError, match="smaller copy"):
        ClientData(images, "test", np.array([360]))


def test_digests_name_the_records_whatever_their_order_and_look(tmp_path):
    write_mnist(tmp_path)
    images = load("mnist", tmp_path)
    digests = ClientData(images, "train", np.array([1, 5, 9])).record_digests()
    assert (digests.shape, digests.dtype) == ((3,), np.uint64)
    assert ClientData(images, "train", np.array([9, 1, 5]), 1, 4).record_digests().tolist() == digests[[2, 0, 1]].tolist()
    assert not set(ClientData(images, "train", np.array([2, 6])).record_digests()) & set(digests)
    assert not set(ClientData(images, "test", np.array([1, 5, 9])).record_digests()) & set(digests)


def test_fetched_cifar_is_what_load_reads(tmp_path):
    rng = np.random.default_rng(0)
    records = {f"data_batch_{i}": rng.integers(0, 10, (4, 3073), np.uint8) for i in range(1, 6)}
    records["test_batch"] = rng.integers(0, 10, (3, 3073), np.uint8)

    def archive(path, members):
        with tarfile.open(path, "w:gz") as tar:
            for name, values in members.items():
                info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
                info.size = values.nbytes
                tar.addfile(info, io.BytesIO(values.tobytes()))

    archive(tmp_path / "whole.tar.gz", records)
    download.convert_cifar(tmp_path / "whole.tar.gz", tmp_path / "CIFAR10")
    images = load("cifar10", tmp_path)
    assert images.sizes == (20, 3)
    assert np.array_equal(images.train_y, np.concatenate([records[f"data_batch_{i}"][:, 0] for i in range(1, 6)]))
    assert np.array_equal(images.test_x.reshape(3, -1), records["test_batch"][:, 1:])
    assert sorted(p.name for p in (tmp_path / "CIFAR10").iterdir()) == ["cifar10_test.npz", "cifar10_train.npz"]
    archive(tmp_path / "part.tar.gz", {"data_batch_1": records["data_batch_1"]})
    with pytest.raises(ConfigError, match=r"part\.tar\.gz"):
        download.convert_cifar(tmp_path / "part.tar.gz", tmp_path / "CIFAR10")


def test_data_sets_without_a_download(tmp_path):
    with pytest.raises(ConfigError, match=r"allowed: mnist, .*emnist-mnist$"):
        fetch("imagenet", tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'cifar10'"):
        fetch("cifar-10", tmp_path)
    assert fetch("digits", tmp_path) == fetch("regression", tmp_path) == tmp_path
    with pytest.raises(DataMissing, match="No command fetches it"):
        fetch("shakespeare", tmp_path)


def test_importing_the_room_needs_no_heavy_library():
    code = "import sys, dpcfl_net.data.partition; print({'torch', 'torchvision', 'sklearn', 'scipy'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


@pytest.mark.data
@pytest.mark.parametrize(("name", "shape"), [("mnist", (1, 28, 28)), ("fashion-mnist", (1, 28, 28)), ("cifar10", (3, 32, 32))])
def test_the_real_sets(name, shape):
    try:
        images = load(name)
    except DataMissing as missing:
        pytest.skip(str(missing))
    assert images.input_shape == shape
    assert np.bincount(images.train_y, minlength=10).min() >= 2000
    if name == "mnist":
        assert images.sizes == (60_000, 10_000)
        assert images.train_x.mean() / 255 == pytest.approx(datasets.load(name).mean, abs=1e-4)


@pytest.mark.slow
def test_torchvision_imports_even_where_torch_lacks_its_operators():
    pytest.importorskip("PIL", reason="torchvision needs Pillow")
    code = "from dpcfl_net.core.vision import torchvision; print(torchvision().datasets.MNIST.__name__)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "MNIST"


def test_a_missing_torchvision_is_named_with_the_command_that_installs_it(monkeypatch):
    from dpcfl_net.core import vision

    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ConfigError, match="torchvision is not installed: pip install"):
        vision.torchvision()
