"""Files of one's own: NumPy archives, LEAF JSON, folders of images, saved Hugging Face data sets."""

from __future__ import annotations

import io
import json
import os
import stat
import sys
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.data import roles
from dpcfl_net.data.datasets import load
from dpcfl_net.data.files import FileSource
from dpcfl_net.data.partition import open_client, open_set, plan_slices
from dpcfl_net.data.settings import DataSettings


def source(path, **settings):
    return FileSource.model_validate({"path": str(path), **settings})


def read(name, path, root, **settings):
    return load(name, root, files=source(path, **settings))


# NumPy archives


def test_an_archive_may_have_a_test_set_other_names_and_its_own_scale(tmp_path):
    rng = np.random.default_rng(0)
    x, who = rng.random((12, 4)), np.array(["b", "a", "c"] * 4)
    np.savez(
        tmp_path / "v.npz", train_value=x[:9], train_kind=np.arange(9) % 2, train_who=who[:9], test_value=x[9:],
        test_kind=np.zeros(3, np.int64), test_who=who[9:], mean=0.25, std=2.0, classes=5,
    )  # fmt: skip
    images = read("npz", "v.npz", tmp_path, columns={"x": "value", "y": "kind", "client": "who"})
    assert (images.sizes, images.classes, images.mean, images.std) == ((9, 3), 5, 0.25, 2.0)
    assert np.array_equal(images.train_x, x[:9].astype(np.float32))
    assert [column.tolist() for column in images.owners] == [[1, 0, 2] * 3, [1, 0, 2]]
    with pytest.raises(ConfigError, match=r"it has no train_owner; it has train_value.*data\.files\.columns"):
        read("npz", "v.npz", tmp_path, columns={"x": "value", "y": "kind", "client": "owner"})


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"y": np.zeros(3, int)}, "it has no x; it has y"),
        ({"x": np.zeros((3, 2)), "y": np.array([0.5, 1, 2]), "classes": 3}, "must be whole numbers"),
        (
            {"x": np.zeros((5, 2)), "y": np.zeros(5, int), "client": np.zeros((5, 1), int)},
            r"one for each of 5 records, got the shapes \(5,\) and \(5, 1\)",
        ),
        ({"x": np.zeros((5, 2)), "y": np.zeros(4, int)}, r"one for each of 5 records, got the shapes \(4,\)"),
        ({"x": np.zeros((5, 2)), "y": np.zeros(5, int), "classes": np.zeros(2)}, "classes must be one number"),
        ({"x": np.zeros((5, 2)), "y": np.zeros(5, int), "mean": 0.1307}, "it has mean alone; must have both mean and std"),
        ({"x": np.zeros((5, 2, 2)), "y": np.zeros(5, int), "classes": 2}, "train_x must be images"),
        ({"x": np.zeros((5, 2)), "y": np.arange(5)}, r"files\.classes is missing, and .* from 2 to 256 \(the largest label is"),
        ({"x": np.array([{}]), "y": np.zeros(1, int)}, "Object arrays"),
        (
            {"x": np.zeros((5, 2)), "y": np.zeros(5, int), "client": np.array(["a"] * 5, object)},
            r"client: Object arrays .*; store a column of text as np\.array\(column, str\)",
        ),
    ],
)
def test_an_archive_of_something_else_is_refused(tmp_path, arrays, words):
    np.savez(tmp_path / "odd.npz", **arrays)
    with pytest.raises(ConfigError, match=words) as caught:
        read("npz", "odd.npz", tmp_path)
    assert "odd.npz" in str(caught.value)


def test_an_archive_that_states_a_shape_beyond_the_memory_is_refused(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (10**14, 2)})
    with zipfile.ZipFile(tmp_path / "huge.npz", "w") as archive:
        archive.writestr("x.npy", header.getvalue())
    with pytest.raises(ConfigError, match=r"huge\.npz: Unable to allocate"):
        read("npz", "huge.npz", tmp_path)


