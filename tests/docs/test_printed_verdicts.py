"""Verdicts with intervals in the tables of the documentation are those of docs/measured/."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

import pytest
from conftest import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(path for path in (DOCS / "explanation" / "reproductions").glob("*.md"))
NUMBER = r"([+-]?\d*\.?\d+)"
ENDS = rf"(?:95 % interval )?{NUMBER} to {NUMBER}\)"
# Mean, lower and upper end, as in "1.5 points, at B = 8 (-.3 to 3.3)" and in "holds (1.5, -.3 to 3.3)".
MEASURED = re.compile(rf"(?<!= )(?<![\d.]){NUMBER}(?: points)?(?:,? (?:at|over) [^(|;]*?)? \({ENDS}|\({NUMBER}, {ENDS}")
VERDICT = re.compile(r"does not hold|holds|undecided")
NO_CLAIMS = {"| C = .1, the grid's choice |", "| C = 1 |"}  # starts of lines on leads that no claim is about


def comparisons() -> Iterator[tuple[str, tuple[float, float, float]]]:
    """Yield verdict, and mean with interval, of all published comparisons with an interval."""
    for file in (DOCS / "measured").glob("*/claims.json"):
        for claim in json.loads(file.read_text())["claims"]:
            for one in claim["comparisons"]:
                if one["interval"]:
                    yield claim["verdict"], (one["mean"], *one["interval"])


PUBLISHED = list(comparisons())


def rounds_to(values: Sequence[float], texts: Sequence[str]) -> bool:
    """Return True if the values, or all with the other sign, are printed so."""
    mean, low, high = values
    return any(all(map(_near, each, texts)) for each in ((mean, low, high), (-mean, -high, -low)))


def _near(value: float, text: str) -> bool:
    decimals = len(text.partition(".")[2])
    return abs(value - float(text)) <= 0.5 * 10.0**-decimals + 1e-9


def found_in(line: str) -> list[tuple[str, ...]]:
    """Return mean and ends of all intervals of a line, as printed."""
    return [tuple(filter(None, groups)) for groups in MEASURED.findall(line)]


def test_intervals_are_found_in_a_line():
    assert found_in("| x | +3.5 points (95 % interval -19.5 to 26.5), 20: +3.2 (-11.1 to 17.4) |") == [
        ("+3.5", "-19.5", "26.5"),
        ("+3.2", "-11.1", "17.4"),
    ]
    assert found_in("| at most +4.4 points, at B = 8 (-6.6 to 15.4) | holds (0.34, -0.284 to 0.963) |") == [
        ("+4.4", "-6.6", "15.4"),
        ("0.34", "-0.284", "0.963"),
    ]


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_printed_verdicts_are_those_that_were_measured(page):
    wrong = []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        verdicts = set(VERDICT.findall(line))
        if not line.startswith("|") or not verdicts or any(map(line.startswith, NO_CLAIMS)):
            continue
        for texts in found_in(line):
            measured = {verdict for verdict, values in PUBLISHED if rounds_to(values, texts)}
            if not measured & verdicts:
                wrong.append(f"{page.name}:{number}: {' '.join(texts)}, {verdicts}: measured {measured or 'nowhere'}")
    assert not wrong, "\n".join(wrong)


def test_most_pages_print_intervals():
    """Otherwise the test above would look at nothing."""
    assert sum(len(found_in(line)) for page in PAGES for line in page.read_text().splitlines() if VERDICT.search(line)) > 100
