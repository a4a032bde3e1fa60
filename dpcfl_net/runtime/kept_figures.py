"""Figures of a personal model that its client keeps: a killed observer has lost them, and the model of the round is gone."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.transport.observer_notes import Loss, Round, Share

_log = logging.getLogger(__name__)

FIGURES = "figures.json"  # in the folder of the client's ledger
MOST_KEPT = 16  # rounds
Figure = tuple[Round, Share | None, Loss | None]  # as in `observer_notes.Personal`
_FIGURES: TypeAdapter[list[Figure]] = TypeAdapter(list[Figure])


class KeptFigures:
    """The newest figures of one client's personal model, in a file that survives the process.

    Args:
        folder: Folder of the client's ledger.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FIGURES
        self._figures = self._read()

    def before(self, t: int) -> list[Figure]:
        """Return the kept figures of the rounds before a round, oldest first."""
        return [figure for figure in self._figures if figure[0] < t]

    def add(self, t: int, accuracy: float | None, loss: float | None) -> None:
        """Keep the figures of a round in place of the oldest. A disk that takes none does not stop the client.

        Args:
            t: Round.
            accuracy: 0 to 1; None without a personal model.
            loss: Finite; else None.
        """
        others = [figure for figure in self._figures if figure[0] != t]
        self._figures = sorted([*others, (t, accuracy, loss)], key=lambda figure: figure[0])[-MOST_KEPT:]
        try:
            write_atomically(self._path, json.dumps(self._figures), mode=0o600)
        except OSError as error:
            _log.warning("the figures of round %d are not kept: %s", t, error)

    def _read(self) -> list[Figure]:
        try:
            return _FIGURES.validate_json(self._path.read_bytes(), strict=True)
        except FileNotFoundError:
            return []
        except (OSError, ValidationError) as error:
            _log.warning("%s cannot be read, so that earlier figures are lost: %s", self._path, error)
            return []