def test_nobody_else_can_read_the_cached_copy_of_own_records(tmp_path, monkeypatch):
    """The source was closed, and its decoded copy open to every user of the machine, if the home folder was."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = os.umask(0o022)
    try:
        np.savez(tmp_path / "own.npz", x=np.ones((9, 2), np.float32), y=np.arange(9) % 2, classes=2)
        read("npz", "own.npz", tmp_path)
        (home,) = (tmp_path / "cache").glob("dpcfl_net/images/own-*")
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        home.chmod(0o755)  # as an earlier version left it
        assert len(read("npz", "own.npz", tmp_path).train_x) == 7
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
    finally:
        os.umask(before)


# LEAF

DEEP = '{"users": ["a"], "user_data": {"a": {"x": ' + 100_000 * "[" + 100_000 * "]" + ', "y": [0]}}}'


def leaf(path, users):
    """Write a file as LEAF's preprocessing does; users: name to (records, labels)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
    listed = [user for user, (x, _) in users.items() if x]  # `-t sample` keeps users without records in user_data
    path.write_text(json.dumps({"users": listed, "num_samples": [len(users[user][0]) for user in listed], "user_data": data}))


def writers(sizes, seed=0):
    rng = np.random.default_rng(seed)
    return {
        user: ((rng.integers(0, 256, (count, 16)) / 255).tolist(), rng.integers(0, 62, count).tolist())
        for user, count in sizes.items()
    }


def test_femnist_of_leaf_keeps_pixels_and_writers(tmp_path):
    first, second = writers({"f0001_10": 5, "f0002_20": 0}), writers({"f0003_30": 8, "f0004_40": 3}, 1)
    leaf(tmp_path / "femnist" / "all_data_0.json", first)
    leaf(tmp_path / "femnist" / "all_data_1.json", second)
    images = read("leaf", "femnist", tmp_path, shape=[1, 4, 4], classes=62)
    assert (images.input_shape, images.classes, sum(images.sizes)) == ((1, 4, 4), 62, 16)
    given = {
        (tuple(np.rint(255 * np.array(x)).astype(int)), y): user
        for user, data in {**first, **second}.items()
        for x, y in zip(*data, strict=True)
    }
    users = sorted(user for user, (x, _) in {**first, **second}.items() if x)
    for x, y, owners in zip((images.train_x, images.test_x), (images.train_y, images.test_y), images.owners, strict=True):
        found = [given[tuple(image.reshape(-1).tolist()), int(label)] for image, label in zip(x, y, strict=True)]
        assert found == [users[owner] for owner in owners]
    asked = DataSettings(
        dataset="leaf", files=source("femnist", shape=[1, 4, 4], classes=62), clients=[3], shift="none", partition="natural"
    )
    pieces = plan_slices(asked, open_set(asked, tmp_path), 0)
    assert sorted(len(piece.train_rows) for piece in pieces) == [2, 4, 6]


def test_shakespeare_of_leaf_is_text_with_the_next_character(tmp_path):
    text = "To be, or not to be: that is the question.\n" * 4
    windows = {"HAMLET": ([text[k : k + 80] for k in range(20)], list(text[80:100]))}
    for part in ("train", "test"):
        leaf(tmp_path / "plays" / part / "data_0.json", windows)
    images = read("leaf", "plays", tmp_path)
    assert (images.input_shape, images.classes) == ((80,), roles.CODES)
    asked = DataSettings(dataset="leaf", files=source("plays"), clients=[1], shift="none", partition="natural")
    (piece,) = plan_slices(asked, images, 0)
    x, y = open_client(asked, piece, tmp_path).batch(np.arange(20), 20)
    said = {"".join(roles.ALPHABET[int(code)] for code in [*row, label]) for row, label in zip(x, y, strict=True)}
    assert said == {text[k : k + 81] for k in range(20)}
    with pytest.raises(ConfigError, match=r"windows of text overlap.*the folders train and test"):
        read("leaf", "plays/train", tmp_path)


