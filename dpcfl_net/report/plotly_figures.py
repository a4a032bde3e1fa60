"""The figures of a run's report as plotly objects, for notebooks."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.report import figures
from dpcfl_net.report.figures import Figure
from dpcfl_net.report.time_section import accuracy_over_time, time_of_clients
from dpcfl_net.report.timeline import timeline
from dpcfl_net.results.run_view import RunView

if TYPE_CHECKING:
    import plotly.graph_objects as go


class Figures:
    """The figures of one run.

    Args:
        read: Reads the run folder; called for each figure.

    Raises:
        ConfigError: By each method, if the run has no data for the figure; the message gives the reason.
    """

    def __init__(self, read: Callable[[], RunView]) -> None:
        self._read = read

    def accuracy(self) -> go.Figure:
        """Test accuracy of each true cluster, mean and worst client, by round."""
        return draw(figures.accuracy(self._read()))

    def epsilon_spent(self) -> go.Figure:
        """Epsilon spent by each client over the rounds."""
        return draw(figures.epsilon_spent(self._read()))

    def traffic(self) -> go.Figure:
        """Bytes to and from the clients by round."""
        return draw(figures.traffic(self._read()))

    def first_round(self) -> go.Figure:
        """Updates of the first round in two principal components, with the mixture (r-dpcfl)."""
        return draw(figures.first_round(self._read()))

    def candidates(self) -> go.Figure:
        """Separation score of each number of clusters that was tried (r-dpcfl, clusters: auto)."""
        return draw(figures.candidates(self._read()))

    def assignments(self) -> go.Figure:
        """Cluster of each client by round."""
        return draw(figures.assignments(self._read()))

    def labels(self) -> go.Figure:
        """Share of correct cluster labels by round (rr-cluster)."""
        return draw(figures.labels(self._read()))

    def accuracy_over_time(self) -> go.Figure:
        """Mean accuracy and worst client by seconds since round 1 began."""
        return draw(accuracy_over_time(self._read()))

    def time_of_clients(self) -> go.Figure:
        """Time of each client over all rounds: computing, receiving, sending, waiting."""
        return draw(time_of_clients(self._read()))

    def timeline(self) -> go.Figure:
        """Computing, receiving, sending and waiting of each process over the last rounds."""
        return draw(timeline(self._read()))


def draw(figure: Figure) -> go.Figure:
    """Convert a figure of the report to plotly.

    Args:
        figure: Traces and layout, with colours by name.

    Returns:
        The figure in the report's light colours.

    Raises:
        ConfigError: If the figure was left out; the message says why.
    """
    if figure.spec is None:
        raise ConfigError(f"no figure {figure.key}: {figure.why}")
    import plotly.graph_objects as go

    spec = _coloured(figure.spec)
    layout = {**spec["layout"], "height": spec["height"], "title": {"text": figure.title}, "margin": {"t": 90}}
    return go.Figure(data=spec["data"], layout=layout)


@cache
def _colours() -> dict[str, str]:
    """The colours of the page's light theme by name; taken from the page's style sheet, their only definition."""
    style = (Path(__file__).parent / "base.html.j2").read_text(encoding="utf-8")
    light = style[style.index(":root {") : style.index("@media")]
    return dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", light))


def _coloured(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("@"):
        return _colours()[value[1:]]
    if isinstance(value, dict):
        return {key: _coloured(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_coloured(item) for item in value]
    return value
