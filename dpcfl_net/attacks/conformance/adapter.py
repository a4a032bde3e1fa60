"""The adapter: one function of another program that trains on given records and returns what it releases."""

from __future__ import annotations

import contextlib
import inspect
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpcfl_net.attacks.conformance.claim import Claim
from dpcfl_net.core import plugins
from dpcfl_net.core.errors import ConfigError

OPTIONS = ("steps", "noise_multiplier", "seed")  # keyword arguments that the kit gives to a function that has them
FIELD = "FUNCTION"


@dataclass
class Adapter:
    """A training function, called with crafted records.

    Attributes:
        name: `module:function` or `path/to/file.py:function`.
        claim: The claim.
        function: The function.
        options: Which of OPTIONS the function has.
        seeds: Source of seeds; None if the function draws its own.
        calls: Number of calls so far.
        seconds: Time of all calls.
    """

    name: str
    claim: Claim
    function: Callable[..., Any]
    options: frozenset[str]
    seeds: np.random.Generator | None = None
    calls: int = 0
    seconds: float = 0.0

    @property
    def seeded(self) -> bool:
        """True if the kit gives the function its seeds."""
        return self.seeds is not None and "seed" in self.options

    def release(self, records: np.ndarray, steps: int, *, noise: bool = True) -> np.ndarray:
        """Train on records and read the release.

        Args:
            records: One gradient in each row, (n, d) float32.
            steps: Number of steps; that of the claim, unless the function has the option.
            noise: False for no noise; only if the function has the option.

        Returns:
            What each step released, (steps, d) float64; (1, d), the sum of all steps, if only the end is released. In units of the
            movement by one record with a gradient of the clip norm.

        Raises:
            ConfigError: If the function raises, or returns anything but tensors of a matching size.
        """
        given: dict[str, Any] = {"steps": steps} if "steps" in self.options else {}
        if not noise:
            given["noise_multiplier"] = 0.0
        if self.seeds is not None and self.seeded:
            given["seed"] = int(self.seeds.integers(2**31))
        start = time.perf_counter()
        try:
            # Standard output is the kit's: it may be read as JSON.
            with contextlib.redirect_stdout(sys.stderr):
                returned = self.function(records.copy(), **given)
        except (Exception, SystemExit) as error:
            raise plugins.failure(FIELD, self.name, "the function", error) from error
        self.calls += 1
        self.seconds += time.perf_counter() - start
        return self._read(returned, steps, records.shape[1])

    def _read(self, returned: Any, steps: int, width: int) -> np.ndarray:
        if not isinstance(returned, Mapping) or not returned:
            got = "an empty one" if isinstance(returned, Mapping) else type(returned).__name__
            raise ConfigError(f"{FIELD} is {self.name!r}: must return a dict of tensors by name, got {got}")
        try:
            tensors = {str(name): _real(value) for name, value in returned.items()}
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{FIELD} is {self.name!r}: must return a dict of arrays of numbers: {error}") from None
        size = sum(tensor.size for tensor in tensors.values())
        rows = size // width
        allowed = {1, steps} | ({steps + 1} if self.claim.release == "parameters" else set())
        if size % width or rows not in allowed or (rows > 1 and any(len(np.atleast_1d(t)) != rows for t in tensors.values())):
            shapes = ", ".join(f"{name} {tensor.shape}" for name, tensor in tensors.items())
            raise ConfigError(
                f"{FIELD} is {self.name!r}: returned {shapes} for {width} columns and {steps} steps: all tensors together must hold "
                f"{width} numbers (after the last step), or {width} in each of "
                f"{' or '.join(str(n) for n in sorted(allowed - {1}) or [1])} rows along a first axis (after every step)"
            )
        values = np.concatenate([tensor.reshape(rows, -1) for tensor in tensors.values()], axis=1)
        with np.errstate(invalid="ignore"):  # infinity less infinity: reported as not finite
            if self.claim.release == "parameters" and rows > 1:
                values = np.diff(values, axis=0, prepend=np.zeros((0 if rows == steps + 1 else 1, width)))
            return values / self.claim.unit_of_release


def _real(value: Any) -> np.ndarray:
    """Numbers as float64; TypeError for complex ones, whose imaginary parts would be released without a test."""
    found = np.asarray(value)
    if np.iscomplexobj(found):
        raise TypeError("complex numbers are released in two parts: return both as real tensors")
    return found.astype(np.float64)


def load(name: str, claim: Claim, seed: int | None) -> Adapter:
    """Import an adapter.

    Args:
        name: `module:function` or `path/to/file.py:function`.
        claim: The claim.
        seed: Seed of the seeds that the function is given; None to let it draw its own.

    Raises:
        ConfigError: If there is no such function, or it cannot be called with the records alone.
    """
    if name.endswith(".py"):
        raise ConfigError(f"{FIELD} is {name!r}: add the function to the file, as path/to/file.py:function")
    file = name.rpartition(":")[0].endswith(".py")
    function = plugins.load_file(FIELD, name) if file else plugins.load(FIELD, name)
    parameters = inspect.signature(function).parameters
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    options = frozenset(option for option in OPTIONS if option in parameters and parameters[option].kind in kinds)
    required = [
        each.name
        for each in list(parameters.values())[1:]
        if each.default is each.empty and each.name not in options and each.kind in kinds
    ]
    if not parameters or required:
        raise ConfigError(
            f"{FIELD} is {name!r}: must be a function of the records; further arguments need a default"
            + (f", unlike {', '.join(required)}" if required else "")
        )
    needed = [
        option
        for option in ("seed", "noise_multiplier")
        if option in options and parameters[option].default is inspect.Parameter.empty
    ]
    if needed:
        raise ConfigError(f"{FIELD} is {name!r}: {', '.join(needed)} needs a default, with which the claim holds")
    generator = None if seed is None else np.random.default_rng(seed)
    return Adapter(name, claim, function, options, generator)