def test_vectors_of_leaf_need_no_shape(tmp_path):
    leaf(tmp_path / "synthetic.json", {"0": ([[0.5, -2.0], [1.0, 3.0]], [0.0, 4.0])})
    images = read("leaf", "synthetic.json", tmp_path, classes=5)
    assert (images.train_x.dtype, images.input_shape, images.classes, images.sizes) == (np.float32, (2,), 5, (1, 1))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "users and user_data"),
        ('{"users": ["a"], "user_data": {}}', "user_data of user 'a'"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1]], "y": []}}}', "user 'a' has 1 records and 0 labels"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1], [1, 2]], "y": [0, 1]}}}', "lists of numbers of one length"),
        ('{"users": ["a"], "user_data": {"a": {"x": [["w"]], "y": [0]}}}', "lists of numbers of one length"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1]], "y": [0.5]}}}', "labels must be whole numbers"),
        ('{"users": ["a"], "user_data": {"a": {"x": ["ab"], "y": ["c"]}}}', "overlap"),
        ('{"users": ["a"], "user_data": {"a": {"x": ["ab", "b"], "y": ["c", "d"]}}}', "texts of one length"),
        ('{"users": ["a"], "user_data": {"a": {"x": ["ab"], "y": ["cd"]}}}', "must be one character, the next one, got 'cd'"),
        ('{"users": ["a"], "user_data": {"a": {"x": [], "y": []}}}', "no user has a record"),
        ('{"users": ["a", "a"], "user_data": {"a": {"x": [[1]], "y": [0]}}}', "users lists 'a' more than once: its records"),
        (DEEP, "not readable JSON: it is nested too deeply"),
        (
            f'{{"users": ["a"], "user_data": {{"a": {{"x": [[{10**400}]], "y": [0]}}}}}}',
            "lists of numbers of one length: int too",
        ),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1], [2]], "y": [0, [1, 2]]}}}', "labels must be whole numbers"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1], [2]], "y": [0, 1e300]}}}', "labels must be whole numbers"),
    ],
    ids=lambda text: text[:60],
)
def test_files_that_leaf_does_not_write_are_refused(tmp_path, content, words):
    (tmp_path / "odd.json").write_text(content)
    with pytest.raises(ConfigError, match=words):
        read("leaf", "odd.json", tmp_path)


