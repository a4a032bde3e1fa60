"""Clients of a run: whose data each number stands for, with its records, clusters and last figures.

Client numbers say nothing, and a job holds no names. Both sides meet here only, for the experimenter: names come from the data set, the
order of the clients from the experiment part of the job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dpcfl_net.data.partition import client_names
from dpcfl_net.experiment.job_files import partition
from dpcfl_net.results.number_format import at_most, number, percent
from dpcfl_net.results.run_files import JsonLine, item, listed, numbers
from dpcfl_net.results.run_view import letter, read_run
from dpcfl_net.results.summary import data_root, read_run_job
from dpcfl_net.results.tables import Table


@dataclass(frozen=True)
class ClientSummary:
    """One client of a run.

    Attributes:
        client: Its number.
        name: Its value in the client column of your data, or its speaking role; None for other partitions.
        true_cluster: Its true cluster; None if true clusters are unknown.
        cluster: The server's cluster after the last round; None without one.
        train_records: Training records.
        validation_records: Validation records.
        test_records: Test records.
        accuracy: Share of its evaluated records that its model classified correctly at the last evaluation: its test records, or with
            `data.evaluate: validation` its validation records; None without one.
        epsilon_spent: Epsilon spent so far; None without a guarantee, or if its ledger is elsewhere.
    """

    client: int
    name: str | None
    true_cluster: int | None
    cluster: int | None
    train_records: int
    validation_records: int
    test_records: int
    accuracy: float | None
    epsilon_spent: float | None


def client_summaries(folder: Path, root: Path | str | None = None) -> list[ClientSummary]:
    """Summarise each client of a run, finished or not.

    Args:
        folder: Run folder.
        root: Folder of the data sets; None: that of the run.

    Raises:
        ConfigError: If the folder is not a run folder, or the data set is not the one of the run.
        DataMissing: As `datasets.load`.
    """
    job = read_run_job(folder)
    experiment = job.experiment
    where = data_root(folder, root)
    settings, images, pieces = partition(experiment, where)
    names, view = client_names(settings, images, pieces, where), read_run(folder)
    accuracy = numbers(_last(view.observed, "accuracy_by_client"), "accuracy_by_client")
    cluster = listed(_last(view.grouping, "assignment"), "assignment")
    spent = view.spent[max(view.spent)] if view.spent and not job.protocol.unprotected else []
    return [
        ClientSummary(
            client,
            None if names is None else names[position],
            item(view.true_clusters, client),
            item(cluster, client),
            len(pieces[position].train_rows),
            len(pieces[position].validation_rows),
            len(pieces[position].test_rows),
            item(accuracy, client),
            number(item(spent, client)),
        )
        for client, position in enumerate(experiment.slices)
    ]


def client_table(summaries: Sequence[ClientSummary]) -> Table:
    """Return the table of `dpcfl clients`.

    Args:
        summaries: The clients.
    """
    columns = ["client", "name", "true cluster", "cluster", "training", "validation", "test", "accuracy", "epsilon"]
    kinds = "training, validation and test" if any(one.validation_records for one in summaries) else "training and test"
    said = [f"{kinds}: records"]
    said += ["cluster: the server's"] if any(one.cluster is not None for one in summaries) else []
    said += ["accuracy: at the last evaluation"] if any(one.accuracy is not None for one in summaries) else []
    said += ["epsilon: spent so far"] if any(one.epsilon_spent is not None for one in summaries) else []
    return Table("Clients", columns, [_row(one) for one in summaries], "; ".join(said)).without_empty_columns()


def _row(one: ClientSummary) -> list[str]:
    return [
        str(one.client),
        one.name or "–",
        "–" if one.true_cluster is None else letter(one.true_cluster),
        "–" if one.cluster is None else str(one.cluster),
        f"{one.train_records:,}",
        f"{one.validation_records:,}" if one.validation_records else "–",
        f"{one.test_records:,}",
        percent(one.accuracy),
        "–" if one.epsilon_spent is None else at_most(one.epsilon_spent),
    ]


def _last(lines: Mapping[int, JsonLine], key: str) -> JsonLine:
    """The last line that has a value."""
    return next((lines[at] for at in sorted(lines, reverse=True) if lines[at].get(key) is not None), {})
