"""The figures of a run's report as plotly objects, for notebooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.report import cluster_figures, figures
from dpcfl_net.report.client_figures import accuracy_by_client
from dpcfl_net.report.figures import Figure
from dpcfl_net.report.server_view import cluster_sizes
from dpcfl_net.report.theme import light
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

    def __repr__(self) -> str:
        return f"<Figures: {', '.join(f'{name}()' for name in vars(type(self)) if not name.startswith('_'))}>"

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
        return draw(cluster_figures.first_round(self._read()))

    def candidates(self) -> go.Figure:
        """Separation score of each number of clusters that was tried (r-dpcfl, clusters: auto)."""
        return draw(cluster_figures.candidates(self._read()))

    def accuracy_by_client(self) -> go.Figure:
        """Accuracy of each client after the last evaluated round."""
        return draw(accuracy_by_client(self._read()))

    def cluster_sizes(self) -> go.Figure:
        """Clients in each of the server's clusters by round."""
        return draw(cluster_sizes(self._read()))

    def assignments(self) -> go.Figure:
        """Cluster of each client by round."""
        return draw(cluster_figures.assignments(self._read()))

    def labels(self) -> go.Figure:
        """Share of correct cluster labels by round (rr-cluster)."""
        return draw(cluster_figures.labels(self._read()))

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


def _coloured(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("@"):
        return light()[value[1:]]
    if isinstance(value, dict):
        return {key: _coloured(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_coloured(item) for item in value]
    return value
