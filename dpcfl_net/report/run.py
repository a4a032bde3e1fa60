"""A run folder as a Python object with its figures and its report."""

from __future__ import annotations

from pathlib import Path

from dpcfl_net.report.export import export
from dpcfl_net.report.page import write_report
from dpcfl_net.report.plotly_figures import Figures
from dpcfl_net.report.trace import write_trace
from dpcfl_net.results.run import RunData


class Run(RunData):
    """One run folder, finished, interrupted or still running; `dpcfl.run`, `dpcfl.resume` and `dpcfl.open_run` return it."""

    @property
    def figures(self) -> Figures:
        """The report's figures as plotly objects: `run.figures.accuracy()`."""
        return Figures(lambda: self.view)

    def report(self) -> Path:
        """Write report.html, one file that opens without a network.

        Returns:
            Its path.

        Raises:
            ConfigError: If the page cannot be written.
            OSError: If the disk is full.
        """
        return write_report(self.path)

    def export(self, out: Path | str | None = None) -> list[Path]:
        """Write models, metrics, figures and the privacy statement as files for other programs.

        Args:
            out: Where to write; None: `export` in the run folder.

        Returns:
            The files: safetensors, CSV, SVG, JSON and text.

        Raises:
            ConfigError: If the run has no privacy statement yet, or `out` cannot be written.
            OSError: If the disk is full.
        """
        return export(self.path, out)

    def trace(self, out: Path | str | None = None) -> Path:
        """Write the run as Chrome trace events, which Perfetto (ui.perfetto.dev) opens.

        Args:
            out: The file, compressed if its name ends in .gz; None: `trace.json` in the run folder.

        Returns:
            The file.

        Raises:
            ConfigError: If the run has recorded no times, or `out` cannot be written.
            OSError: If the disk is full.
        """
        return write_trace(self.path, out)