def test_shapes_values_and_splits_of_leaf_that_do_not_fit_are_refused(tmp_path):
    leaf(tmp_path / "w.json", writers({"a": 3}))
    with pytest.raises(ConfigError, match=r"data\.files\.shape is \[1, 5, 5\].*has 16 values, not 25"):
        read("leaf", "w.json", tmp_path, shape=[1, 5, 5])
    leaf(tmp_path / "w.json", {"a": ([[0.0, 2.0, 0.0, 0.0]] * 2, [0, 1])})
    with pytest.raises(ConfigError, match="are 0 to 2, must be 0 to 1"):
        read("leaf", "w.json", tmp_path, shape=[1, 2, 2])
    leaf(tmp_path / "by_user" / "train" / "a.json", writers({"a": 3}))
    leaf(tmp_path / "by_user" / "test" / "b.json", writers({"b": 3}))
    with pytest.raises(ConfigError, match="-t sample"):
        read("leaf", "by_user", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no \*\.json file"):
        read("leaf", "empty", tmp_path)


# Folders of images


@pytest.fixture
def image_library():
    return pytest.importorskip("PIL.Image", reason="needs Pillow")


def write_images(library, folder, count=5, size=(6, 5), mode="RGB", seed=0):
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    arrays = []
    for k in range(count):
        arrays.append(rng.integers(0, 256, (size[1], size[0], 3) if mode == "RGB" else size[::-1], np.uint8))
        library.fromarray(arrays[-1]).save(folder / f"{k:03}.png")
    return np.stack(arrays)


def test_image_folders_are_classes_and_above_them_clients(tmp_path, image_library):
    for number, (client, kind) in enumerate([("ada", "cat"), ("ada", "dog"), ("bob", "dog")]):
        written = write_images(image_library, tmp_path / "pets" / client / kind, seed=number)
    (tmp_path / "pets" / "README.txt").write_text("not an image")
    (tmp_path / "pets" / "ada" / "emu").mkdir()  # a class that has no image today
    images = read("image-folder", "pets", tmp_path)
    assert (images.input_shape, images.classes, images.sizes) == ((3, 5, 6), 3, (12, 3))
    dogs_of_bob = images.train_x[(images.owners[0] == 1) & (images.train_y == 1)]
    ours = {image.tobytes() for image in written.transpose(0, 3, 1, 2)}
    assert len(dogs_of_bob) == 4
    assert {image.tobytes() for image in dogs_of_bob} < ours
    assert not ((images.owners[0] == 1) & (images.train_y == 0)).any()
    (tmp_path / "pets" / "ada" / "emu").rmdir()
    assert read("image-folder", "pets", tmp_path).classes == 2  # the number of classes came from a cache


def test_image_folders_with_a_split_are_converted_and_resized_on_request(tmp_path, image_library):
    for part, count in (("train", 4), ("test", 2)):
        for kind in ("cat", "dog"):
            write_images(image_library, tmp_path / part / kind, count, mode="L" if kind == "cat" else "RGB")
    with pytest.raises(ConfigError, match=r"its shape is \(3, 5, 6\).*set data\.files\.shape"):
        read("image-folder", ".", tmp_path)
    images = read("image-folder", ".", tmp_path, shape=[1, 8, 8])
    assert (images.input_shape, images.sizes, images.owners) == ((1, 8, 8), (8, 4), None)
    with pytest.raises(ConfigError, match="an image has 1, 3, 4 channels"):
        read("image-folder", ".", tmp_path, shape=[2, 8, 8])


@pytest.mark.parametrize(("shape", "channels"), [(None, 1), ([1, 6, 4], 1), ([3, 6, 4], 3)])
def test_images_of_16_bits_keep_their_grey_values(tmp_path, image_library, shape, channels):
    grey = np.array([0, 1, 100, 128, 254, 255], np.uint16)[:, None] * np.ones(4, np.uint16)
    (tmp_path / "scans" / "lung").mkdir(parents=True)
    for k in range(2):
        image_library.fromarray(grey * 257).save(tmp_path / "scans" / "lung" / f"{k}.{['png', 'tiff'][k]}")
    images = read("image-folder", "scans", tmp_path, shape=shape, classes=2)
    assert np.array_equal(images.train_x[0], np.broadcast_to(grey, (channels, 6, 4)))
    assert np.array_equal(images.test_x[0], images.train_x[0])


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_images_without_a_known_white_are_refused(tmp_path, image_library, dtype):
    (tmp_path / "scans" / "lung").mkdir(parents=True)
    image_library.fromarray(np.ones((4, 4), dtype)).save(tmp_path / "scans" / "lung" / "deep.tiff")
    with pytest.raises(ConfigError, match=r"deep\.tiff: its values are numbers of 32 bits \(mode [FI]\).*with 8 or 16 bits"):
        read("image-folder", "scans", tmp_path, classes=2)


def test_folders_of_something_else_are_refused(tmp_path, image_library):
    write_images(image_library, tmp_path / "mixed" / "cat")
    write_images(image_library, tmp_path / "mixed" / "ada" / "cat")
    with pytest.raises(ConfigError, match=r"the depths \[2, 3\]"):
        read("image-folder", "mixed", tmp_path)
    (tmp_path / "none" / "cat").mkdir(parents=True)
    with pytest.raises(ConfigError, match="it has no image"):
        read("image-folder", "none", tmp_path)
    (tmp_path / "none" / "cat" / "a.png").write_bytes(b"not a picture")
    with pytest.raises(ConfigError, match=r"a\.png: not an image"):
        read("image-folder", "none", tmp_path)


# Hugging Face


def test_a_missing_library_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"needs the library datasets: pip install -e '\.\[huggingface\]'"):
        read("huggingface", ".", tmp_path)


