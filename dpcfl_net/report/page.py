"""Report of a run: one HTML file that opens without a network."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.report import figures
from dpcfl_net.report.diagnostics import diagnostics
from dpcfl_net.report.figures import Figure
from dpcfl_net.report.pages import html, numeric_columns
from dpcfl_net.report.time_section import accuracy_over_time, time_of_clients, time_tables
from dpcfl_net.report.timeline import timeline
from dpcfl_net.results.attack_results import results
from dpcfl_net.results.number_format import duration, number, percent, plain, size, yes
from dpcfl_net.results.privacy_statement import statement
from dpcfl_net.results.run_files import JsonLine, listed, mapping, whole
from dpcfl_net.results.run_view import RunView, read_run, sizes

Pair = tuple[str, str]
MOST_ABORTED = 5  # rounds whose reason the page shows


def write_report(folder: Path | str) -> Path:
    """Write report.html into the folder of a finished or unfinished run.

    Returns:
        The page.

    Raises:
        ConfigError: As `read_run`.
    """
    page = RunFolder(folder).report
    write_atomically(page, render(read_run(folder)))
    return page


def render(view: RunView) -> str:
    """Render the page as HTML, including plotly's script."""
    shown = [
        figures.accuracy(view),
        accuracy_over_time(view),
        figures.epsilon_spent(view),
        figures.traffic(view),
        figures.first_round(view),
        figures.candidates(view),
        figures.assignments(view),
        figures.labels(view),
        *diagnostics(view),
        time_of_clients(view),
        timeline(view),
    ]
    found = results(view.folder, view.notes)
    pictures = [Figure(f"attack-{attack.name}", attack.title, spec=attack.figure) for attack in found]
    privacy = view.run.get("privacy")
    return html(
        "page.html.j2",
        shown,
        apart=pictures,
        attacks=[(attack, numeric_columns(attack), picture) for attack, picture in zip(found, pictures, strict=True)],
        view=view,
        state=_state(view),
        statement=statement(privacy if isinstance(privacy, Mapping) else None),
        key_figures=key_figures(view),
        views=two_views(view),
        times=[(table, numeric_columns(table)) for table in time_tables(view)],
    )


def key_figures(view: RunView) -> list[Pair]:
    """Return (label, value) of the run's results; of the last round so far for an unfinished run."""
    final = view.run.get("final")
    if not isinstance(final, Mapping):
        last = view.observed[max(view.observed)] if view.observed else {}
        final = {**(view.agreement[max(view.agreement)] if view.agreement else {}), **last}
        final = {**final, "clusters_recovered": final.get("recovered"), **_last_grouping(view)}
    pairs = [
        ("Mean accuracy", percent(final.get("accuracy_mean"))),
        ("Minority accuracy", percent(final.get("accuracy_minority"))),
        ("Worst client", percent(final.get("accuracy_worst"))),
        ("Clusters recovered", yes(final.get("clusters_recovered"))),
        ("Minority recovered", yes(final.get("minority_recovered"))),
        ("ARI", plain(final.get("ari"), 3)),
        ("Clusters M", plain(final.get("clusters"))),
    ]
    pairs += [(name, plain(value, 3)) for name, value in mapping(final, "diagnostics").items()]
    return [(label, value) for label, value in pairs if value not in ("–", "not stated")]


def two_views(view: RunView) -> list[tuple[str, str, str]]:
    """Return (subject, what the server saw, what only the experimenter sees)."""
    served, last = list(view.served.values()), view.observed[max(view.observed)] if view.observed else {}
    true = view.true_clusters
    truth = "/".join(str(count) for count in sizes(true).values()) if true else "not kept in this folder"
    agreement = view.agreement[max(view.agreement)] if view.agreement else {}
    judged = f"; agreement with the server's clusters (ARI) {plain(agreement.get('ari'), 3)}" if agreement else ""
    seconds = [found for line in served if (found := number(line.get("seconds"))) is not None]
    clock = " of virtual time" if view.virtual else ""
    taken = f", {duration(sum(seconds) / len(seconds))}{clock} each" if seconds else ""
    accuracies = (
        ", ".join(
            f"{word} {percent(last.get(key))}"
            for word, key in (("mean", "accuracy_mean"), ("minority", "accuracy_minority"), ("worst client", "accuracy_worst"))
            if number(last.get(key)) is not None
        )
        or "not measured yet"
    )
    return [
        ("Messages", _kinds(view), "Nothing flows back from the observer to the server or the clients."),
        ("Each client's update", _updates(view), "Nothing more: clients report personal accuracy and timings only."),
        *_secure_sums(view),
        ("Clusters", _grouping(view), f"True clusters: {truth}{judged}."),
        ("Accuracy", "Unknown: the server holds no test data.", f"{accuracies[:1].upper()}{accuracies[1:]}."),
        ("The data", _records(view), _data(view)),
        ("Time", f"{len(served)} round{'' if len(served) == 1 else 's'} answered{taken}{_absent(view)}.", _busy(view)),
    ]


def _updates(view: RunView) -> str:
    privacy = view.run.get("privacy")
    if isinstance(privacy, Mapping) and privacy.get("trust") == "trusted-server":
        return "The raw update and the cluster that the client names: this server is trusted and adds the noise."
    if isinstance(privacy, Mapping) and privacy.get("trust") == "secure-aggregation":
        return "A masked vector, which shows nothing alone; the server learns sums over clients."
    return "Only what the client's gate released."


