"""The `availability` section: rounds in which clients are there, from a CSV file and inline."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import read_text, shown
from dpcfl_net.core.frozen import StrictModel

COLUMNS = ["client", "from_round", "to_round"]

Range = Annotated[
    list[Annotated[int, Field(ge=1)] | None],
    Field(min_length=2, max_length=2, description="[from_round, to_round]; null: the last"),
]


class AvailabilitySettings(StrictModel):
    """The `availability` section. Client ids do not follow the data: the job assigns slices to clients at random."""

    file: str | None = Field(
        default=None,
        description="CSV file client,from_round,to_round, one row for each span in which a client is there (to_round empty: to "
        "the end); it is copied into `clients` when it is read",
    )
    clients: dict[Annotated[int, Field(ge=0)], list[Range]] = Field(
        default={}, description="client: spans [from_round, to_round] in which it is there; other clients are always there"
    )

    @model_validator(mode="before")
    @classmethod
    def _read_file(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = {**values, "clients": _whole_keys(values.get("clients", {}))}
        if not isinstance(values.get("file"), str):
            return values
        read = read_spans(Path(values["file"]))
        if twice := sorted(set(read) & set(values["clients"])):
            raise ValueError(f"availability names client {twice[0]} in its file and in clients: must be one of the two")
        return {"clients": read | values["clients"]}

    def spans(self, client: int, rounds: int) -> list[tuple[int, int]] | None:
        """Return the rounds in which a client is there.

        Args:
            client: Client id.
            rounds: Rounds of the run.

        Returns:
            Spans (from, to) in order; None if the client is always there.
        """
        found = self.clients.get(client)
        if found is None:
            return None
        spans = sorted((first or 1, rounds if last is None else last) for first, last in found)
        return None if spans == [(1, rounds)] else spans

    def problems(self, rounds: int, clients: int) -> list[str]:
        """List the problems of the schedule in a run.

        Args:
            rounds: Rounds of the run.
            clients: Number of clients.

        Returns:
            One sentence for each problem: field, value and allowed values.
        """
        found = [
            f"availability.clients names client {client}: must be 0 to {clients - 1}"
            for client in self.clients
            if client >= clients
        ]
        for client, spans in self.clients.items():
            if not spans:
                found.append(
                    f"availability.clients.{client} is []: must be at least one span; every client takes part at least once"
                )
            found += [
                f"availability.clients.{client} holds {span}: must be 1 <= from_round <= to_round <= {rounds}"
                for span in spans
                if not (span[0] or 1) <= (rounds if span[1] is None else span[1]) <= rounds
            ]
            ordered = self.spans(client, rounds) or []
            found += [
                f"availability.clients.{client}: the spans {list(a)} and {list(b)} overlap; must be disjoint"
                for a, b in pairwise(ordered)
                if b[0] <= a[1]
            ]
        return found or self._empty_rounds(rounds, clients)

    def _empty_rounds(self, rounds: int, clients: int) -> list[str]:
        """Problem of a round without any client."""
        if len(self.clients) < clients:
            return []
        there = {t for client in self.clients for a, b in self.spans(client, rounds) or [(1, rounds)] for t in range(a, b + 1)}
        empty = [t for t in range(1, rounds + 1) if t not in there]
        return [f"availability leaves no client in round {empty[0]}: must leave at least one in every round"] if empty else []


def read_spans(path: Path) -> dict[int, list[list[int | None]]]:
    """Read an availability file.

    Args:
        path: CSV file with the columns client, from_round and to_round.

    Returns:
        Client to its spans.

    Raises:
        ValueError: If the file cannot be read, or a row is malformed.
    """
    found: dict[int, list[list[int | None]]] = {}
    try:
        rows = list(_rows(path, read_text(path)))
    except ConfigError as error:
        raise ValueError(f"availability.file: {error}") from None
    except csv.Error as error:
        raise ValueError(f"availability.file {path}: {error}") from None
    for number, row in rows:
        try:
            client, first, last = (int(cell) if cell.strip() else None for cell in row)
            if client is None or first is None:
                raise ValueError
        except ValueError:
            rule = "client,from_round,to_round as whole numbers; only to_round may be empty"
            raise ValueError(f"availability.file {path}, line {number} is {shown(','.join(row))}: must be {rule}") from None
        found.setdefault(client, []).append([first, last])
    return found


def _rows(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """Line number and cells of each row after the header; empty lines are skipped."""
    lines = csv.reader(text.splitlines())
    header = [cell.strip() for cell in next(lines, [])]
    if header != COLUMNS:
        raise ValueError(f"availability.file {path} begins with {shown(','.join(header))}: must be {','.join(COLUMNS)}")
    for row in lines:
        if any(cell.strip() for cell in row):
            yield lines.line_num, row


def _whole_keys(clients: Any) -> Any:
    """Client ids that were written as text (JSON, command line) as numbers."""
    if not isinstance(clients, dict):
        return clients
    return {int(key) if isinstance(key, str) and key.isdecimal() else key: spans for key, spans in clients.items()}
