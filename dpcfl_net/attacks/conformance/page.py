"""Report of the conformance kit as text for a terminal and as an HTML page."""

from __future__ import annotations

import textwrap
from pathlib import Path

from dpcfl_net.attacks.conformance.findings import FAIL, PASS, UNDECIDED, Check, Finding
from dpcfl_net.attacks.conformance.kit import Report
from dpcfl_net.report.pages import write_page
from dpcfl_net.results.tables import Table

COLUMNS = ["check", "verdict", "measured", "the claim allows", "false alarm"]
WIDTH = 110  # characters of a line, where the terminal is not narrower
HEADLINES = {
    PASS: "The claim stands: no check refuted it.",
    FAIL: "THE CLAIM DOES NOT HOLD: {}.",
    UNDECIDED: "Undecided: {}.",
}


def headline(report: Report) -> str:
    """The result in one sentence."""
    named = [check.name for check in report.checks if check.verdict == report.verdict]
    return HEADLINES[report.verdict].format(", ".join(named))


def text(report: Report, width: int = WIDTH) -> str:
    """Format a report for a terminal: headline, table, and a sentence for each check.

    Args:
        report: The report.
        width: Largest number of characters of a line.
    """
    lines = [headline(report), "", *_checks(report).lines(width), ""]
    for check in report.checks:
        indent = " " * 12
        lines += textwrap.wrap(f"{check.name + ':':11} {check.sentence}", width, subsequent_indent=indent)
    lines += ["", textwrap.fill(_spent(report), width)]
    return "\n".join(lines)


def write(path: Path, report: Report) -> None:
    """Write the HTML page.

    Args:
        path: The page.
        report: The report.
    """
    headlines = [headline(report)]
    said = [f"{check.name.capitalize()}: {check.sentence}" for check in report.checks]
    claim = [[key, _text(value)] for key, value in report.claim.model_dump().items() if value is not None]
    tests = [[check.name, *_finding(finding)] for check in report.checks for finding in check.findings]
    write_page(
        path,
        title=f"Conformance of {report.adapter}",
        lead=[*(headlines if report.verdict == PASS else []), *said, _spent(report)],
        figures=[],
        alerts=[] if report.verdict == PASS else headlines,
        tables=[
            _checks(report),
            Table("All tests", ["check", "test", "measured", "the claim allows", "false alarm", "result"], tests),
            Table("The claim", ["field", "value"], claim),
        ],
    )


def _checks(report: Report) -> Table:
    return Table("Checks", COLUMNS, [_row(check) for check in report.checks])


def _row(check: Check) -> list[str]:
    what, _, limits = check.bound.partition(": ")
    number = "–" if check.number is None else f"{check.number:.4g} ({what})"
    return [check.name, check.verdict, number, limits or "–", _level(check.false_alarm)]


def _finding(finding: Finding) -> list[str]:
    return [finding.what, f"{finding.value:.4g}", finding.limits, _level(finding.level), "broken" if finding.broken else "kept"]


def _level(level: float) -> str:
    return f"{level:.0e}" if level else "none"


def _spent(report: Report) -> str:
    total = sum(check.false_alarm for check in report.checks)
    return (
        f"{report.calls} calls, {report.seconds:.1f} s. A program that keeps its claim fails any of these tests with probability at most "
        f"{total:.0e}. A pass does not prove the claim: it says that these tests did not refute it."
    )


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
