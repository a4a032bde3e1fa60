"""Section of the report: the server's view of a run beside the experimenter's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from dpcfl_net.algorithms.base import registry
from dpcfl_net.federation.capabilities import declared_steps
from dpcfl_net.report.cluster_figures import NO_CLUSTERS, ONE_CLUSTER, clusters_clients, grouped_rounds, membership
from dpcfl_net.report.figures import BARS, Figure, axis, colour, group_colours, spec
from dpcfl_net.report.time_section import WORK_NAMES
from dpcfl_net.results.number_format import counted, duration, number, percent, plain, size, tiny
from dpcfl_net.results.privacy_statement import has_single_releases
from dpcfl_net.results.round_times import client_times
from dpcfl_net.results.run_files import listed, mapping, whole
from dpcfl_net.results.run_view import RunView, record_counts, sizes

ACCURACIES = (
    ("mean", "accuracy_mean"),
    ("minority", "accuracy_minority"),
    ("worst client", "accuracy_worst"),
    ("central test set", "accuracy_central"),
)
MOST_TICKS = 40  # of the axis that counts clients
MOST_ABORTED = 5  # rounds whose reason the page shows


def cluster_sizes(view: RunView) -> Figure:
    """Stacked bars of the clients in each of the server's clusters by round."""
    title = "Clients by cluster"
    rounds = grouped_rounds(view)
    every = max(1, -(-len(rounds) // BARS))
    rounds = rounds[::-1][::every][::-1]
    counts = {at: Counter(map(whole, listed(view.grouping[at], "assignment"))) for at in rounds}
    groups = sorted({group for count in counts.values() for group in count if group is not None})
    if len(groups) < 2:
        return Figure("sizes", title, why=ONE_CLUSTER if groups else NO_CLUSTERS)
    shades = group_colours(view)
    data = [
        {
            "type": "bar", "name": f"cluster {group}", "x": rounds, "y": [counts[at][group] for at in rounds],
            "marker": {"color": colour(shades[group])},
            "hovertemplate": f"round %{{x}}, cluster {group}: %{{y}} clients<extra></extra>",
        }
        for group in groups
    ]  # fmt: skip
    layout = {
        "xaxis": axis("round"),
        "yaxis": axis("clients", **({"dtick": 1} if view.clients <= MOST_TICKS else {})),
        "barmode": "stack",
        "bargap": 0.08 if len(rounds) <= 40 else 0,
    }
    return Figure(
        "sizes",
        title,
        f"As the server assigned them.{f' Every {every} rounds.' if every > 1 else ''}",
        spec(data, 300, **layout),
    )


def two_views(view: RunView) -> list[tuple[str, str, str]]:
    """Return (subject, what the server saw, what only the experimenter sees)."""
    served, last = list(view.served.values()), view.observed[max(view.observed)] if view.observed else {}
    true = view.true_clusters
    unknown = "unknown" if view.experiment else "not kept in this folder"
    truth = "/".join(str(count) for count in sizes(true).values()) if true else unknown
    agreement = view.agreement[max(view.agreement)] if true and view.agreement else {}
    ari = number(agreement.get("ari"))  # of one true cluster there is none
    judged = "" if ari is None else f"; agreement with the server's clusters (ARI) {plain(ari, 3)}"
    seconds = [found for line in served if (found := number(line.get("seconds"))) is not None]
    clock = " of virtual time" if view.virtual else ""
    taken = f", {duration(sum(seconds) / len(seconds))}{clock} each" if seconds else ""
    accuracies = (
        ", ".join(f"{word} {percent(last.get(key))}" for word, key in ACCURACIES if number(last.get(key)) is not None)
        or "not measured yet"
    )
    return [
        ("Messages", _kinds(view), "Nothing flows back from the observer to the server or the clients."),
        ("Each client's update", _updates(view), "Nothing more: clients report personal accuracy and timings only."),
        *_secure_sums(view),
        ("Clusters", _grouping(view), f"True clusters: {truth}{judged}."),
        ("Accuracy", "Unknown: the server holds no test data.", f"{accuracies[:1].upper()}{accuracies[1:]}."),
        ("The data", _records(view), _data(view)),
        ("Time", f"{counted(len(served), 'round')} answered{taken}{_absent(view)}.", _busy(view)),
    ]


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


def _updates(view: RunView) -> str:
    own = registry().get(view.algorithm)  # code of an algorithm of your own is not imported for a page
    if own is not None and not any(step.gives for step in declared_steps(own).values()):
        return "None: no client sends a model or an update."
    privacy = view.run.get("privacy")
    if isinstance(privacy, Mapping) and privacy.get("trust") == "trusted-server":
        return "All that the client sends, without noise: this server is trusted and adds the noise."
    if isinstance(privacy, Mapping) and has_single_releases(privacy):
        return "In a secure sum a masked vector, which shows nothing alone; in other rounds what the client's gate released."
    if isinstance(privacy, Mapping) and privacy.get("trust") == "secure-aggregation":
        return "A masked vector, which shows nothing alone; the server learns sums over clients."
    return "Only what the client's gate released."


def _kinds(view: RunView) -> str:
    counts: Counter[tuple[str, str]] = Counter()
    total: Counter[tuple[str, str]] = Counter()
    for line in view.messages:
        key = (str(line.get("direction")), str(line.get("kind")))
        counts[key] += 1
        total[key] += int(number(line.get("bytes")) or 0)
    if not counts and view.one_process:
        return "None: all clients ran in one process."
    if not counts:
        return f"{size(view.run.get('bytes_up'))} from the clients, {size(view.run.get('bytes_down'))} to them."
    parts = []
    for direction, words in (("up", "From the clients"), ("down", "To the clients")):
        kinds = sorted((key for key in counts if key[0] == direction), key=lambda key: -total[key])
        if kinds:
            parts.append(f"{words}: " + ", ".join(f"{counts[key]} {key[1]} ({size(total[key])})" for key in kinds) + ".")
    return " ".join(parts)


def _grouping(view: RunView) -> str:
    if not clusters_clients(view):
        return "The server does not cluster clients."
    line = view.grouping[max(view.grouping)]
    counts = "/".join(str(whole(count)) for count in listed(mapping(line, "diagnostics"), "sizes"))
    first = view.first_round
    sure = f" Mixture of the first round: MSS {plain(first.mss, 3)}, MPO {tiny(first.mpo, 2)}." if first else ""
    return f"Clients by cluster: {counts}.{sure}{membership(first) if first else ''}"


def _records(view: RunView) -> str:
    known = record_counts(view)
    if not known:
        return "At most the number of records of each client: no data, no labels."
    span = str(min(known)) if min(known) == max(known) else f"{min(known)} to {max(known)}"
    whose = f"each of the {len(known)} clients" if len(known) > 1 else "the client"
    return f"Number of records of {whose} ({span}): no data, no labels."


def _data(view: RunView) -> str:
    data = view.experiment.get("data")
    if not isinstance(data, Mapping):
        return "Not kept in this folder."
    said = {key: value for key, value in data.items() if value and not isinstance(value, Mapping)}  # 0: no validation records
    words = {key: "/".join(map(str, value)) if isinstance(value, list) else value for key, value in said.items()}
    return "; ".join(f"{key.replace('_', ' ')}: {value}" for key, value in words.items()) + "."


def _absent(view: RunView) -> str:
    counts = {name: sum(len(listed(line, name)) for line in view.served.values()) for name in ("missing", "late", "away")}
    absent, late, away = counts["missing"], counts["late"], counts["away"]
    paused = sum(number(line.get("paused_s")) or 0.0 for line in view.served.values())
    said = f"; {counted(absent, 'answer')} missing" if absent else "; no answer missing"
    said += f"; {counted(late, 'answer')} after the deadline, set aside" if late else ""
    said += f"; {away} away by schedule" if away else ""
    return said + (f"; paused {duration(paused)} below the quorum" if paused else "")


def _busy(view: RunView) -> str:
    spent: Counter[str] = Counter()
    for own in client_times(view.spans, max(view.elapsed.values(), default=0.0)).values():
        spent.update(own)
    total = sum(spent.values())
    if not total:
        return "No timings of the workers were kept."
    shares = (f"{WORK_NAMES[what]} {100 * seconds / total:.0f} %" for what, seconds in spent.most_common() if seconds)
    return f"Workers' time: {', '.join(shares)}."
