"""CSV traces: rates and delay of clients over time."""

from __future__ import annotations

import csv
import io
import math
from itertools import pairwise
from pathlib import Path

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import read_text, shown
from dpcfl_net.transport.links.link import MOST_BPS, MOST_LATENCY_S, MOST_S
from dpcfl_net.transport.links.schedule import Step

COLUMNS = ("client", "from_s", "to_s", "up_bps", "down_bps", "latency_s")
MOST_BYTES, MOST_ROWS = 64 << 20, 1_000_000
_LIMITS = {"from_s": MOST_S, "to_s": MOST_S, "up_bps": MOST_BPS, "down_bps": MOST_BPS, "latency_s": MOST_LATENCY_S}


def read_trace(path: str | Path, clients: int) -> dict[int, tuple[Step, ...]]:
    """Read a trace.

    Rows may be in any order. Between the rows of a client, its own link applies; so it does for an empty up_bps, down_bps or
    latency_s. A rate of 0 turns that direction off.

    Args:
        path: CSV file with the header `client,from_s,to_s,up_bps,down_bps,latency_s`.
        clients: Number of clients of the experiment.

    Returns:
        Steps sorted by time, for each client that the trace names.

    Raises:
        ConfigError: Names file, line, field and what is allowed.
    """
    reader = csv.reader(io.StringIO(read_text(path, MOST_BYTES), newline=""), strict=True)
    found: dict[int, list[tuple[Step, int]]] = {}
    try:
        header = tuple(cell.strip() for cell in next(reader, []))
        if header != COLUMNS:
            raise ConfigError(f"{path}, line 1: the header is {shown(','.join(header))}, must be {','.join(COLUMNS)}")
        for number, cells in enumerate(reader):
            if number >= MOST_ROWS:
                raise ConfigError(f"{path}, line {reader.line_num}: more than {MOST_ROWS:,} rows, the limit")
            if cells:  # an empty line has no cells
                client, step = _row(cells, f"{path}, line {reader.line_num}", clients)
                found.setdefault(client, []).append((step, reader.line_num))
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num}: {error}") from None
    return {client: _sorted(rows, path, client) for client, rows in sorted(found.items())}


def _row(cells: list[str], where: str, clients: int) -> tuple[int, Step]:
    if len(cells) != len(COLUMNS):
        raise ConfigError(f"{where}: {len(cells)} fields, must be {len(COLUMNS)}: {','.join(COLUMNS)}")
    texts = dict(zip(COLUMNS, (cell.strip() for cell in cells), strict=True))
    name = texts.pop("client")
    if not (name.isascii() and name.isdigit() and len(name) < 10 and int(name) < clients):
        raise ConfigError(f"{where}: client is {shown(name)}: must be a client from 0 to {clients - 1}")
    from_s, to_s = (_number(texts[field], field, where) for field in ("from_s", "to_s"))
    rates = {
        field: _number(texts[field], field, where) if texts[field] else None for field in ("up_bps", "down_bps", "latency_s")
    }
    step = Step(from_s, to_s, **rates)
    if step.to_s <= step.from_s:
        raise ConfigError(f"{where}: to_s is {step.to_s:g}: must be greater than from_s, {step.from_s:g}")
    return int(name), step


def _number(text: str, field: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    most, rate = _LIMITS[field], field.endswith("_bps")
    if not 0 <= value <= most or (rate and 0 < value < 1):
        allowed = f"0, or a number from 1 to {most:g}" if rate else f"a number from 0 to {most:g}"
        empty = "" if field in ("from_s", "to_s") else ", or empty"
        raise ConfigError(f"{where}: {field} is {shown(text)}: must be {allowed}{empty}")
    return value


def _sorted(rows: list[tuple[Step, int]], path: str | Path, client: int) -> tuple[Step, ...]:
    """Steps by time; ConfigError for two that overlap."""
    rows.sort(key=lambda row: row[0].from_s)
    for (before, first), (after, second) in pairwise(rows):
        if after.from_s < before.to_s:
            raise ConfigError(
                f"{path}, line {second}: from_s is {after.from_s:g}: client {client} has a row until {before.to_s:g} in line "
                f"{first}; rows of a client must not overlap"
            )
    return tuple(step for step, _ in rows)
