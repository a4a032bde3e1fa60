"""Downloads: official addresses, checksums, mirrors, interruptions, and conversion to the files that are read."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import signal
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from closed_port import closed_port

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.data import datasets, download
from dpcfl_net.data.datasets import fetch, load


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + b"".join(side.to_bytes(4, "big") for side in array.shape) + array.tobytes()


class Shop(ThreadingHTTPServer):
    """A web server of one folder's files, kept in memory."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Page)
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.cut = False
        self.stalled: threading.Event | None = None  # an answer waits for it after its first half
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_address[1]}/files"


class Page(BaseHTTPRequestHandler):
    def do_GET(self):
        name = self.path.rpartition("/")[2]
        self.server.asked.append(name)
        if name not in self.server.files:
            self.send_error(404)
            return
        body = self.server.files[name]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2])
        if self.server.stalled is not None:
            self.wfile.flush()
            self.server.stalled.wait(60)
        elif not self.server.cut:
            self.wfile.write(body[len(body) // 2 :])

    def log_message(self, *_):
        pass


@pytest.fixture
def shop(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    server = Shop()
    yield server
    server.shutdown()
    server.server_close()


def offer(shop, monkeypatch, name, contents):
    """Put files up, and let the data set's checksums be those of the files."""
    shop.files |= contents
    changed = [
        dataclasses.replace(
            remote,
            addresses=(shop.address,),
            checksum=f"md5:{hashlib.md5(contents[remote.name]).hexdigest()}",
        )
        for remote in download.REMOTES[name]
    ]
    monkeypatch.setitem(download.REMOTES, name, tuple(changed))


def mnist_files(count=20):
    rng = np.random.default_rng(0)
    arrays = {
        remote.name: rng.integers(0, 10, (count, 28, 28) if "images" in remote.name else count).astype(np.uint8)
        for remote in download.REMOTES["mnist"]
    }
    return arrays, {name: gzip.compress(idx(array)) for name, array in arrays.items()}


def left(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()) if root.exists() else []


def test_mnist_arrives_and_is_not_asked_for_again_unless_damaged(shop, monkeypatch, tmp_path):
    arrays, packed = mnist_files()
    offer(shop, monkeypatch, "mnist", packed)
    said = []
    root = tmp_path / "data"
    assert fetch("mnist", root, say=said.append) == root
    assert said == [f"{shop.address}/{name}" for name in packed]
    assert np.array_equal(load("mnist", root).train_x[:, 0], arrays["train-images-idx3-ubyte.gz"])
    fetch("mnist", root)
    assert len(shop.asked) == 4
    (root / "MNIST" / "raw" / "t10k-labels-idx1-ubyte.gz").write_bytes(b"damaged")
    fetch("mnist", root)
    assert shop.asked[4:] == ["t10k-labels-idx1-ubyte.gz"]
    assert left(root) == sorted(f"MNIST/raw/{name}" for name in packed)


def test_an_interrupted_or_wrong_download_leaves_nothing(shop, monkeypatch, tmp_path):
    root = tmp_path / "data"
    _, packed = mnist_files()
    offer(shop, monkeypatch, "mnist", packed)
    shop.cut = True
    with pytest.raises(ConfigError, match=r"could not download mnist into .*train-images-idx3-ubyte\.gz"):
        fetch("mnist", root)
    assert left(root) == []
    shop.cut = False
    shop.files["train-labels-idx1-ubyte.gz"] += b"more"
    with pytest.raises(ConfigError, match=r"train-labels.*md5:[0-9a-f]{32}, must be md5:[0-9a-f]{32}"):
        fetch("mnist", root)
    assert left(root) == ["MNIST/raw/train-images-idx3-ubyte.gz"]

    def interrupted(url, path):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(download, "_transfer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch("mnist", root)
    assert left(root) == ["MNIST/raw/train-images-idx3-ubyte.gz"]


def test_a_server_that_sends_without_an_end_does_not_fill_the_disk(shop, monkeypatch, tmp_path):
    _, files = mnist_files()
    offer(shop, monkeypatch, "mnist", files)
    monkeypatch.setattr(download, "MOST_BYTES", 1000)
    monkeypatch.setattr(download, "CHUNK", 100)
    with pytest.raises(ConfigError, match="more than 1,000 bytes, the limit"):
        fetch("mnist", tmp_path / "data")
    assert left(tmp_path / "data") == []


def test_without_a_network_or_a_file_the_message_says_what_to_do(shop, tmp_path):
    with closed_port() as port:
        for mirror, words in (
            (f"http://127.0.0.1:{port}", "refused"),
            (shop.address, "404"),
            ("ftp://x", "must begin with http"),
        ):
            with pytest.raises(ConfigError, match="could not download fashion-mnist") as caught:
                fetch("fashion-mnist", tmp_path / "data", mirror)
            for word in (words, "copy the files there", "DPCFL_DATA", "--mirror"):
                assert word in str(caught.value)


def test_a_mirror_must_have_the_official_files(shop, tmp_path):
    shop.files |= mnist_files()[1]
    with pytest.raises(ConfigError, match="must be sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"):
        fetch("mnist", tmp_path / "data", shop.address)


def test_a_second_address_is_tried(shop, monkeypatch, tmp_path):
    _, packed = mnist_files()
    offer(shop, monkeypatch, "mnist", packed)
    both = [dataclasses.replace(each, addresses=("http://127.0.0.1:9", shop.address)) for each in download.REMOTES["mnist"]]
    monkeypatch.setitem(download.REMOTES, "mnist", tuple(both))
    fetch("mnist", tmp_path / "data")
    assert load("mnist", tmp_path / "data").sizes == (20, 20)


def test_cifar100_has_its_fine_labels(shop, monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    records = {part: rng.integers(0, 100, (count, 3074), np.uint8) for part, count in (("train", 6), ("test", 3))}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for part, values in records.items():
            info = tarfile.TarInfo(f"cifar-100-binary/{part}.bin")
            info.size = values.nbytes
            tar.addfile(info, io.BytesIO(values.tobytes()))
    offer(shop, monkeypatch, "cifar100", {"cifar-100-binary.tar.gz": packed.getvalue()})
    fetch("cifar100", tmp_path / "data")
    images = load("cifar100", tmp_path / "data")
    assert (images.input_shape, images.classes, images.sizes) == ((3, 32, 32), 100, (6, 3))
    assert np.array_equal(images.train_y, records["train"][:, 1])
    assert np.array_equal(images.test_x.reshape(3, -1), records["test"][:, 2:])
    assert left(tmp_path / "data") == ["CIFAR100/cifar100_test.npz", "CIFAR100/cifar100_train.npz"]


def test_emnist_is_turned_upright_and_letters_begin_at_zero(shop, monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    arrays, packed = {}, io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for split in download.EMNIST_CLASSES:
            for part, count in (("train", 4), ("test", 2)):
                arrays[split, part] = rng.integers(0, 256, (count, 28, 28), np.uint8)
                labels = np.array([1, 26, 3, 4][:count] if split == "letters" else [0, 9, 3, 4][:count], np.uint8)
                for kind, array in (("images-idx3", arrays[split, part]), ("labels-idx1", labels)):
                    archive.writestr(f"gzip/emnist-{split}-{part}-{kind}-ubyte.gz", gzip.compress(idx(array)))
    offer(shop, monkeypatch, "emnist-letters", {"gzip.zip": packed.getvalue()})
    root = tmp_path / "data"
    fetch("emnist-letters", root)
    letters, balanced = load("emnist-letters", root), load("emnist-balanced", root)
    assert (letters.classes, letters.train_y.tolist(), balanced.classes) == (26, [0, 25, 2, 3], 47)
    assert np.array_equal(letters.test_x[:, 0], arrays["letters", "test"].swapaxes(1, 2))
    assert len(left(root)) == 24
    shop.files["gzip.zip"] = b"PK no zip"
    monkeypatch.setitem(download.REMOTES, "emnist-letters", ())
    offer_damaged = dataclasses.replace(
        download._EMNIST, addresses=(shop.address,), checksum=f"md5:{hashlib.md5(b'PK no zip').hexdigest()}"
    )
    monkeypatch.setitem(download.REMOTES, "emnist-letters", (offer_damaged,))
    with pytest.raises(ConfigError, match="damaged data file"):
        fetch("emnist-letters", tmp_path / "other")
    assert left(tmp_path / "other") == []


def test_the_command_says_that_a_built_in_set_needs_no_download(tmp_path, capsys):
    from dpcfl_net.launch.cli.commands.data import fetch as command

    command("digits", tmp_path)
    assert capsys.readouterr().out == "digits needs no download\n"


def test_every_public_image_set_can_be_fetched_and_no_other():
    from dpcfl_net.launch.cli.commands.data import FETCHABLE

    assert set(FETCHABLE) == set(download.REMOTES)
    assert set(datasets.PUBLIC) - set(download.REMOTES) == {"digits", "shakespeare", "regression"}


@pytest.mark.data
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_real_files_have_the_checksums(shop, name):
    folder = datasets._root(None) / {"mnist": "MNIST", "fashion-mnist": "FashionMNIST"}[name] / "raw"
    if not folder.is_dir():
        pytest.skip(f"{name} is not in {folder}")
    shop.files |= {path.name: path.read_bytes() for path in folder.glob("*.gz")}
    for remote in download.REMOTES[name]:
        assert download._checksum(folder / remote.name, remote) == remote.checksum


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_removes_the_incomplete_file(shop, tmp_path, number):
    remote = download.REMOTES["cifar10"][0]
    shop.files = {remote.name: b"x" * 1000}
    shop.stalled = threading.Event()
    root = tmp_path / "data"
    command = [sys.executable, "-m", "dpcfl_net", "data", "fetch", "cifar10", "--root", str(root), "--mirror", shop.address]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # a background job of a shell ignores INT, nohup HUP
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not any(root.glob(f".fetch-*/{remote.name}")):
            assert time.monotonic() < deadline, "the download did not begin"
            time.sleep(0.02)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    finally:
        shop.stalled.set()
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "Traceback" not in said
    assert list(root.iterdir()) == []
