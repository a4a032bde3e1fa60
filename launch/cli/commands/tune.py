"""`dpcfl tune`: tune several algorithms with equal effort."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpcfl_net.launch.cli.commands import completion
from dpcfl_net.launch.cli.commands.parameters import MOST_CELLS, AsJson, Config, LogLevel, Overrides, Quiet


def tune(
    config: Config,
    overrides: Overrides = None,
    algorithms: Annotated[
        str | None, typer.Option(metavar="NAME,NAME", help="algorithms to tune; default: the configuration's")
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,VALUE",
            help="a setting and its values: local.lr=.1,.3 for all algorithms, algorithms.NAME.KEY=... for one; repeatable",
        ),
    ] = None,
    search: Annotated[
        str,
        typer.Option(
            help="grid: all combinations; random: a sample; optuna: TPE sampler (extra tune)",
            autocompletion=completion.one_of(("grid", "random", "optuna")),
        ),
    ] = "grid",
    trials: Annotated[
        int | None, typer.Option(min=1, max=MOST_CELLS, help="trials of each algorithm; default: the whole grid")
    ] = None,
    search_seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="seed of random and optuna")] = 0,
    score: Annotated[
        str,
        typer.Option(
            help="figure on validation records: accuracy_mean, accuracy_worst or accuracy_minority",
            autocompletion=completion.one_of(("accuracy_mean", "accuracy_worst", "accuracy_minority")),
        ),
    ] = "accuracy_mean",
    validation: Annotated[
        float | None,
        typer.Option(help="fraction of each client's training records for validation; default: data.validation, else 0.2"),
    ] = None,
    trial_seeds: Annotated[
        str | None, typer.Option(metavar="0,1|0:2", help="seeds of each trial; default: the configuration's seed")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="0,1|0:4", help="seeds of the final runs; default: the configuration's seed")
    ] = None,
    out: Annotated[Path, typer.Option(help="parent of the tuning's folder and of the run store shared with sweeps")] = Path(
        "runs"
    ),
    jobs: Annotated[int, typer.Option(min=1, max=MOST_CELLS, help="runs at once; they share the cores of this machine")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list the trials that are known; start nothing")] = False,
    as_json: AsJson = False,
    log_level: LogLevel = None,
    quiet: Quiet = False,
) -> None:
    """Tune algorithms with the same number of trials each.

    Trials are scored on validation records. The best settings of each algorithm then run on all training records and are tested
    once. It skips finished runs.
    """
    from dpcfl_net.launch.cli import tune as tuning
    from dpcfl_net.launch.cli.json_output import messages_to_stderr, print_json
    from dpcfl_net.launch.tuning.study import TuneOptions

    options = TuneOptions(
        search, trials, search_seed, score, validation, tuning.seeds("--trial-seeds", trial_seeds), tuning.seeds("--seeds", seeds)  # type: ignore[arg-type]
    )  # fmt: skip
    with messages_to_stderr(as_json, quiet) as stdout:
        study = tuning.plan(config, overrides or [], algorithms, grid or [], options, out)
        code, document = tuning.dry_run(study) if dry_run else tuning.tune(study, jobs)
        if as_json:
            print_json(document, stdout)
    raise typer.Exit(code)
