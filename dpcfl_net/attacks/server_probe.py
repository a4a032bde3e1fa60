"""Algorithm whose server dumps its own process, so that a test can search the dump for secrets.

    algorithm: {name: "dpcfl_net.attacks.server_probe:ServerProbe", out: FOLDER}

writes FOLDER/found.json and FOLDER/memory.bin in the first round. A test that knows the secrets searches the files.
Otherwise the algorithm is `global`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from dpcfl_net.algorithms import base
from dpcfl_net.algorithms.global_model import Global
from dpcfl_net.core.types import State
from dpcfl_net.federation.base import Federation

PAGE = 4096
_EMPTY = bytes(PAGE)


class ServerProbe(Global):
    """As `global`; the server dumps its process in the first round."""

    name = ""
    paper = "none: an attack"

    class Options(base.Options):
        out: str = Field(description="folder of the dump")

    def round(self, state: State, t: int, fed: Federation) -> State:
        if t == 1:
            look(Path(self.options.out))
        return super().round(state, t, fed)


def look(out: Path) -> None:
    """Dump this process.

    Args:
        out: Folder, created if missing. found.json gets objects, modules, descriptors, mapped files, arguments and
            environment; memory.bin gets the memory.
    """
    out.mkdir(parents=True, exist_ok=True)
    gc.unfreeze()  # also lists objects that a parent froze before it forked
    report = {
        "objects": dict(Counter(f"{type(item).__module__}.{type(item).__qualname__}" for item in gc.get_objects())),
        "modules": sorted(name for name in sys.modules if name.split(".")[0] == "dpcfl_net"),
        "descriptors": _descriptors(),
        "mapped": sorted({line.split(None, 5)[5] for line in _maps() if len(line.split(None, 5)) == 6}),
        "arguments": Path("/proc/self/cmdline").read_text(errors="replace").split("\0"),
        "environment": {**os.environ, "": Path("/proc/self/environ").read_text(errors="replace")},
    }
    (out / "found.json").write_text(json.dumps(report, indent=1))
    with (out / "memory.bin").open("wb") as file:
        for piece in _memory():
            file.write(piece)


def _descriptors() -> dict[str, str]:
    descriptors: dict[str, str] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptors[name] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the descriptor of this listing
            continue
    return descriptors


def _maps() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


def _memory() -> Iterator[bytes]:
    """Readable memory without code and empty pages; includes mapped data files."""
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        for line in _maps():
            span, rights, _, _, _, *path = line.split(None, 5)
            if rights[0] != "r" or (rights[1] != "w" and (not path or ".so" in path[0] or "/bin/" in path[0])):
                continue
            start, end = (int(side, 16) for side in span.split("-"))
            for at in range(start, end, 256 * PAGE):
                yield _full_pages(memory, at, min(256 * PAGE, end - at))


def _full_pages(memory: Any, at: int, size: int) -> bytes:
    try:
        memory.seek(at)
        piece: bytes = memory.read(size)
    except (OSError, ValueError, OverflowError):  # an unreadable mapping, such as one of the kernel
        return b""
    pages = (piece[k : k + PAGE] for k in range(0, len(piece), PAGE))
    return b"".join(page for page in pages if page != _EMPTY)
