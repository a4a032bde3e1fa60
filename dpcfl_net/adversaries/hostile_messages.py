"""Messages of the hostile worker: each breaks one rule of the wire, or is an answer that no honest client sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from dpcfl_net.transport.channel import new_id
from dpcfl_net.transport.messages import CHUNK, MAX_HEADER, Header, Template, encode
from dpcfl_net.transport.sockets import MAX_FRAME

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
    return line.stamp.header(kind="HEARTBEAT", code="computing").model_dump(exclude_defaults=True)


def _junk(*frames: bytes) -> Callable[[HostileConnection], Said]:
    return lambda line: ([list(frames)], ())


def _field(**changes: Any) -> Callable[[HostileConnection], Said]:
    """Build a heartbeat with invalid fields; the receiver cannot read its id."""
    return lambda line: ([[msgpack.packb({**_beat(line), **changes})]], ())


def _other(**changes: Any) -> Callable[[HostileConnection], Said]:
    """Build a well-formed heartbeat with wrong values."""

    def say(line: HostileConnection) -> Said:
        header = Header(**{**_beat(line), **changes})
        return [[encode(header)]], (header.id,)

    return say


def _table(*rows: list[Any]) -> Callable[[HostileConnection], Said]:
    """Build a result that announces these tensors and has no chunks."""
    return _field(kind="RESULT", code="release", tensors=list(rows))


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
    "garbage": ("bytes that are not a message", _junk(b"\xc1" * 200)),
    "pickle": ("a pickle that would create a file", _junk(pickle_that_writes(CANARY))),
    "ext-type": ("an extension type in a field", _field(round=msgpack.ExtType(5, pickle_that_writes(CANARY)))),
    "deep-nesting": ("nested lists, 60,000 levels", _junk(b"\x91" * 60_000)),
    "false-length": ("a list that claims 2^32 - 1 elements", _junk(b"\xdd\xff\xff\xff\xff")),
    "huge-header": ("a header above the size limit", _junk(bytes(MAX_HEADER + 1))),
    "oversize-frame": ("a frame above the size limit", _junk(bytes(MAX_FRAME + 1))),
    "three-frames": ("a header with two chunks", _three_frames),
    "privacy-parameter": ("a field that would set the noise", _field(noise_multiplier=0.0)),
    "object-dtype": ("a tensor of Python objects", _table(["update", "O", [1], 8])),
    "shape-overflow": ("a shape whose product is 0 in 64 bits", _table(["update", "f4", [1 << 32, 1 << 32], 0])),
    "negative-side": ("a dimension of -1", _table(["update", "f4", [-1], -4])),
    "repeated-tensor": ("two tensors with the same name", _table(["update", "f4", [1], 4], ["update", "f4", [1], 4])),
    "wrong-version": ("another version of the wire format", _other(version=2)),
    "wrong-run": ("another run id", _other(run="f" * 32)),
    "wrong-job": ("another job's hash", _other(job="f" * 64)),
    "other-boot": ("a boot id without a HELLO", _other(boot="f" * 32)),
    "same-sequence": ("the same message twice", _again),
    "stray-chunk": ("a chunk without a message", _stray_chunk),
    "stray-result": ("an answer without a task", _stray_result),
    "coordinators-word": ("a message that only a coordinator may send", _other(kind="TASK", code="")),
}


def endless(line: HostileConnection, mebibytes: int) -> Frames:
    """Return one message with `mebibytes` frames of 1 MiB; all share memory, so that only the receiver needs space."""
    return [msgpack.packb(_beat(line)), *[memoryview(bytes(CHUNK))] * mebibytes]


def honest(template: Template) -> Tensors:
    """Return a valid release: zeros with the smallest shape that the template allows."""
    return {
        name: np.zeros([side if isinstance(side, int) else side[0] for side in pinned.shape], f"<{pinned.dtype}")
        for name, pinned in template.items()
    }


def _filled(tensors: Tensors, value: float) -> Tensors:
    return {name: np.full_like(array, value) if array.dtype.kind == "f" else array for name, array in tensors.items()}


def _long(tensors: Tensors) -> Tensors:
    """Scale every float tensor to norm HUGE."""
    return {name: _filled({name: array}, HUGE / max(1, array.size) ** 0.5)[name] for name, array in tensors.items()}


def _longer(tensors: Tensors) -> Tensors:
    """Add one element to every tensor."""
    return {name: np.zeros(array.size + 1, array.dtype) for name, array in tensors.items()}


def _retyped(tensors: Tensors) -> Tensors:
    """Swap float and integer dtypes."""
    other = {"f": "<i8", "i": "<f4"}
    return {name: np.zeros(array.shape, other[array.dtype.kind]) for name, array in tensors.items()}


Lie = Callable[[Tensors, Header], dict[str, Any]]  # (honest release, task) -> tensors, and header fields to replace

ANSWERS: dict[str, tuple[str, Lie]] = {
    "zero-update": ("a valid release of zeros", lambda t, task: {"tensors": t}),
    "nan-update": ("a release of NaN", lambda t, task: {"tensors": _filled(t, np.nan)}),
    "infinite-update": ("a release of infinities", lambda t, task: {"tensors": _filled(t, np.inf)}),
    "huge-update": ("a release of norm 1e6", lambda t, task: {"tensors": _long(t)}),
    "wrong-shape": ("a release with one element too many", lambda t, task: {"tensors": _longer(t)}),
    "wrong-dtype": ("a release of another dtype", lambda t, task: {"tensors": _retyped(t)}),
    "extra-tensor": ("a release with an additional tensor", lambda t, task: {"tensors": {**t, "zz": np.zeros(1, "<f4")}}),
    "wrong-hash": ("a release that differs from its announced hash", lambda t, task: {"tensors": t, "sha256": "0" * 64}),
    "wrong-chunk": ("a release whose second chunk comes first", lambda t, task: {"tensors": t, "index": 1}),
    "wrong-round": ("a release for the next round", lambda t, task: {"tensors": t, "round": task.round + 1}),
    "wrong-task": ("a release for a task of another name", lambda t, task: {"tensors": t, "task": "something_else"}),
}
