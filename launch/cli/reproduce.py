"""`dpcfl reproduce`: computes figures of the papers, running whole federations where they need them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpcfl_net.core.errors import ConfigError, RunFailed
from dpcfl_net.reproduce.base import SCALES, Scale, find, folder_name, registry, write

if TYPE_CHECKING:
    from dpcfl_net.results.compare import Result

STORE = "store"


@dataclass(frozen=True)
class RunContext:
    """The context of a reproduction on this machine; runs are kept in `store` and shared by all figures."""

    scale: Scale
    folder: Path
    store: Path

    def say(self, line: str, /) -> None:
        print(line, flush=True)

    def results(self, config: Path, axes: Mapping[str, Sequence[Any]]) -> list[Result]:
        """A finished run for every combination of the axes; RunFailed names those that have none."""
        from dpcfl_net.experiment.config import load
        from dpcfl_net.launch.sweeps import run_cells
        from dpcfl_net.results.compare import read_result

        cells = [
            load(config, [f"{key}={_as_yaml(value)}" for key, value in zip(axes, values, strict=True)])
            for values in itertools.product(*axes.values())
        ]
        outcomes = run_cells(cells, self.store, self.say)
        failed = [f"{outcome.folder}: {outcome.error}" for outcome in outcomes if outcome.state != "finished"]
        if failed:
            raise RunFailed("runs that the figure needs did not finish: " + "; ".join(failed))
        return [read_result(outcome.folder) for outcome in outcomes]


def reproduce(names: Sequence[str], scale: str, out: Path) -> None:
    """Compute figures one after the other: for each its folder below `out`, and a line for each claim of the paper."""
    if scale not in SCALES:
        raise ConfigError(f"--scale is {scale!r}: must be {' or '.join(SCALES)}")
    for chosen in [find(name) for name in names]:
        folder = out / folder_name(chosen, scale)
        folder.mkdir(parents=True, exist_ok=True)
        context = RunContext(scale, folder, out / STORE)
        outcome = chosen().compute(context)
        page = write(chosen, outcome, context)
        print(f"\n{chosen.name}: {chosen.title}\nReport: {page}\n")
        for claim in outcome.claims:
            print(claim.line())


def list_all() -> None:
    """Print every figure that can be computed."""
    width = max(map(len, registry()))
    for name, found in registry().items():
        print(f"{name:{width}}  {found.title}")


def _as_yaml(value: Any) -> str:
    """A value as a configuration's override reads it."""
    from dpcfl_net.core import yaml_file

    return yaml_file.dump(value, flow=True).strip()
