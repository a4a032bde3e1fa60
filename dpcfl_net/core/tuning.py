"""Tuning of a job's hyperparameters, as the signed protocol declares it for the privacy statement."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from dpcfl_net.core.frozen import StrictModel

Search = Literal["grid", "random", "optuna"]
Score = Literal["accuracy_mean", "accuracy_worst", "accuracy_minority"]


class Tuning(StrictModel):
    """The search that chose the settings of this job; `dpcfl tune` fills it in."""

    search: Search = Field(description="grid: all combinations; random: a seeded sample of them; optuna: TPE sampler")
    trials: int = Field(ge=1, le=1_000_000, description="trials of each algorithm")
    seeds: list[int] = Field(min_length=1, description="seeds with which each trial was run")
    algorithms: list[str] = Field(
        min_length=1, description="algorithms tuned on the same records, with equal numbers of trials"
    )
    settings: dict[str, list[Any]] = Field(description="settings of this algorithm that were tuned, and their values")
    score: Score = Field(description="figure on validation records by which the trial was chosen")
    validation: float = Field(gt=0, lt=1, description="fraction of a client's training records that trials were scored on")

    @property
    def runs(self) -> int:
        """Number of runs of the trials of one algorithm."""
        return self.trials * len(self.seeds)
