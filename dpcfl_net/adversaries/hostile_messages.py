"""Messages of a hostile worker: each breaks one rule of the protocol or answers a task dishonestly."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from dpcfl_net.core.tensors import DTYPES
from dpcfl_net.federation.message_encoding import INDEX
from dpcfl_net.transport.channel import new_id
from dpcfl_net.transport.messages import CHUNK, MAX_FRAME, MAX_HEADER, VERSION, Header, Template, encode

if TYPE_CHECKING:
    from dpcfl_net.adversaries.hostile_connection import HostileConnection

Frames = list[bytes | memoryview]
Said = tuple[list[Frames], tuple[str, ...]]  # messages, and the ids that an answer refers to (none without a header)
Tensors = dict[str, np.ndarray]

HUGE = 1e6  # norm of an update
CANARY = "hostile-worker-canary"  # file that a coordinator creates if it loads the pickle


def pickle_that_writes(path: str) -> bytes:
    """Return a pickle that creates a file when it is loaded: open(path, "w")."""
    return b"cbuiltins\nopen\n(V" + path.encode("ascii", "backslashreplace") + b"\nVw\ntR."


def _beat(line: HostileConnection) -> dict[str, Any]:
    found: dict[str, Any] = msgpack.unpackb(encode(line.stamp.header(kind="HEARTBEAT", code="computing")))
    return found


def _junk(*frames: bytes) -> Callable[[HostileConnection], Said]:
    return lambda line: ([list(frames)], ())


def _field(**changes: Any) -> Callable[[HostileConnection], Said]:
    """A heartbeat with unexpected or undecodable fields, whose id is not read."""
    return lambda line: ([[msgpack.packb({**_beat(line), **changes})]], ())


def _other(**changes: Any) -> Callable[[HostileConnection], Said]:
    """A well-formed heartbeat with other values."""

    def say(line: HostileConnection) -> Said:
        header = Header(**{**_beat(line), **changes})
        return [[encode(header)]], (header.id,)

    return say


def _table(*rows: list[Any]) -> Callable[[HostileConnection], Said]:
    """A result that announces only these tensors, with the number of chunks and a hash that go with their bytes."""
    size = sum(row[3] for row in rows)
    return _field(kind="RESULT", code="release", tensors=[*rows], chunks=-(-size // CHUNK), blake3="c" * 64 if size else "")


def _three_frames(line: HostileConnection) -> Said:
    return [[msgpack.packb(_beat(line)), b"x", b"y"]], ()


def _again(line: HostileConnection) -> Said:
    header = Header(**_beat(line))
    return [[encode(header)], [encode(header)]], (header.id,)


def _stray_chunk(line: HostileConnection) -> Said:
    header = line.stamp.header(kind="CHUNK", parent=new_id())
    return [[encode(header), b"x"]], (header.parent,)


def _stray_result(line: HostileConnection) -> Said:
    header = line.stamp.header(kind="RESULT", parent=new_id(), code="lost")
    return [[encode(header)]], (header.id,)


MESSAGES: dict[str, tuple[str, Callable[[HostileConnection], Said]]] = {
    "garbage": ("bytes that are no message", _junk(b"\xc1" * 200)),
    "pickle": ("a pickle that would create a file", _junk(pickle_that_writes(CANARY))),
    "ext-type": ("an extension type in a field", _field(round=msgpack.ExtType(5, pickle_that_writes(CANARY)))),
    "deep-nesting": ("a list in a list, 60,000 deep", _junk(b"\x91" * 60_000)),
    "false-length": ("a list that claims four billion members", _junk(b"\xdd\xff\xff\xff\xff")),
    "huge-header": ("a header above the size limit", _junk(bytes(MAX_HEADER + 1))),
    "oversize-frame": ("a frame above the size limit", _junk(bytes(MAX_FRAME + 1))),
    "three-frames": ("a header with two chunks", _three_frames),
    "privacy-parameter": ("a field that would set the noise", _field(noise_multiplier=0.0)),
    "object-dtype": ("a tensor of Python objects", _table(["update", "O", [1], 8])),
    "shape-overflow": ("sides whose product is 0 in 64 bits", _table(["update", "f4", [1 << 32, 1 << 32], 0])),
    "negative-side": ("two sides of -1, whose product is 1", _table(["update", "f4", [-1, -1], 4])),
    "repeated-tensor": ("two tensors with one name", _table(["update", "f4", [1], 4], ["update", "f4", [1], 4])),
    "wrong-version": ("another protocol version", _other(version=VERSION + 1)),
    "wrong-run": ("another run", _other(run="f" * 32)),
    "wrong-job": ("another job's hash", _other(job="f" * 64)),
    "other-boot": ("a boot id that did not say HELLO", _other(boot="f" * 32)),
    "same-sequence": ("one message twice", _again),
    "stray-chunk": ("a chunk without a message", _stray_chunk),
    "stray-result": ("an answer without a task", _stray_result),
    "coordinators-word": ("a message that only a coordinator may send", _other(kind="TASK", code="")),
}


def endless(line: HostileConnection, mebibytes: int) -> Frames:
    """Return one message of at least `mebibytes` MiB in frames of CHUNK bytes that share memory, so that only the receiver needs room."""
    return [msgpack.packb(_beat(line)), *[memoryview(bytes(CHUNK))] * -(-(mebibytes << 20) // CHUNK)]


def honest(template: Template) -> Tensors:
    """Return a release of zeros that fits the template, with the smallest allowed sides; the first coordinates of a top-k."""
    made = {
        name: np.zeros([side if isinstance(side, int) else side[0] for side in pinned.shape], DTYPES[pinned.dtype])
        for name, pinned in template.items()
    }
    return {name: np.arange(array.size, dtype="<i4") if name.endswith(INDEX) else array for name, array in made.items()}


def _filled(tensors: Tensors, value: float) -> Tensors:
    return {name: np.full_like(array, value) if array.dtype.kind == "f" else array for name, array in tensors.items()}


def _long(tensors: Tensors) -> Tensors:
    """Float tensors with norm HUGE."""
    return {name: _filled({name: array}, HUGE / max(1, array.size) ** 0.5)[name] for name, array in tensors.items()}


def _longer(tensors: Tensors) -> Tensors:
    """Tensors with one number more."""
    return {name: np.zeros(array.size + 1, array.dtype) for name, array in tensors.items()}


def _retyped(tensors: Tensors) -> Tensors:
    """Floats as integers, and integers, as those of secure sums, as floats."""
    return {name: np.zeros(array.shape, "<i8" if array.dtype.kind == "f" else "<f4") for name, array in tensors.items()}


Lie = Callable[[Tensors, Header], dict[str, Any]]  # (honest release, task) -> tensors, and header fields to replace

ANSWERS: dict[str, tuple[str, Lie]] = {
    "zero-update": ("a release of zeros, which fits the template", lambda t, task: {"tensors": t}),
    "nan-update": ("a release of NaN", lambda t, task: {"tensors": _filled(t, np.nan)}),
    "infinite-update": ("a release of infinities", lambda t, task: {"tensors": _filled(t, np.inf)}),
    "huge-update": ("a release of norm 1e6", lambda t, task: {"tensors": _long(t)}),
    "wrong-shape": ("a release with one number too many", lambda t, task: {"tensors": _longer(t)}),
    "wrong-dtype": ("a release of another dtype", lambda t, task: {"tensors": _retyped(t)}),
    "extra-tensor": ("a release with an additional tensor", lambda t, task: {"tensors": {**t, "zz": np.zeros(1, "<f4")}}),
    "wrong-hash": ("a release whose bytes differ from the announced hash", lambda t, task: {"tensors": t, "blake3": "0" * 64}),
    "wrong-chunk": ("a release whose second chunk comes first", lambda t, task: {"tensors": t, "index": 1}),
    "wrong-round": ("a release for the next round", lambda t, task: {"tensors": t, "round": task.round + 1}),
    "wrong-task": ("a release for another task name", lambda t, task: {"tensors": t, "task": "something_else"}),
}