@pytest.mark.slow
def test_saved_hugging_face_sets_are_read(tmp_path):
    library = pytest.importorskip("datasets", reason="needs the extra huggingface")
    rng = np.random.default_rng(0)
    from PIL import Image

    pixels = rng.integers(0, 256, (10, 4, 4), np.uint8)
    features = library.Features(
        {"image": library.Image(), "character": library.ClassLabel(num_classes=62), "writer_id": library.Value("string")}
    )
    rows = library.Dataset.from_dict(
        {"image": [Image.fromarray(each) for each in pixels], "character": list(range(10)), "writer_id": ["b", "a"] * 5},
        features=features,
    )
    rows.save_to_disk(str(tmp_path / "femnist"))
    names = {"x": "image", "y": "character", "client": "writer_id"}
    images = read("huggingface", "femnist", tmp_path, columns=names)
    assert (images.input_shape, images.classes, images.sizes) == ((1, 4, 4), 62, (8, 2))
    for image, label, owner in zip(images.train_x, images.train_y, images.owners[0], strict=True):
        assert np.array_equal(image[0], pixels[label])
        assert owner == (1 if label % 2 == 0 else 0)
    split = library.DatasetDict(
        {
            part: library.Dataset.from_dict({"x": rng.random((6, 3)).tolist(), "y": [0, 1, 2] * 2, "client": [7, 7, 8] * 2})
            for part in ("train", "test")
        }
    )
    split.save_to_disk(str(tmp_path / "vectors"))
    vectors = read("huggingface", "vectors", tmp_path)
    assert (vectors.train_x.dtype, vectors.input_shape, vectors.sizes, vectors.classes) == (np.float32, (3,), (6, 6), 3)
    assert [owner.tolist() for owner in vectors.owners] == [[0, 0, 1] * 2] * 2
    features = library.Features({"x": library.Array2D((4, 4), "uint8"), "y": library.Value("int64")})
    arrays = library.Dataset.from_dict({"x": list(pixels), "y": list(range(10))}, features=features)
    arrays.save_to_disk(str(tmp_path / "arrays"))
    grey = read("huggingface", "arrays", tmp_path)
    assert (grey.train_x.dtype, grey.input_shape, grey.owners) == (np.uint8, (1, 4, 4), None)
    assert all(np.array_equal(image[0], pixels[label]) for image, label in zip(grey.train_x, grey.train_y, strict=True))
    with pytest.raises(ConfigError, match=r"no column image; it has x, y, client"):
        read("huggingface", "vectors", tmp_path, columns={"x": "image"})
    with pytest.raises(ConfigError, match="not a folder that save_to_disk wrote"):
        read("huggingface", ".", tmp_path)


class SavedTable:
    """The part of a saved Hugging Face data set that is read; its numpy format keeps text as objects, with None for a missing value."""

    def __init__(self, columns):
        self.columns = {name: np.array(values) for name, values in columns.items()}
        self.column_names, self.features = list(columns), dict.fromkeys(columns)

    def __len__(self):
        return len(self.columns["y"])

    def with_format(self, kind):
        return self.columns


def test_a_missing_client_of_a_saved_hugging_face_set_is_no_client(tmp_path, monkeypatch):
    (tmp_path / "set").mkdir()
    given = {"x": np.ones((6, 3)), "y": [0, 1] * 3, "client": np.array(["a", None, "b"] * 2, object)}
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_from_disk=lambda path: SavedTable(given)))
    with pytest.raises(
        ConfigError, match="2 of 6 records have an empty name of their client, the first is record 1, counted from 0"
    ):
        read("huggingface", "set", tmp_path, classes=2)
    given["client"] = np.array(["a", "a", "b"] * 2, object)
    images = read("huggingface", "set", tmp_path, classes=2, test_fraction=0.4)
    assert {*images.owners[0].tolist(), *images.owners[1].tolist()} == {0, 1}
