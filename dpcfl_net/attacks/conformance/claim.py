"""The claim about a private training function, as a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from dpcfl_net.core import yaml_file
from dpcfl_net.core.config_messages import known_keys, nearest_key, sentences
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import shown
from dpcfl_net.core.frozen import StrictModel
from dpcfl_net.core.types import Adjacency

Sampling = Literal["poisson", "fixed", "shuffle", "allocation", "full"]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
MOST_RECORDS, MOST_STEPS = 20_000, 1_000_000


class Claim(StrictModel):
    """Claim of a program about its training function.

    Attributes:
        epsilon: Claimed epsilon of all steps together.
        delta: Delta of epsilon.
        adjacency: "zero-out" or "replace-one"; "add-remove" has the numbers of "zero-out".
        unit: What one row of the records stands for.
        accountant: Name of the accountant that computed epsilon; shown only.
        sampling: "poisson": each record is in each batch independently; "fixed": batches of one size, drawn independently at each
            step without replacement; "shuffle": each record is in one batch of each epoch, and all batches have one size;
            "allocation": each record is in one batch of each epoch, drawn uniformly and independently; "full": all records.
        rate: Expected share of the records in a batch.
        records: Number of records that the function is given.
        steps: Number of noisy steps.
        noise_multiplier: Deviation of the noise on the sum of a batch, over the clip norm.
        clip: L2 norm to which each record's gradient is clipped.
        release: "parameters" or "updates".
        learning_rate: Learning rate of plain SGD, for "parameters".
        divisor: What the noisy sum is divided by; the expected batch size by default.
    """

    epsilon: Annotated[float, Field(gt=0)]
    delta: Annotated[float, Field(gt=0, lt=1)]
    adjacency: Literal["zero-out", "replace-one", "add-remove"] = "zero-out"
    unit: Literal["record", "client"] = "record"
    accountant: Annotated[str, Field(max_length=40)] = "not stated"
    sampling: Sampling
    rate: Annotated[float, Field(gt=0, le=1)]
    records: Annotated[int, Field(ge=20, le=MOST_RECORDS)]
    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)]
    noise_multiplier: Annotated[float, Field(ge=0.01, le=1000)]
    clip: _Positive
    release: Literal["parameters", "updates"] = "parameters"
    learning_rate: _Positive | None = None
    divisor: _Positive | None = None

    @model_validator(mode="after")
    def _together(self) -> Claim:
        if self.release == "parameters" and self.learning_rate is None:
            raise ValueError("learning_rate is missing: `release: parameters` needs it")
        if self.release == "updates" and self.learning_rate is not None:
            raise ValueError(f"learning_rate is {self.learning_rate:g}: `release: updates` takes none")
        if (self.rate == 1) != (self.sampling == "full"):
            raise ValueError(f"rate is {self.rate:g} with `sampling: {self.sampling}`: must be 1 with `full`, and only there")
        whole = self.rate * self.records
        if self.sampling in ("fixed", "shuffle") and abs(whole - round(whole)) > 1e-6 * whole:
            raise ValueError(f"rate is {self.rate:g}: rate * records is {whole:g}, must be a whole batch size")
        if self.sampling == "shuffle" and self.records % self.batch:
            raise ValueError(f"rate is {self.rate:g}: with `shuffle` an epoch must be a whole number of batches, 1 / rate")
        if self.sampling == "allocation" and abs(1 / self.rate - self.epoch) > 1e-6 * self.epoch:
            raise ValueError(
                f"rate is {self.rate:g}: with `allocation` it must be 1 / the batches of an epoch, such as {1 / self.epoch:g}"
            )
        if self.rate * self.records < 1:
            raise ValueError(f"rate is {self.rate:g}: rate * records is {whole:g}, must be at least 1")
        return self

    @property
    def batch(self) -> int:
        """Batch size, rounded; exact for "fixed" and "shuffle"."""
        return round(self.rate * self.records)

    @property
    def epoch(self) -> int:
        """Steps per epoch."""
        return round(1 / self.rate)

    @property
    def pair(self) -> Adjacency:
        """Adjacency in the words of the accountant."""
        return "replace-one" if self.adjacency == "replace-one" else "zero-out"

    @property
    def unit_of_release(self) -> float:
        """How far the clipped gradient of one record moves a release."""
        divisor = self.divisor or self.rate * self.records
        return self.clip * (self.learning_rate or 1.0) / divisor


def read_claim(path: Path) -> Claim:
    """Read a claim.

    Args:
        path: YAML file.

    Raises:
        ConfigError: Names every field that is missing, unknown or out of range.
    """
    document = yaml_file.load(path)
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must hold keys and values, such as epsilon: 3, got {shown(document)}")
    keys = known_keys(Claim)

    def hint(key: str) -> str:
        near = nearest_key(key, keys)
        return f"; did you mean {near!r}?" if near else f": must be one of {', '.join(keys)}"

    try:
        return Claim.model_validate(document)
    except ValidationError as error:
        raise ConfigError([f"{path}: {sentence.removeprefix(': ')}" for sentence in sentences(error, hint)]) from None
