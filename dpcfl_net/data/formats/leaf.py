"""LEAF JSON (Caldas et al. 2018): files of users, num_samples and user_data, as its preprocess.sh writes them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from dpcfl_net.data import roles
from dpcfl_net.data.files import FileSource
from dpcfl_net.data.formats.table import Table, as_images, refused

MOST_LABEL = 1 << 31  # a larger one is no number of a class, and a float of that size has no exact whole number


def read(path: Path, files: FileSource) -> tuple[Table, Table | None]:
    """Read a folder with the folders train and test, a folder of JSON files, or one file.

    A record is a list of numbers, or a text with the next character as its label, which gets the codes of `roles`.

    Args:
        path: File or folder.
        files: The settings.

    Returns:
        Training and test records; None for the test records if there is no folder test.

    Raises:
        ConfigError: If a file is damaged, or no user has training and test records.
    """
    if not ((path / "train").is_dir() and (path / "test").is_dir()):
        return _tables([path] if path.is_file() else _files(path), files), None
    train, test = (_tables(_files(path / part), files) for part in ("train", "test"))
    assert train.client is not None
    assert test.client is not None
    if not np.isin(test.client, train.client).any():
        raise refused(path, "no user has training and test records; split the data with `preprocess.sh -t sample`")
    return train, test


def _files(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.json"))
    if not found:
        raise refused(folder, "it has no *.json file")
    return found


def _tables(paths: list[Path], files: FileSource) -> Table:
    """Records of several files, one after another, so that only one is in memory as text."""
    tables = [table for path in paths if (table := _table(path, files)) is not None]
    if not tables:
        raise refused(paths[0].parent, "no user has a record")
    kinds = {(table.x.dtype.str, table.x.shape[1:]) for table in tables}
    if len(kinds) > 1:
        raise refused(paths[0].parent, f"records differ in type or shape: {sorted(kinds)}")
    x, y = (np.concatenate([getattr(table, key) for table in tables]) for key in ("x", "y"))
    names = np.concatenate([table.client for table in tables if table.client is not None])
    return Table(x, y, names, tables[0].classes, overlaps=tables[0].overlaps)


def _table(path: Path, files: FileSource) -> Table | None:
    users = _users(path)
    x = [record for _, data in users for record in data["x"]]
    y = [label for _, data in users for label in data["y"]]
    if not x:
        return None
    names = np.repeat(np.array([str(user) for user, _ in users]), [len(data["y"]) for _, data in users])
    if isinstance(x[0], str):
        codes, following = _codes(path, x), _codes(path, y)
        if following.shape[1] != 1:
            raise refused(path, f"the label of a text must be one character, the next one, got {y[0][:40]!r}")
        return Table(codes, following[:, 0], names, roles.CODES, overlaps=True)
    values = _numbers(path, x)
    values = values if files.shape is None else as_images(values, files.shape, path)
    return Table(values, _labels(path, y), names)


def _users(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """(user, {"x": records, "y": labels}) of the users that the file lists, in its order."""
    try:
        document = json.loads(path.read_bytes())
    except RecursionError:
        raise refused(path, "not readable JSON: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise refused(path, f"not JSON: {error}") from error
    wanted = "must be an object with users and user_data, as LEAF writes it"
    if not isinstance(document, dict) or not isinstance(document.get("users"), list):
        raise refused(path, wanted)
    data = document.get("user_data")
    if not isinstance(data, dict):
        raise refused(path, wanted)
    found = []
    if twice := [user for user, count in Counter(map(str, document["users"])).items() if count > 1]:
        raise refused(path, f"users lists {twice[0][:40]!r} more than once: its records would count as often")
    for user in document["users"]:
        own = data.get(str(user))
        if not isinstance(own, dict) or not isinstance(own.get("x"), list) or not isinstance(own.get("y"), list):
            raise refused(path, f"user_data of user {str(user)[:40]!r} must be an object with the lists x and y")
        if len(own["x"]) != len(own["y"]):
            raise refused(path, f"user {str(user)[:40]!r} has {len(own['x'])} records and {len(own['y'])} labels")
        found.append((str(user), own))
    return found


def _numbers(path: Path, x: list[Any]) -> np.ndarray:
    try:
        values = np.array(x, np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise refused(path, f"records must be lists of numbers of one length: {error}") from error
    if values.ndim != 2:
        raise refused(path, f"records must be lists of numbers of one length, got the shape {values.shape}")
    return values


def _labels(path: Path, y: list[Any]) -> np.ndarray:
    try:
        labels = np.array(y)
    except ValueError:  # lists of different lengths
        labels = np.array([None])
    whole = labels.ndim == 1 and labels.dtype.kind in "iuf" and bool((labels == np.rint(labels)).all())
    if not whole or np.abs(labels).max() > MOST_LABEL:
        raise refused(path, f"labels must be whole numbers, got {str(y[0])[:40]!r}")
    return labels.astype(np.int64)


def _codes(path: Path, texts: list[Any]) -> np.ndarray:
    """Codes of texts of one length, uint8 (N, length)."""
    if not all(isinstance(text, str) for text in texts) or len({len(text) for text in texts}) != 1 or not texts[0]:
        raise refused(path, "records must be texts of one length, each with the next character as its label")
    return roles.encode("".join(texts)).reshape(len(texts), -1)