def _secure_sums(view: RunView) -> list[tuple[str, str, str]]:
    """Row on sums that were aborted, in runs with secure sums."""
    shown = {t: mapping(line, "diagnostics") for t, line in sorted(view.grouping.items())}
    said = {
        t: str(found) for t, line in shown.items() if (found := line.get("secure sum", line.get("secure sums"))) is not None
    }
    if not said:
        return []
    aborted = [f"round {t}: {text}" for t, text in said.items() if text != "ok"]
    more = f"; and {len(aborted) - MOST_ABORTED} more" if len(aborted) > MOST_ABORTED else ""
    reasons = f" Aborted, so that models stayed: {'; '.join(aborted[:MOST_ABORTED])}{more}." if aborted else ""
    whole_rounds = f"Complete in {len(said) - len(aborted)} of {len(said)} rounds."
    return [("Secure sums", whole_rounds + reasons, "Nothing more: masks cancel only in a sum.")]


def _state(view: RunView) -> str:
    done = max([whole(view.run.get("rounds_done")) or 0, *view.served])
    of = f" of {view.rounds}" if view.rounds else ""
    took = f", {duration(view.run.get('wall_s'))}" if number(view.run.get("wall_s")) is not None else ""
    if view.virtual:
        took = f", {duration(max(view.elapsed.values(), default=None))} of virtual time{took and f', computed in{took[1:]}'}"
    return f"{view.state}, {done}{of} rounds{took}"


def _last_grouping(view: RunView) -> JsonLine:
    line = view.grouping[max(view.grouping)] if view.grouping else {}
    figures_ = {name: value for name, value in mapping(line, "diagnostics").items() if number(value) is not None}
    return {"clusters": line.get("clusters"), "diagnostics": figures_}


def _kinds(view: RunView) -> str:
    counts: Counter[tuple[str, str]] = Counter()
    total: Counter[tuple[str, str]] = Counter()
    for line in view.messages:
        key = (str(line.get("direction")), str(line.get("kind")))
        counts[key] += 1
        total[key] += int(number(line.get("bytes")) or 0)
    if not counts:
        return f"{size(view.run.get('bytes_up'))} from the clients, {size(view.run.get('bytes_down'))} to them."
    parts = []
    for direction, words in (("up", "From the clients"), ("down", "To the clients")):
        kinds = sorted((key for key in counts if key[0] == direction), key=lambda key: -total[key])
        if kinds:
            parts.append(f"{words}: " + ", ".join(f"{counts[key]} {key[1]} ({size(total[key])})" for key in kinds) + ".")
    return " ".join(parts)


def _grouping(view: RunView) -> str:
    if not view.grouping:
        return "The server does not cluster clients."
    line = view.grouping[max(view.grouping)]
    counts = "/".join(str(whole(count)) for count in listed(mapping(line, "diagnostics"), "sizes")) or "none"
    first = view.first_round
    sure = f", from a mixture with MSS {plain(first.mss, 3)} and MPO {plain(first.mpo, 2)}" if first else ""
    return f"Clients by cluster: {counts}{sure}."


def _records(view: RunView) -> str:
    records = [whole(entry.get("records")) for entry in listed(view.protocol, "roster") if isinstance(entry, Mapping)]
    known = [count for count in records if count is not None]
    if not known:
        return "At most the number of records of each client: no data, no labels."
    span = str(min(known)) if min(known) == max(known) else f"{min(known)} to {max(known)}"
    return f"Number of records of each of the {len(known)} clients ({span}): no data, no labels."


def _data(view: RunView) -> str:
    data = view.experiment.get("data")
    if not isinstance(data, Mapping):
        return "Not kept in this folder."
    said = {key: value for key, value in data.items() if value is not None and not isinstance(value, Mapping)}
    return "; ".join(f"{key.replace('_', ' ')}: {value}" for key, value in said.items()) + "."


def _absent(view: RunView) -> str:
    counts = {name: sum(len(listed(line, name)) for line in view.served.values()) for name in ("missing", "late", "away")}
    absent, late, away = counts["missing"], counts["late"], counts["away"]
    paused = sum(number(line.get("paused_s")) or 0.0 for line in view.served.values())
    said = f"; {absent} answer{'' if absent == 1 else 's'} missing" if absent else "; no answer missing"
    said += f"; {late} answer{'' if late == 1 else 's'} after the deadline, set aside" if late else ""
    said += f"; {away} away by schedule" if away else ""
    return said + (f"; paused {duration(paused)} below the quorum" if paused else "")


def _busy(view: RunView) -> str:
    spent: defaultdict[str, float] = defaultdict(float)
    for span in view.spans:
        start, end = number(span.get("start")), number(span.get("end"))
        injected = str(span.get("what")).startswith("fault ")  # by dpcfl run --chaos
        if start is not None and end is not None and str(span.get("who", "")).startswith("client") and not injected:
            spent[str(span.get("what"))] += end - start
    total = sum(spent.values())
    if not total:
        return "No timings of the workers were kept."
    longest = sorted(spent.items(), key=lambda pair: -pair[1])
    return "Workers' time: " + ", ".join(f"{what} {100 * share / total:.0f} %" for what, share in longest) + "."
