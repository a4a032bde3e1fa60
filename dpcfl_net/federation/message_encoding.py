"""Forms of tasks and releases on the wire, from the signed protocol: encoding, decoding, and pinned templates.

What is encoded is a release, that is an output of charged mechanisms; encoding it is post-processing. The residual of error
feedback is computed from releases and from what was sent of them, never from records.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np

from dpcfl_net.core.errors import RunFailed
from dpcfl_net.core.tensors import Memory, memory_of
from dpcfl_net.core.types import ClientStep, Release, TensorSpec
from dpcfl_net.federation.capabilities import ClientSide, tensor_sides
from dpcfl_net.federation.in_order import Arrays
from dpcfl_net.transport import encodings
from dpcfl_net.transport.messages import Template, TensorTemplate, resolve

SCALE, INDEX = ".scale", ".index"  # suffixes of the tensors beside an encoded update
RESIDUAL = "residual of "  # start of the names of residuals in a client's state
State = dict[str, np.ndarray]


class MessageEncoding:
    """Encodes and decodes the tensors of a job's messages.

    Args:
        algorithm: The job's algorithm.
    """

    def __init__(self, algorithm: ClientSide) -> None:
        self._algorithm = algorithm
        self._down, self._up = algorithm.protocol.communication.down, algorithm.protocol.communication.up

    @cached_property
    def _sides(self) -> Mapping[str, int | tuple[int, int]]:
        return tensor_sides(self._algorithm)

    def model_bytes(self, parameters: int) -> int:
        """Return the bytes of a model in a task."""
        return parameters * (4 if self._down == "float32" else 2)

    def update_bytes(self, parameters: int) -> int:
        """Return the bytes of an update in a release, unless its step sends it exactly."""
        if self._up.form == "int8":
            return parameters + 4 * encodings.blocks(parameters)
        return 4 * parameters if self._up.form == "float32" else 8 * self._kept(parameters)

    def task_template(self, step: ClientStep) -> Template:
        """Return the tensors of a task as they cross the wire."""
        template = resolve(step.takes, self._sides)
        if self._down == "float32":
            return template
        code = encodings.HALF[self._down]
        return {name: replace(pinned, dtype=code) if _is_model(pinned) else pinned for name, pinned in template.items()}

    def plain_template(self, step: ClientStep) -> Template:
        """Return the tensors of a release before it is encoded."""
        return resolve(step.gives, self._sides)

    def release_template(self, step: ClientStep) -> Template:
        """Return the tensors of a release as they cross the wire."""
        template: dict[str, TensorTemplate] = {}
        for name, pinned in resolve(step.gives, self._sides).items():
            if not self._encodes(step.gives[name]):
                template[name] = pinned
            elif self._up.form == "int8":
                size = _size(pinned)
                template |= {name: TensorTemplate("i1", (size,)), name + SCALE: TensorTemplate("f4", (encodings.blocks(size),))}
            else:
                count = self._kept(_size(pinned))
                template |= {name: TensorTemplate("f4", (count,)), name + INDEX: TensorTemplate("i4", (count,))}
        return template

    def encode_tasks(self, step: ClientStep, tasks: Mapping[int, dict[str, np.ndarray]]) -> dict[int, dict[str, np.ndarray]]:
        """Encode the tasks of a call; an array that many clients get is encoded once.

        Args:
            step: The client step.
            tasks: Client to its tensors.

        Returns:
            Client to its tensors as they cross the wire.

        Raises:
            RunFailed: If a model cannot be sent in the job's form.
        """
        if self._down == "float32":
            return dict(tasks)
        template = resolve(step.takes, self._sides)
        encoded: dict[Memory, np.ndarray] = {}

        def once(array: np.ndarray) -> np.ndarray:
            key = memory_of(array)
            if key not in encoded:
                try:
                    encoded[key] = encodings.to_half(array, self._down)
                except ValueError as problem:
                    wider = "bfloat16 or float32" if self._down == "float16" else "float32"
                    raise RunFailed(f"communication.down is {self._down!r}: {problem}; use {wider}") from None
            return encoded[key]

        return {
            client: {name: once(array) if _is_model(template[name]) else array for name, array in tensors.items()}
            for client, tensors in tasks.items()
        }

    def decode_task(self, step: ClientStep, tensors: Arrays) -> dict[str, np.ndarray]:
        """Decode the tensors of a task that fits its template."""
        if self._down == "float32":
            return dict(tensors)
        template = resolve(step.takes, self._sides)
        return {name: encodings.from_half(array) if _is_model(template[name]) else array for name, array in tensors.items()}

    def encode_release(self, step: ClientStep, client: int, release: Release, residuals: State) -> tuple[Release, State]:
        """Encode a release that fits the step's tensors.

        Args:
            step: The client step.
            client: Client id.
            release: The release, already protected.
            residuals: What earlier releases of the client did not send, by name; empty without error feedback.

        Returns:
            The release as it crosses the wire, and all residuals after it.
        """
        sent, left = dict(release.tensors), dict(residuals)
        for name, spec in step.gives.items():
            if not self._encodes(spec):
                continue
            update = np.ascontiguousarray(release.tensors[name], "<f4").reshape(-1)
            if self._up.form == "int8":
                sent[name], sent[name + SCALE] = encodings.to_int8(update)
                continue
            key = f"{RESIDUAL}{step.kind} {name}"
            if self._up.error_feedback:
                update = update + left.get(key, np.float32(0))
            indices, values = encodings.to_top_k(update, self._kept(update.size))
            if self._up.error_feedback:
                values = _within(values, self._bound(spec, client))
                left[key] = _remainder(update, indices, values)
            sent[name], sent[name + INDEX] = values, indices
        return Release(**sent), left

    def decode_release(self, step: ClientStep, tensors: Arrays) -> dict[str, np.ndarray]:
        """Decode the tensors of a release that fits its template.

        Args:
            step: The client step.
            tensors: The tensors as they crossed the wire, finite.

        Returns:
            The tensors of the release, as the step gives them.

        Raises:
            Refused: "encoding" for tensors that no honest client sends.
        """
        if self._up.form == "float32":
            return dict(tensors)
        decoded: dict[str, np.ndarray] = {}
        for name, pinned in resolve(step.gives, self._sides).items():
            array, shape = tensors[name], tuple(side for side in pinned.shape if isinstance(side, int))
            if self._encodes(step.gives[name]) and self._up.form == "int8":
                array = encodings.from_int8(array, tensors[name + SCALE]).reshape(shape)
            elif self._encodes(step.gives[name]):
                array = encodings.from_top_k(tensors[name + INDEX], array, _size(pinned)).reshape(shape)
            decoded[name] = array
        return decoded

    def _encodes(self, spec: TensorSpec) -> bool:
        """True if a tensor of a release is an update in another form than float32."""
        return self._up.form != "float32" and spec.is_update and not spec.exact

    def _kept(self, size: int) -> int:
        assert self._up.fraction is not None
        return encodings.kept(size, self._up.fraction)

    def _bound(self, spec: TensorSpec, client: int) -> float:
        """Norm up to which the server accepts an update, from public facts."""
        assert spec.max_norm is not None
        return spec.max_norm(self._algorithm, self._algorithm.protocol.client(client))


def _is_model(pinned: TensorTemplate) -> bool:
    """True if a tensor of a task holds models, which may cross the wire in 16 bits."""
    return pinned.dtype == "f4" and bool(pinned.shape)


def _size(pinned: TensorTemplate) -> int:
    return math.prod(side for side in pinned.shape if isinstance(side, int))


def _within(values: np.ndarray, bound: float) -> np.ndarray:
    """Shorten values to the norm that the server accepts: with error feedback they add up over rounds."""
    norm = float(np.linalg.norm(values.astype(np.float64)))
    if not math.isfinite(norm) or norm <= bound:
        return values
    return (values * (bound * (1 - 2.0**-20) / norm)).astype("<f4")


def _remainder(update: np.ndarray, indices: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the unsent part of an update; zero where a number is not finite, since it would never leave the residual."""
    rest = update.copy()
    rest[indices] -= values
    rest[~np.isfinite(rest)] = 0
    return rest
