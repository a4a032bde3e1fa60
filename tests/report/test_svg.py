"""Drawings of figures: well-formed, in place, and safe with hostile words."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from run_folder import write_run

from dpcfl_net.report.figures import axis, spec
from dpcfl_net.report.page import run_figures
from dpcfl_net.report.svg import text
from dpcfl_net.report.svg.draw import check, draw
from dpcfl_net.results.run_view import read_run

SVG = "{http://www.w3.org/2000/svg}"


def line(**changes: object) -> dict:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "one",
        "x": [0, 5, 10],
        "y": [0, 1, 2],
        "line": {"color": "@c0"},
        **changes,
    }


def drawn(data: list[dict], **layout: object) -> ElementTree.Element:
    return ElementTree.fromstring(draw(spec(data, 300, **{"xaxis": axis("x"), "yaxis": axis("y"), **layout}), 500))


def marks(svg: ElementTree.Element) -> ElementTree.Element:
    found = svg.find(f".//{SVG}g[@class='marks']")
    assert found is not None
    return found


def ticks(svg: ElementTree.Element, side: str) -> list[str]:
    return [label.text or "" for label in svg.findall(f".//{SVG}g[@class='ticks {side}']/{SVG}text")]


def corners(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path)]


def test_every_figure_of_a_run_is_well_formed_at_every_width(tmp_path: Path) -> None:
    view = read_run(write_run(tmp_path / "run"))
    figures = [figure for own in run_figures(view).values() for figure in own if figure.spec]
    assert len(figures) == 11
    for figure in figures:
        assert figure.spec is not None
        for width in (340, 600, 1110):
            svg = ElementTree.fromstring(draw(figure.spec, width))
            assert svg.attrib["width"] == str(width)
            inside = [
                point
                for path in marks(svg).iter(f"{SVG}path")
                for point in corners(path.attrib["d"])
                if "transform" not in path.attrib
            ]
            assert all(-1 <= x <= width + 1 and -1 <= y <= float(svg.attrib["height"]) + 1 for x, y in inside), figure.key


def test_a_line_runs_through_its_points_and_breaks_where_one_is_missing() -> None:
    path = marks(drawn([line(x=[0, 5, 10, 15], y=[0, 1, None, 2])])).find(f".//{SVG}path")
    assert path is not None
    (x0, y0), (x1, y1), (x2, y2) = corners(path.attrib["d"])
    assert (x1 - x0) * 2 == pytest.approx(x2 - x1, abs=0.3)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.3)
    assert y0 > y1 > y2  # larger values are higher
    assert path.attrib["d"].count("M") == 2


def test_a_logarithmic_axis_has_equal_steps_for_equal_factors() -> None:
    svg = drawn([line(x=[0.001, 0.1, 10], y=[1, 1, 1])], xaxis=axis("x", type="log"))
    path = marks(svg).find(f".//{SVG}path")
    assert path is not None
    x = [point[0] for point in corners(path.attrib["d"])]
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.2)
    assert ticks(svg, "x") == ["0.001", "0.01", "0.1", "1", "10"]


def test_a_line_breaks_at_a_number_that_a_logarithmic_axis_does_not_hold() -> None:
    path = marks(drawn([line(x=[0.1, 0, -1, 10], y=[1, 1, 1, 1])], xaxis=axis("x", type="log"))).find(f".//{SVG}path")
    assert path is not None
    assert (len(corners(path.attrib["d"])), path.attrib["d"].count("M")) == (2, 2)


def test_bars_stand_side_by_side_or_on_each_other() -> None:
    data = [{"type": "bar", "name": name, "x": [1, 2], "y": [2, 3], "marker": {"color": "@c1"}} for name in "ab"]
    sides = [corners(path.attrib["d"])[0][0] for path in marks(drawn(data, barmode="group")).iter(f"{SVG}path")]
    assert len(set(sides)) == 4
    stacked = [path.attrib["d"] for path in marks(drawn(data, barmode="stack")).iter(f"{SVG}path")]
    tops = [corners(path)[0] for path in stacked]
    tall = float(re.findall(r"v(-?[\d.]+)", stacked[2])[0])
    assert tops[0][0] == tops[2][0]
    assert tops[0][1] == pytest.approx(tops[2][1] + tall, abs=0.2)


def test_three_bars_of_a_place_add_up_or_stand_around_its_tick() -> None:
    data = [{"type": "bar", "name": name, "x": ["p", "q"], "y": [2, 3], "marker": {"color": "@c1"}} for name in "abc"]
    bars = [path.attrib["d"] for path in marks(drawn(data, barmode="stack")).iter(f"{SVG}path")]
    tops, tall = [corners(bar)[0][1] for bar in bars], [float(re.findall(r"v(-?[\d.]+)", bar)[0]) for bar in bars]
    assert tops[2] == pytest.approx(tops[4] + tall[4], abs=0.3)
    svg = drawn(data, barmode="group")
    bars = [path.attrib["d"] for path in marks(svg).iter(f"{SVG}path")]
    middle = corners(bars[2])[0][0] + float(re.findall(r"h(-?[\d.]+)", bars[2])[0]) / 2
    (label, *_) = svg.findall(f".//{SVG}g[@class='ticks x']/{SVG}text")
    assert middle == pytest.approx(float(label.attrib["x"]), abs=0.2)


def test_ticks_have_the_digits_that_tell_them_apart() -> None:
    shown = ticks(drawn([line(y=[0.1, 0.15, 0.2])]), "y")
    assert len({*shown}) == len(shown) >= 2
    assert all(re.fullmatch(r"0\.\d\d", label) for label in shown), shown


def test_labels_are_thinned_out_until_they_have_room() -> None:
    names = [f"a rather long name {k}" for k in range(30)]
    shown = ticks(drawn([line(x=names, y=list(range(30)))], xaxis=axis("x", type="category")), "x")
    assert 1 <= len(shown) <= 5
    assert set(shown) <= set(names)


def test_long_labels_have_several_lines_within_the_figure() -> None:
    long = (
        "r-dpcfl, clients [5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5], shift label-permutation, a_name_without_any_space" + 30 * "_x"
    )
    data = [{"type": "bar", "orientation": "h", "name": long, "x": [k], "y": [f"{long} {k}"]} for k in (1, 2)]
    svg = drawn(data, yaxis=axis("", type="category"))
    for place in (".//{0}g[@class='entry']/{0}text", ".//{0}g[@class='ticks y']/{0}text"):
        labels = [[span.text or "" for span in label.iter(f"{SVG}tspan")] for label in svg.findall(place.format(SVG))]
        assert len(labels) == 2
        for label, lines in zip(svg.findall(place.format(SVG)), labels, strict=True):
            assert "".join(lines).replace(" ", "").startswith(long.replace(" ", ""))
            left = float(label.attrib["x"])
            ends = [
                left - text.width(line) if label.attrib["text-anchor"] == "end" else left + text.width(line) for line in lines
            ]
            assert all(0 <= end <= 500 for end in ends)
    rows = sorted(float(label.attrib["y"]) for label in svg.findall(f".//{SVG}g[@class='ticks y']/{SVG}text"))
    assert rows[1] - rows[0] >= 15 * len(labels[0])


def test_a_narrow_axis_has_at_least_two_ticks() -> None:
    svg = ElementTree.fromstring(draw(spec([line(x=[15, 75], y=[1, 2])], 300, xaxis=axis("x"), yaxis=axis("y")), 220))
    assert len(ticks(svg, "x")) >= 2


def test_rounds_have_whole_ticks() -> None:
    assert ticks(drawn([line(x=[1, 2, 3], y=[1, 2, 3])]), "x") == ["1", "2", "3"]


def test_ticks_have_their_format() -> None:
    svg = drawn(
        [line(y=[0, 0.5, 1])], yaxis=axis("y", tickvals=[0, 0.5, 1], tickformat=".0%"), xaxis=axis("x", tickformat=".3~g")
    )
    assert ticks(svg, "y") == ["0%", "50%", "100%"]


def test_hostile_words_stay_words() -> None:
    evil = '</svg><script>alert(1)</script>\x00"'
    svg = drawn([line(name=evil), line(name="two")], xaxis=axis(evil))
    assert not list(svg.iter(f"{SVG}script"))
    assert any("</script>" in (node.text or "") for node in svg.iter(f"{SVG}text"))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (line(line={"color": "red;x"}), "colour is 'red;x'"),
        (line(marker={"symbol": "heart"}, mode="markers"), "marker.symbol is 'heart'"),
        ({"type": "pie"}, "type is 'pie'"),
        (line(y=[1]), "zip"),
        ({"type": "image", "source": "https://example.org/a.png"}, "must be a PNG"),
    ],
)
def test_a_malformed_figure_is_described(wrong: dict, said: str) -> None:
    assert said in check(spec([wrong]))
    assert not check(spec([line()]))


def test_columns_of_a_heat_map_meet_also_where_rounds_are_unequally_far_apart() -> None:
    """Columns were as wide as the least distance of two rounds; between others of different values there was a gap."""
    cells = {"type": "heatmap", "x": [1, 2, 10, 30], "z": [[0, 1, 2, 3]], "colorscale": [[0, "@surface"], [1, "@c0"]]}
    found = [path.attrib["d"] for path in marks(drawn([cells])).iter(f"{SVG}path")]
    boxes = sorted(
        (float(left), float(wide)) for path in found for left, wide in re.findall(r"M(-?[\d.]+) [\d.-]+h([\d.]+)v", path)
    )
    assert len(boxes) == 4
    for (left, wide), (after, _) in itertools.pairwise(boxes):
        assert left + wide == pytest.approx(after, abs=0.15)
