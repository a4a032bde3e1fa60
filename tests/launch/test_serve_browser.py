"""The pages of dpcfl serve in a real browser: a run that grows while it is read, the list, comparisons."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
from chromium import ABSENT, CHROMIUM, Tab, chromium
from run_folder import run_json, write_round, write_start
from served import Client, serving, write_comparable

from dpcfl_net.core.locks import run_lock

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CHROMIUM, reason=ABSENT)]
ROUNDS = 12


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture
def stranger(tmp_path: Path, tab: Tab):
    """A served folder with two finished runs, one at another epsilon, and a running one; `tab` has visited it."""
    write_comparable(tmp_path / "alpha")
    write_comparable(tmp_path / "beta", epsilon=3.0)
    for at in range(1, 4):
        write_round(write_start(tmp_path / "young", ROUNDS) if at == 1 else tmp_path / "young", at, ROUNDS)
    with serving(tmp_path) as client, run_lock(tmp_path / "young"):
        tab.errors.clear()
        tab.size(1280, 900)
        tab.open(client.server.with_token(client.server.access.token))
        yield client


def grow(folder: Path, rounds: range) -> None:
    for at in rounds:
        write_round(folder, at, ROUNDS)


def follow_link(tab: Tab, text: str) -> None:
    """Click a link as a reader does, so that the browser sends what it sends to links."""
    tab.leave(f"[...document.querySelectorAll('a')].find(a => a.closest('tr').innerText.includes({text!r})).click()")


def test_the_token_leaves_the_address_and_the_list_opens_a_run(stranger: Client, tab: Tab) -> None:
    assert tab.run("location.search") == ""
    assert tab.run("document.cookie") == ""  # scripts cannot read it
    follow_link(tab, "young")
    assert tab.run("document.title") == f"3/{ROUNDS} fmnist-r-dpcfl"
    assert tab.run("document.querySelectorAll('.tools').length") > 3
    assert tab.errors == []


def test_a_growing_run_is_redrawn_around_the_reader(stranger: Client, tab: Tab, tmp_path: Path) -> None:
    folder = tmp_path / "young"
    follow_link(tab, "young")
    tab.run("document.querySelector('details').open = true")
    tab.run("document.querySelector('#accuracy svg:last-child .entry').dispatchEvent(new Event('click'))")
    tab.run(
        "window.mark = document.querySelector('#accuracy'); window.marked = document.querySelector('#bytes').closest('figure')"
    )
    tab.run("document.querySelector('#bytes').closest('figure').scrollIntoView()")
    place = tab.run("document.querySelector('#bytes').getBoundingClientRect().top")
    before = tab.run("document.querySelector('#accuracy').innerHTML")
    grow(folder, range(4, 9))  # the second assignment brings new figures above the reader
    tab.wait(f"document.title === '8/{ROUNDS} fmnist-r-dpcfl'")
    assert tab.run("document.querySelector('#accuracy').innerHTML") != before
    assert abs(tab.run("document.querySelector('#bytes').getBoundingClientRect().top") - place) < 2
    assert tab.run("document.querySelector('details').open")
    assert tab.run("document.querySelector('#accuracy svg:last-child .entry').classList.contains('off')")
    assert tab.run("mark.isConnected && marked.isConnected")  # taken over, not replaced
    assert tab.run("document.querySelector('#facts').innerText.replace(/\\s+/g, ' ')").startswith(
        f"state running round 8 of {ROUNDS}"
    )
    (folder / "run.json").write_text(json.dumps(run_json(rounds_done=ROUNDS)))
    tab.wait("document.querySelector('#facts').innerText.includes('finished')")
    tab.wait("document.querySelector('h1').innerText.includes('71.2 %')")
    assert tab.errors == []


def test_every_new_figure_has_its_tools_and_its_data(stranger: Client, tab: Tab, tmp_path: Path) -> None:
    follow_link(tab, "young")
    had = tab.run("[...document.querySelectorAll('main .plot')].map(plot => plot.id)")
    grow(tmp_path / "young", range(4, ROUNDS))
    tab.wait(f"document.title === '{ROUNDS - 1}/{ROUNDS} fmnist-r-dpcfl'")
    now = tab.run("[...document.querySelectorAll('main .plot')].map(plot => plot.id)")
    assert set(had) < set(now) or had == now
    counts = "[...document.querySelectorAll('main figure')].map(figure => figure.querySelectorAll('.tools').length)"
    assert set(tab.run(counts)) == {1}
    assert tab.run("figures.accuracy.data[0].x.length") == ROUNDS - 1
    assert tab.run("[...document.querySelectorAll('main .plot')].every(plot => figures[plot.id])")


def test_a_cell_of_a_heat_map_names_its_round_also_where_rounds_are_unequally_far_apart(
    stranger: Client, tab: Tab, tmp_path: Path
) -> None:
    write_round(tmp_path / "young", 10, ROUNDS)
    follow_link(tab, "young")
    words = "plot => [1, 3, 6, 7, 10].map(at => plot.cell(plot.axes.x.base(at), plot.axes.y.base(0)))"
    said = tab.run(f"({words})(drawn.get('clients-rounds').at(-1))")
    assert [text.partition(":")[0].rpartition(" ")[2] for text in said] == ["1", "3", "3", "10", "10"]


def test_a_zoomed_figure_waits_until_the_zoom_is_left(stranger: Client, tab: Tab, tmp_path: Path) -> None:
    follow_link(tab, "young")
    tab.run("drawn.get('accuracy').at(-1).zoom({x: [300, 600], y: [100, 200]})")
    before = tab.run("document.querySelector('#accuracy').innerHTML")
    grow(tmp_path / "young", range(4, 7))
    tab.wait(f"document.title === '6/{ROUNDS} fmnist-r-dpcfl'")
    assert tab.run("document.querySelector('#accuracy').innerHTML") == before
    tab.run("document.querySelector('.reset:not([hidden])').click()")
    tab.wait("figures.accuracy.data[0].x.length === 6")


def test_removed_runs_and_a_stopped_server_are_told(stranger: Client, tab: Tab, tmp_path: Path) -> None:
    follow_link(tab, "young")
    shutil.rmtree(tmp_path / "young")
    tab.wait("document.querySelector('#said').innerText.includes('removed or moved')")
    assert tab.run("document.querySelectorAll('main .plot').length") > 3  # what was read stays
    stranger.server.shutdown()
    stranger.server.socket.close()
    tab.wait("document.querySelector('#said').innerText.includes('does not answer')")


def test_the_list_filters_and_compares(stranger: Client, tab: Tab, tmp_path: Path) -> None:
    assert tab.run("document.querySelector('#compare').disabled")
    tab.run(
        "const box = document.querySelector('#filter'); box.value = 'finished'; box.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    shown = "[...document.querySelectorAll('tbody tr')].filter(row => row.offsetHeight).map(row => row.querySelector('.place').innerText)"
    assert sorted(tab.run(shown)) == ["alpha", "beta"]
    tab.run("document.querySelectorAll('tbody tr:not([hidden]) input').forEach(box => box.click())")
    write_comparable(tmp_path / "late", seed=1)
    tab.wait("document.querySelectorAll('tbody tr').length === 4")
    assert sorted(tab.run(shown)) == ["alpha", "beta", "late"]  # the filter holds for new runs
    assert tab.run("document.querySelectorAll('input:checked').length") == 2
    tab.leave("document.querySelector('#compare').click()")
    assert tab.run("location.pathname") == "/compare"
    assert "epsilon is" in tab.run("document.querySelector('main').innerText")
    tab.leave("[...document.querySelectorAll('a')].find(a => a.innerText.startsWith('Compare anyway')).click()")
    assert "NOT COMPARABLE" in tab.run("document.querySelector('main').innerText")
    tab.leave("history.go(-2)")
    assert tab.run("document.querySelector('#filter').value") == "finished"
    assert sorted(tab.run(shown)) == ["alpha", "beta", "late"]


def test_an_empty_list_fills_and_can_be_filtered(tab: Tab, tmp_path: Path) -> None:
    tab.errors.clear()
    with serving(tmp_path) as client:
        tab.open(client.server.with_token(client.server.access.token))
        assert "There are no runs here yet." in tab.run("document.querySelector('main').innerText")
        write_comparable(tmp_path / "alpha")
        tab.wait("document.querySelector('tbody tr')")
        change = "box.dispatchEvent(new Event('input', {bubbles: true}))"
        tab.run(f"{{ const box = document.querySelector('#filter'); box.value = 'nothing'; {change} }}")
        assert tab.run("[document.querySelector('tbody tr').hidden, document.querySelector('#none').hidden]") == [True, False]
        assert tab.run("document.querySelector('#compare').disabled")
        assert tab.errors == []


@pytest.mark.parametrize("width", [390, 1280])
def test_a_long_name_of_an_algorithm_stays_in_its_cell(stranger: Client, tab: Tab, tmp_path: Path, width: int) -> None:
    """On a phone it was written over the rounds; in a wide window the list was wider than its frame."""
    write_comparable(tmp_path / "own", algorithm="clustered_by_noisy_losses:ClusteredByNoisyLosses")
    tab.size(width, 844)
    tab.leave("location.href = '/'")
    tab.wait("document.querySelector('main').innerText.includes('ByNoisyLosses')")
    cells = "[...document.querySelectorAll('table.runs td')]"
    assert tab.run(f"{cells}.filter(cell => cell.scrollWidth > cell.clientWidth + 1).map(cell => cell.innerText)") == []
    rounds = "cell.nextElementSibling?.dataset.label === 'rounds'"
    gap = "cell.nextElementSibling.getBoundingClientRect().left - cell.getBoundingClientRect().right"
    assert min(tab.run(f"{cells}.filter(cell => {rounds}).map(cell => {gap})")) >= 0
    assert tab.run("(list => list.scrollWidth - list.parentElement.clientWidth)(document.querySelector('table.runs'))") <= 0


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_window(stranger: Client, tab: Tab, width: int) -> None:
    tab.size(width, 844, dark=width == 390)
    time.sleep(0.2)
    for address in tab.run("['/', ...[...document.querySelectorAll('.name a')].map(a => a.getAttribute('href'))]"):
        tab.leave(f"location.href = {address!r}")
        assert tab.run("location.pathname") == address
        assert tab.run("document.documentElement.scrollWidth") <= width
