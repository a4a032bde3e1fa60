"""Shakespeare's plays by speaking role: windows of 80 characters with the next character as label."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dpcfl_net.core.errors import ConfigError, DataMissing
from dpcfl_net.data import cache
from dpcfl_net.data.readers import damaged, identity
from dpcfl_net.data.skew import Share

FOLDER = "Shakespeare/plays"
WINDOW = 80
TEST_FRACTION = 0.2
# Code k is ALPHABET[k]; any other character has the code after the last.
ALPHABET = "".join(map(chr, range(32, 127))) + "\n"
UNKNOWN = len(ALPHABET)
CODES = UNKNOWN + 1
_KEYS = ("train_text", "train_ends", "test_text", "test_ends")


def is_here(root: Path) -> bool:
    """Return True if `root` holds plays."""
    return bool(_plays(root))


def _plays(root: Path) -> list[Path]:
    return sorted((root / FOLDER).glob("*.txt"))


def load(root: Path) -> dict[str, Any]:
    """Load the plays as the fields of `Images`; a row is the position in the text where a window begins.

    x is uint8 (N, 80) character codes and y uint8 (N,) the next code. `groups` holds the offsets of the roles' training and
    test texts, (R + 1,) each, longest text first.

    Args:
        root: Folder of the data sets.

    Raises:
        DataMissing: If there are no plays.
        ConfigError: If a file is not a play.
    """
    paths = _plays(root)
    if not paths:
        raise DataMissing(
            f"data set 'shakespeare' is not in {root} (looked for {FOLDER}/*.txt: one play a file, each speech a line "
            "`SPEAKER:`, its lines, and an empty line). No command fetches it: put the plays there, or set DPCFL_DATA "
            "(or data.root) to a folder that has them."
        )
    found = identity(paths)
    kept = cache.arrays("shakespeare", found, lambda: _read(paths), _KEYS)
    train, test = (np.lib.stride_tricks.sliding_window_view(kept[key], WINDOW + 1) for key in ("train_text", "test_text"))
    return {
        "train_x": train[:, :WINDOW], "train_y": train[:, WINDOW], "test_x": test[:, :WINDOW], "test_y": test[:, WINDOW],
        "groups": (kept["train_ends"], kept["test_ends"]), "task": "classification", "classes": CODES,
        "mean": 0.0, "std": 1 / 255, "sha256": None, "identity": found,
    }  # fmt: skip


def names(root: Path) -> list[str]:
    """List the roles in the order of `groups`: the play's file name and the speaker.

    Args:
        root: Folder of the data sets.

    Raises:
        ConfigError: If a file is not a play.
    """
    return [f"{play}: {speaker}" for play, speaker in _texts(_plays(root))]


def _texts(paths: list[Path]) -> dict[tuple[str, str], str]:
    """Text of each role, (play, speaker), longest first."""
    roles: dict[tuple[str, str], list[str]] = {}
    for path in paths:
        for speaker, speech in _speeches(path):
            roles.setdefault((path.stem, speaker), []).append(speech)
    texts = {role: "".join(speeches) for role, speeches in roles.items()}
    return dict(sorted(texts.items(), key=lambda item: (-len(item[1]), item[0])))


def _read(paths: list[Path]) -> dict[str, np.ndarray]:
    train, test = [], []
    for text in _texts(paths).values():
        codes = encode(text)
        cut = len(codes) - round(TEST_FRACTION * len(codes))
        train.append(codes[:cut])
        test.append(codes[cut:])
    arrays = {}
    for part, pieces in (("train", train), ("test", test)):
        arrays[f"{part}_text"] = np.concatenate(pieces)
        arrays[f"{part}_ends"] = np.cumsum([0, *map(len, pieces)])
    if min(len(arrays["train_text"]), len(arrays["test_text"])) <= WINDOW:
        raise ConfigError(f"damaged data in {paths[0].parent}: too little text for a single window of {WINDOW} characters")
    return arrays


def _speeches(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (speaker, text) for each speech of a play; every line of the text ends with a newline."""
    try:
        blocks = path.read_text(encoding="utf-8").split("\n\n")
    except (OSError, UnicodeDecodeError) as error:
        raise damaged(path, str(error)) from error
    if not any(block.strip() for block in blocks):
        raise damaged(path, "it has no speech")
    for block in blocks:
        speaker, _, speech = block.strip("\n").partition("\n")
        if not speaker:
            continue
        if not speaker.endswith(":"):
            raise damaged(path, f"a speech begins with {speaker[:40]!r}, not with a line `SPEAKER:`")
        yield speaker[:-1], speech + "\n"


def encode(text: str) -> np.ndarray:
    """Encode a text as uint8 (len(text),) codes."""
    table = np.full(128, UNKNOWN, np.uint8)
    table[[ord(character) for character in ALPHABET]] = np.arange(UNKNOWN)
    # DEL (127) is not in the alphabet; it stands for all characters above 127.
    return table[np.minimum(np.frombuffer(text.encode("utf-32-le"), np.uint32), 127)]


def shares(
    groups: tuple[np.ndarray, np.ndarray], count: int, train: int | None, test: int | None, validation: float
) -> list[Share]:
    """Split the text of the roles with most text into training, validation and test rows.

    Windows are spread evenly over each part, and no window reaches into another part.

    Args:
        groups: Offsets of the roles' training and test texts, (R + 1,) each.
        count: Number of roles.
        train: Training windows of a role, validation included; None: as many as share no character, labels included.
        test: Test windows of a role; None: as for `train`.
        validation: Fraction of a role's training text, at its end, that is set aside.

    Returns:
        Rows of each role, int64: (training, validation, test).

    Raises:
        ConfigError: If a role has too little text.
    """
    train_ends, test_ends = groups
    roles = len(train_ends) - 1
    if count > roles:
        raise ConfigError(f"data.clients: {count} roles are requested, the plays have {roles}")
    held = trained = None
    if train is not None:
        held = round(validation * train)
        trained = train - held
    found = []
    for role in range(count):
        begin, end = train_ends[role : role + 2].tolist()
        cut = end - round(validation * (end - begin))
        name = f"role {role + 1} of {count}, the longest first"
        found.append((
            _windows(begin, cut, trained, f"data.train_per_client: {name}"),
            _windows(cut, end, held, f"data.validation: {name}") if validation else np.empty(0, np.int64),
            _windows(int(test_ends[role]), int(test_ends[role + 1]), test, f"data.test_per_client: {name}"),
        ))  # fmt: skip
    return found


def _windows(begin: int, end: int, count: int | None, what: str) -> np.ndarray:
    """Start positions of `count` windows spread evenly over the text from `begin` to `end`."""
    possible = end - begin - WINDOW
    wanted = 1 if count is None else count
    if not 1 <= wanted <= possible:
        raise ConfigError(
            f"{what}, has {end - begin} characters for {wanted} windows of {WINDOW} and the next one; "
            f"allowed are 1 to {max(0, possible)}"
        )
    if count is None:
        return np.arange(begin, begin + possible, WINDOW + 1)
    return begin + np.arange(count) * (possible - 1) // max(1, count - 1)
