"""Report of a run: one HTML file that opens without a network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.report import cluster_figures, figures
from dpcfl_net.report.alone import accuracy_alone
from dpcfl_net.report.client_figures import accuracy_by_client, accuracy_of_clients_by_round
from dpcfl_net.report.diagnostics import diagnostics
from dpcfl_net.report.figures import Figure
from dpcfl_net.report.lead import found_clusters, privacy_facts, result_line
from dpcfl_net.report.pages import html, keep, numeric_columns
from dpcfl_net.report.served import Served
from dpcfl_net.report.server_view import cluster_sizes, two_views
from dpcfl_net.report.settings import repeat_command, resume, settings, versions
from dpcfl_net.report.svg.draw import check
from dpcfl_net.report.time_section import accuracy_over_time, time_of_clients, time_tables
from dpcfl_net.report.timeline import timeline
from dpcfl_net.report.transcript_figures import transcript_figures
from dpcfl_net.results.attack_results import AttackResult, results
from dpcfl_net.results.number_format import duration, number, percent, plain, size, tiny, yes
from dpcfl_net.results.privacy_statement import statement
from dpcfl_net.results.run_files import JsonLine, mapping, whole
from dpcfl_net.results.run_view import RunView, read_run

Pair = tuple[str, str]
MOST_WARNINGS, LONGEST_WARNING = 20, 500  # shown, and letters of one
WIDE = ("accuracy", "assignments", "timeline", "client-time")  # figures over the whole width


def write_report(folder: Path | str, alone: Path | str | None = None) -> Path:
    """Write report.html into the folder of a finished or unfinished run.

    Args:
        folder: The run folder.
        alone: Folder of a run of `local` on the same data and at the same epsilon; the page marks clients that are less
            accurate than there. None: no client is marked.

    Returns:
        The page.

    Raises:
        ConfigError: As `read_run` and `accuracy_alone`, or if the page cannot be written.
        OSError: If the disk is full.
    """
    view = read_run(folder)
    return keep(RunFolder(folder).report, render(view, accuracy_alone(view, alone) if alone is not None else None))


def run_figures(view: RunView, alone: Mapping[int, float] | None = None) -> dict[str, list[Figure]]:
    """Build the figures of a run by section of its page; those without data say why."""
    return {
        "Accuracy and epsilon": [
            figures.accuracy(view),
            accuracy_by_client(view, alone),
            accuracy_of_clients_by_round(view),
            accuracy_over_time(view),
            figures.epsilon_spent(view),
        ],
        "What the server saw": [
            cluster_figures.first_round(view),
            cluster_figures.candidates(view),
            cluster_sizes(view),
            cluster_figures.assignments(view),
            *transcript_figures(view),
            cluster_figures.labels(view),
            *diagnostics(view),
        ],
        "Time and traffic": [figures.traffic(view), time_of_clients(view), timeline(view)],
    }


def render(view: RunView, alone: Mapping[int, float] | None = None, served: Served | None = None) -> str:
    """Render the page as HTML.

    Args:
        view: The run.
        alone: Accuracy by client of a run where every client trained alone.
        served: Parts for a page that `dpcfl serve` shows; None: a file.
    """
    sections = run_figures(view, alone)
    found = results(view.folder, view.notes)
    pictures = [_picture(attack, view.notes) for attack in found]
    privacy = mapping(view.run, "privacy")
    return html(
        "page.html.j2",
        [figure for own in sections.values() for figure in own],
        apart=pictures,
        served=served,
        sections={name: _placed(own) for name, own in sections.items()},
        attacks=[(attack, numeric_columns(attack), picture) for attack, picture in zip(found, pictures, strict=True)],
        view=view,
        line=result_line(view),
        state=_state(view),
        statement=statement(privacy or None),
        facts=privacy_facts(privacy),
        key_figures=key_figures(view),
        most_warnings=MOST_WARNINGS,
        longest_warning=LONGEST_WARNING,
        views=two_views(view),
        times=[(table, numeric_columns(table)) for table in time_tables(view)],
        settings=settings(view),
        versions=versions(view),
        resume=resume(view),
        command=repeat_command(view),
    )


def _placed(own: list[Figure]) -> list[tuple[Figure, str]]:
    """Figures with data and their places in two columns: half, wide, or tall beside two halves; a square one is never wide."""
    drawn = [figure for figure in own if figure.spec]
    wide = [figure for figure in drawn if figure.key in WIDE or figure.key.startswith("diagnostics")]
    halves = [figure for figure in drawn if figure not in wide]
    square = [figure for figure in halves if figure.spec and "aspect" in figure.spec]
    low = [figure for figure in halves if figure not in square]
    tall = square[:1] if len(square) % 2 and len(low) > 1 else []
    rest = [*low[: 2 * len(tall)], *square[len(tall) :], *low[2 * len(tall) :]]
    odd = rest[-1:] if len(rest) % 2 and rest[-1] not in square else []
    sizes = {figure.key: "tall" for figure in tall} | {figure.key: "wide" for figure in [*wide, *odd]}
    order = [*tall, *rest, *wide] if square else drawn
    return [(figure, sizes.get(figure.key, "half")) for figure in order]


def _picture(attack: AttackResult, notes: list[str]) -> Figure:
    """The figure of an attack; a malformed one becomes a note, since the file may come from anywhere."""
    key = f"attack-{attack.name}"
    if attack.figure is not None and (wrong := check(attack.figure)):
        notes.append(f"the figure of {attack.name} is malformed ({wrong}) and was left out")
        return Figure(key, attack.title)
    return Figure(key, attack.title, spec=attack.figure)


def key_figures(view: RunView) -> list[Pair]:
    """Return (label, value) of the run's results; of the last round so far for an unfinished run."""
    final = view.run.get("final")
    if not isinstance(final, Mapping):
        last = view.observed[max(view.observed)] if view.observed else {}
        final = {**(view.agreement[max(view.agreement)] if view.agreement else {}), **last}
        final = {**final, "clusters_recovered": final.get("recovered"), **_last_grouping(view)}
    counted = found_clusters(view)
    pairs = [
        ("Mean accuracy", percent(final.get("accuracy_mean"))),
        ("Worst client", percent(final.get("accuracy_worst"))),
        ("Central test set", percent(final.get("accuracy_central"))),
        ("Minority accuracy", percent(final.get("accuracy_minority"))),
        ("Clusters found", f"{counted[0]} of {counted[1]}" if counted else "–"),
        ("Clusters recovered", "–" if counted else yes(final.get("clusters_recovered"))),
        ("Minority recovered", yes(final.get("minority_recovered"))),
        ("ARI", plain(final.get("ari"), 3)),
        ("Clusters M", plain(final.get("clusters")) if cluster_figures.clusters_clients(view) else "–"),
    ]
    pairs += [] if view.one_process else [(f"Bytes {way}", size(view.run.get(f"bytes_{way}"))) for way in ("up", "down")]
    others = {name: value for name, value in mapping(final, "diagnostics").items() if name != "clusters"}  # that is M
    pairs += [(name[:1].upper() + name[1:], tiny(value, 3)) for name, value in others.items()]
    return [(label, value) for label, value in pairs if value not in ("–", "not stated")]


def _state(view: RunView) -> str:
    done = max([whole(view.run.get("rounds_done")) or 0, *view.served])
    of = f" of {view.rounds}" if view.rounds else ""
    took = f", {_unbroken(view.run.get('wall_s'))}" if number(view.run.get("wall_s")) is not None else ""
    if view.virtual:
        took = f", {_unbroken(max(view.elapsed.values(), default=None))} of virtual time{took and f', computed in{took[1:]}'}"
    return f"{view.state}, {done}{of} rounds{took}"


def _unbroken(seconds: object) -> str:
    """Format seconds on one line: the line above the figures is wrapped on a phone."""
    return duration(seconds).replace(" ", "\N{NO-BREAK SPACE}")


def _last_grouping(view: RunView) -> JsonLine:
    line = view.grouping[max(view.grouping)] if view.grouping else {}
    figures_ = {name: value for name, value in mapping(line, "diagnostics").items() if number(value) is not None}
    return {"clusters": line.get("clusters"), "diagnostics": figures_}
