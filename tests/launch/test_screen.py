"""What a terminal shows: the live screen, plain lines, the result; and the view they draw, read from growing files."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from run_folder import START, privacy, run_json, true_clusters, write_lines, write_round, write_run, write_start

from dpcfl_net.launch.cli import steps
from dpcfl_net.launch.cli.progress import ProgressTail, ProgressView, tail_progress
from dpcfl_net.launch.cli.screen import PlainLines, Screen, open_screen, print_summary, print_table
from dpcfl_net.results.tables import Table


def terminal(width: int = 80, height: int = 40) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=True, width=width, height=height, color_system="standard", highlight=False
    )


def lines_left(written: str, height: int) -> list[str]:
    """Return the lines that are on a terminal of a height, or were scrolled out of it, after what was written to it."""
    gone, lines, row = list[str](), [""] * height, 0
    for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\n|[^\x1b\r\n]+", written):
        if part == "\n" and row == height - 1:
            gone, lines = [*gone, lines[0]], [*lines[1:], ""]
        elif part == "\n":
            row += 1
        elif part.startswith("\x1b"):
            row -= int(part[2:-1] or 1) if part[-1] == "A" else 0
            lines[row] = "" if part == "\x1b[2K" else lines[row]
        else:
            lines[row] += part
    return [line for line in [*gone, *lines] if line.strip()]


def plain(width: int = 80) -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=width, highlight=False)


def text(console: Console) -> str:
    return console.file.getvalue()


def drawn(view: ProgressView, width: int = 80) -> str:
    console = plain(width)
    console.print(Screen(console, clock=lambda: START + 60).draw(view))
    return text(console)


def run_some(folder: Path, rounds: int) -> ProgressTail:
    write_start(folder)
    for at in range(1, rounds + 1):
        write_round(folder, at, 40)
    return ProgressTail(folder)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_screen_shows_the_run_and_fits(tmp_path: Path, width: int) -> None:
    view = run_some(tmp_path / "run", 13).view()
    screen = drawn(view, width)
    for words in (
        "fmnist-r-dpcfl",
        "r-dpcfl",
        "round 13/40",
        "epsilon at most 5",
        "A minority",
        "the server's clusters: 3/6/6/6",
        "21 waiting",
        "left",
    ):
        assert words in screen
    assert all(len(line) <= width for line in screen.splitlines())
    assert len(screen.splitlines()) < 20


def test_nothing_is_cut_off_behind_the_bar_on_a_terminal(tmp_path: Path) -> None:
    console = terminal(60)
    console.print(Screen(console, clock=lambda: START + 60).draw(run_some(tmp_path / "run", 13).view()))
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text(console)).splitlines()
    assert any("epsilon at most 5" in line for line in lines)
    assert {len(line) for line in lines} == {60}


def test_screen_before_anything_is_known() -> None:
    assert "round 0" in drawn(ProgressView())


def test_screen_is_loud_about_insecure_and_unprotected() -> None:
    view = ProgressView("x", "y", epsilon=None, epsilon_stated=True, insecure=True)
    assert "epsilon inf" in drawn(view)
    assert "INSECURE" in drawn(view)


def test_last_three_warnings_and_no_control_characters() -> None:
    view = ProgressView(name="n\x1b[2J", warnings=[f"warning {at}\x1b]0;x\x07" for at in range(5)])
    screen = drawn(view)
    assert "warning 1" not in screen
    assert "warning 4" in screen
    assert "\x1b" not in screen
    console = plain()  # they stay when the screen goes
    with Screen(console) as screen:
        screen.update(view)
        screen.finish(run_json())
    said = text(console)
    assert said.index("! 2 earlier warnings: see the report") < said.index("! warning 2") < said.index("! warning 4")
    assert said.index("! warning 4") < said.index("71.2 %")
    assert "! warning 1" not in said


def test_many_workers_and_clusters_stay_small() -> None:
    view = ProgressView(workers=["training"] * 200, clusters=[(f"c{at}", 1, 0.5, None) for at in range(100)])
    assert len(drawn(view, 60).splitlines()) < 30
    assert "and 88 more" in drawn(view)


def test_a_run_in_one_process_has_no_workers(tmp_path: Path) -> None:
    tail = run_some(tmp_path / "run", 3)
    (tmp_path / "run" / "messages.jsonl").write_text("", encoding="utf-8")
    assert "21 away" in drawn(tail.view())
    with (tmp_path / "run" / "config.yaml").open("a", encoding="utf-8") as config:
        config.write("runtime: {federation: in-process}\n")
    view = tail.view()
    assert view.workers == []
    assert "away" not in drawn(view)
    assert "all rounds are done" in drawn(replace(view, round=40))


def test_clients_whose_clusters_are_unknown_are_one_row(tmp_path: Path) -> None:
    tail = run_some(tmp_path / "run", 3)
    data = {"clients": [21], "shift": "none", "partition": "natural"}
    (tmp_path / "run" / "experiment.json").write_text(json.dumps({"true_clusters": [0] * 21, "data": data}), encoding="utf-8")
    view = tail.view()
    screen = drawn(view)
    assert ([row[:2] for row in view.clusters], len(view.workers)) == ([("all clients", 21)], 21)
    assert "all clients" in screen
    assert "true cluster" not in screen


def test_a_run_has_run_since_the_earliest_of_its_lines(tmp_path: Path) -> None:
    folder = write_start(tmp_path / "run")
    tail = ProgressTail(folder)
    assert tail.view().started is None
    hello = {"direction": "up", "kind": "HELLO", "round": 1, "bytes": 9}
    write_lines(folder / "messages.jsonl", [{**hello, "peer": f"client {at}", "time": START + at} for at in (9, 2, 12)])
    assert tail.view().started == START + 2
    write_lines(folder / "messages.jsonl", [{**hello, "peer": "client 9", "time": START + 30}])
    assert tail.view().started == START + 2
    write_lines(folder / "metrics.jsonl", [{"view": "server", "round": 1, "time": START + 1}])
    assert tail.view().started == START + 1
    # Resumed an hour after it was stopped, which was 20 s after its start: its screen then says 40 s, not an hour.
    (folder / "run.json").write_text(json.dumps({"state": "running", "wall_s": 20.0}), encoding="utf-8")
    os.utime(folder / "run.json", (START + 3600, START + 3600))
    console = plain()
    console.print(Screen(console, clock=lambda: START + 3620).draw(tail.view()))
    assert tail.view().started == START + 1
    assert "40.0 s elapsed" in text(console)


def test_workers_that_leave_after_the_last_round_are_not_shown() -> None:
    view = ProgressView(workers=["away"] * 4, round=3, rounds=3, state="running")
    assert "all rounds are done" in drawn(view)
    assert "away" not in drawn(view)
    assert "4 away" in drawn(replace(view, round=2))


def test_live_screen_gives_the_terminal_back_after_an_error() -> None:
    console = terminal()

    def interrupted() -> None:
        with Screen(console) as screen:
            screen.update(ProgressView("x", "y", round=1, rounds=2))
            screen.update(ProgressView("x", "y", round=2, rounds=2))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert text(console).count("\x1b[?25l") == text(console).count("\x1b[?25h") == 1


def test_lines_of_a_piped_result_have_no_blanks_at_their_end() -> None:
    console = plain()
    print_summary(run_json(privacy=privacy()), console=console)
    lines = text(console).splitlines()
    assert any("Not covered" in line for line in lines)
    assert [line for line in lines if line != line.rstrip()] == []


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    def summary() -> str:
        console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system="standard", highlight=False)
        print_summary(run_json(privacy=privacy(insecure=True)), console=console)
        return text(console)

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;31m" in summary()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "31m" not in summary()


def test_glyphs_without_unicode() -> None:
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"), width=80)
    console.print(Screen(console).draw(ProgressView(workers=["training", "gone"])))
    console.file.flush()
    assert b"workers >x" in console.file.buffer.getvalue()


def test_the_right_kind_is_opened() -> None:
    assert isinstance(open_screen(terminal()), Screen)
    assert isinstance(open_screen(plain()), PlainLines)


def test_the_echo_of_ctrl_c_fits_behind_the_drawing() -> None:
    """An echo that wraps moves the cursor to the next line, and the first line of the drawing stays on the terminal."""
    console = terminal(60)
    with Screen(console) as screen:
        screen.prepare("libraries")
        screen.update(ProgressView("x", "y", round=1, rounds=2))
    lines = [line for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text(console)).splitlines() if "─" in line]
    assert len(lines) > 3
    assert {len(line) for line in lines} == {60 - len("^C")}


@pytest.mark.parametrize("height", [3, 11, 12, 13, 14, 40])
def test_nothing_of_a_drawing_stays_on_a_terminal_of_any_height(height: int) -> None:
    """The end of a drawing begins a line: at the bottom of the terminal this left the upper lines of the drawing behind."""
    console, view = terminal(60, height), ProgressView("x", rounds=9, workers=["training"] * 8, warnings=["a", "b", "c"])
    view.clusters = [("A", 3, 0.5, None), ("B", 5, 0.4, 0.1)]
    with Screen(console) as screen:
        screen.update(view)
        shown = len(lines_left(text(console), height))
        screen.update(view)
        console.file.write("^C")
    assert (shown, lines_left(text(console), height)) == (min(13, height - 1), [])


@pytest.mark.parametrize("kind", [PlainLines, Screen])
def test_each_step_of_the_preparation_is_shown(kind: type[PlainLines] | type[Screen]) -> None:
    console = plain() if kind is PlainLines else terminal()
    with kind(console) as display:
        display.prepare("data set \x1b[2J digits")
        display.prepare("noise multiplier for epsilon 5")
    shown = text(console)
    assert "preparing: data set ?[2J digits" in shown
    assert shown.index("data set") < shown.index("preparing: noise multiplier for epsilon 5")


def test_a_pipe_gets_a_line_for_a_step_that_takes_long(monkeypatch, capsys) -> None:
    class Timer(threading.Timer):
        """Starts when the test says that its time has passed."""

        def start(self) -> None:
            timers.append(self)

    timers: list[Timer] = []
    monkeypatch.setattr(steps, "threading", SimpleNamespace(Timer=Timer))
    monkeypatch.setattr(steps, "LONG_S", 0.01)
    with steps.preparing() as begin:
        begin("data set \x1b[2J digits")
        begin("noise multipliers of 300 plans for epsilon 5")
        for timer in timers:
            timer.run()
        begin("layout")
    timers[-1].run()
    assert [timer.interval for timer in timers] == [0.01] * 3
    with steps.preparing(quiet=True) as begin:
        begin("noise")
    assert len(timers) == 3
    assert capsys.readouterr() == ("", "preparing: noise multipliers of 300 plans for epsilon 5\n")


def test_plain_lines_print_each_round_once(tmp_path: Path) -> None:
    folder, console = write_start(tmp_path / "run"), plain(60)
    lines, tail = PlainLines(console), ProgressTail(folder)
    for at in range(1, 6):
        write_round(folder, at, 40, missing=(7,) if at == 3 else ())
        lines.update(tail.view())
        lines.update(tail.view())
    printed = text(console).splitlines()
    assert [line.split()[1] for line in printed if line.startswith("round")] == [f"{at}/40" for at in range(1, 6)]
    assert printed.count("warning: round 3: no answer from client 7") == 1
    assert "clusters 3/6/6/6  epsilon at most 5  4.1 s" in printed[-1]
    assert "(minority " in printed[-1]


def test_a_line_waits_for_the_observer_but_not_for_ever(tmp_path: Path) -> None:
    folder = write_start(tmp_path / "run")
    tail = ProgressTail(folder)
    for at in (1, 2, 3):
        write_lines(folder / "metrics.jsonl", [{"view": "server", "round": at, "time": START, "seconds": 1.0, "missing": []}])
        assert len(tail.view().lines) == max(0, at - 2)
    assert "accuracy" not in tail.view().lines[0]
    (folder / "run.json").write_text(json.dumps(run_json()), encoding="utf-8")
    assert len(tail.view().lines) == 3


def test_an_epsilon_of_0_spent_is_shown(tmp_path: Path) -> None:
    """With no release yet it was shown as the largest one, `at most 5`."""
    folder = write_start(tmp_path / "run")
    stated = {"epsilon": 5, "epsilon_spent": 4.5}
    (folder / "run.json").write_text(json.dumps(run_json(state="running", privacy=stated)), encoding="utf-8")
    tail = ProgressTail(folder)
    assert tail.view().epsilon_text == "4.5 of 5"
    write_lines(folder / "metrics.jsonl", [{"view": "server", "round": 1, "epsilon_spent_by_client": [0.0, 0.0]}])
    assert tail.view().epsilon_text == "0 of 5"
    # A run that was stopped has also spent what clients were charged in the next round.
    (folder / "run.json").write_text(json.dumps(run_json(state="interrupted", privacy=stated)), encoding="utf-8")
    view = tail.view()
    assert (view.epsilon_text, view.epsilon_round) == ("4.5 of 5", None)


def test_lines_of_rounds_that_end_faster_than_their_evaluation_have_their_accuracy(tmp_path: Path) -> None:
    folder = write_start(tmp_path / "run")
    tail = ProgressTail(folder)
    for at in range(1, 6):
        write_lines(
            folder / "metrics.jsonl", [{"view": "server", "round": at, "time": time.time(), "seconds": 0.01, "missing": []}]
        )
    assert tail.view().lines == []
    seen = [{"view": "observer", "round": at, "time": time.time(), "accuracy_mean": 0.5} for at in range(1, 6)]
    write_lines(folder / "metrics.jsonl", seen)
    assert [line.split("  ")[1] for line in tail.view().lines] == ["accuracy 50.0 %"] * 5


def test_a_round_that_is_not_evaluated_does_not_hold_up_the_last_lines(tmp_path: Path) -> None:
    """With output.evaluate_every 5 a run of 5 rounds printed three of them: run.json is written after the last look."""
    folder = write_start(tmp_path / "run")
    tail = ProgressTail(folder)
    for at in range(1, 6):
        write_lines(folder / "metrics.jsonl", [{"view": "server", "round": at, "time": START, "seconds": 1.0, "missing": []}])
    assert len(tail.view().lines) == 3
    write_lines(folder / "metrics.jsonl", [{"view": "observer", "round": 5, "time": START, "accuracy_mean": 0.5}])
    printed = tail.view().lines
    assert [line.split()[1] for line in printed] == [f"{at}/40" for at in range(1, 6)]
    assert ["accuracy" in line for line in printed] == [False] * 4 + [True]


def test_tail_reads_only_what_is_new(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    tail = run_some(folder, 3)
    first = tail.view()
    assert first.round == 3
    offsets = {name: one.offset for name, one in tail._tails.items()}
    sizes = {name: path.stat().st_size for name in offsets if (path := folder / f"{name}.jsonl").exists()}
    assert offsets == dict.fromkeys(offsets, 0) | sizes
    write_round(folder, 4, 40)
    assert tail.view().round == 4
    assert first.lines == tail.view().lines[:3]


def test_tail_progress_keeps_its_place(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_some(folder, 2)
    assert tail_progress(folder).round == 2
    write_round(folder, 3, 40)
    assert tail_progress(str(folder)).round == 3
    assert len(tail_progress(folder).lines) == 3


def test_phases_of_workers(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    tail = run_some(folder, 1)
    later = START + 100

    def message(client: int, direction: str, kind: str, at: int, time: float) -> dict:
        return {
            "time": time,
            "direction": direction,
            "peer": f"client {client}",
            "kind": kind,
            "round": at,
            "bytes": 9,
            "id": "x",
        }

    write_lines(folder / "messages.jsonl", [message(client, "down", "TASK", 2, later) for client in range(4)])
    write_lines(folder / "messages.jsonl", [message(1, "up", "RESULT", 2, later + 1), message(5, "up", "BYE", 0, later + 1)])
    write_lines(folder / "spans.jsonl", [{"who": "client 2", "what": "train", "round": 2, "start": later, "end": later + 1}])
    write_lines(folder / "metrics.jsonl", [{"view": "server", "round": 2, "time": later + 2, "missing": [3]}])
    assert tail.view().workers[:6] == ["training", "waiting", "sending", "gone", "waiting", "gone"]
    write_lines(folder / "messages.jsonl", [message(client, "up", "HELLO", 0, later + 3) for client in (3, 5)])
    assert tail.view().workers[3] == "training"
    assert tail.view().workers[5] == "waiting"


def test_phases_of_a_worker_with_two_tasks_in_a_round(tmp_path: Path) -> None:
    """With the answer to the first it counted as waiting until the next round, while it computed the second."""
    folder = write_start(tmp_path / "run")
    tail, words = ProgressTail(folder), {"peer": "client 0", "round": 2, "bytes": 9, "id": "x", "time": START}
    span = {"who": "client 0", "what": "train", "round": 2, "start": START, "end": START + 1}
    found = []
    for task in ("select", "train"):
        write_lines(folder / "messages.jsonl", [{**words, "direction": "down", "kind": "TASK", "task": task}])
        found.append(tail.view().workers[0])
        write_lines(folder / "spans.jsonl", [span])
        found.append(tail.view().workers[0])
        write_lines(folder / "messages.jsonl", [{**words, "direction": "up", "kind": "RESULT", "task": task}])
        found.append(tail.view().workers[0])
    assert found == ["training", "sending", "waiting"] * 2
    write_lines(folder / "messages.jsonl", [{**words, "direction": "down", "kind": "TASK", "task": "select", "round": 3}])
    assert tail.view().workers[0] == "training"


def test_a_missing_worker_is_gone_until_it_is_heard_and_one_that_made_room_is_back_when_it_connects(tmp_path: Path) -> None:
    folder, words = write_start(tmp_path / "run"), {"peer": "client 2", "bytes": 9, "id": "x"}
    tail = ProgressTail(folder)
    write_lines(folder / "messages.jsonl", [{**words, "time": START, "direction": "up", "kind": "HELLO", "round": 0}])
    write_lines(folder / "metrics.jsonl", [{"view": "server", "round": 1, "time": START + 1, "missing": [2]}])
    asked = {**words, "time": START + 2, "direction": "down", "kind": "TASK", "round": 2}
    write_lines(folder / "messages.jsonl", [asked])
    assert tail.view().workers[2] == "gone"
    write_lines(folder / "messages.jsonl", [{**asked, "time": START + 2.5, "direction": "up", "kind": "HELLO"}])
    write_lines(folder / "spans.jsonl", [{"who": "client 2", "what": "wait", "round": 2, "start": START, "end": START + 2}])
    assert tail.view().workers[2] == "training", "it has not trained in this round"
    write_lines(folder / "messages.jsonl", [{**asked, "time": START + 3, "direction": "up", "kind": "RESULT"}])
    assert tail.view().workers[2] == "waiting"
    for way in ("down", "up"):  # it confirms the goodbye
        write_lines(folder / "messages.jsonl", [{**asked, "time": START + 4, "direction": way, "kind": "BYE"}])
        assert tail.view().workers[2] == "away"
    write_lines(folder / "messages.jsonl", [{**words, "time": START + 5, "direction": "up", "kind": "HELLO", "round": 0}])
    assert tail.view().workers[2] == "waiting"


def test_messages_without_a_client_a_round_or_a_time_are_of_no_worker(tmp_path: Path) -> None:
    folder = write_start(tmp_path / "run")
    sent = [{"peer": peer, "direction": way, "kind": "TASK"} for peer in ("a stranger", "client 1") for way in ("up", "down")]
    write_lines(folder / "messages.jsonl", sent)
    assert ProgressTail(folder).view().workers == ["away", "waiting", *["away"] * 19]


def test_workers_of_a_roster_that_cannot_be_read_are_those_that_were_asked(tmp_path: Path) -> None:
    sent = [{"peer": f"client {client}", "direction": "down", "kind": "TASK", "round": 1} for client in (3, 1)]
    write_lines(tmp_path / "messages.jsonl", sent)
    assert ProgressTail(tmp_path).view().workers == ["away", "training", "away", "training"]


def test_a_thousand_clients_stay_readable(tmp_path: Path) -> None:
    screen = drawn(ProgressView(workers=["training"] * 140 + ["gone", "waiting"] + ["away"] * 858), 60)
    assert all(words in screen for words in ("and 22 more", "140 training", "1 gone", "858 away"))
    assert len(screen.splitlines()) < 12
    folder = write_start(tmp_path / "run")
    tail = ProgressTail(folder)
    hello, task, bye = (
        {"time": START, "direction": way, "peer": "client 2", "kind": kind, "round": 1, "bytes": 9, "id": "x"}
        for way, kind in (("up", "HELLO"), ("down", "TASK"), ("down", "BYE"))
    )
    write_lines(folder / "messages.jsonl", [hello, task])
    assert tail.view().workers[:3] == ["away", "away", "training"]
    write_lines(folder / "messages.jsonl", [bye])
    assert tail.view().workers[2] == "away"
    write_lines(folder / "metrics.jsonl", [{"view": "server", "round": 1, "time": START, "missing": list(range(300))}])
    assert tail.view().warnings[-1].endswith("8, 9 and 290 more")


def test_view_of_a_finished_run(tmp_path: Path) -> None:
    view = ProgressTail(write_run(tmp_path / "run", 8)).view()
    assert (view.state, view.round, view.epsilon_text) == ("finished", 8, "4.98 of 5")
    assert view.lines[3].split("  ")[-2] == "epsilon 3.53 of 5"  # 3.5214, rounded up
    assert [row[:2] for row in view.clusters] == [("A minority", 3), ("B", 6), ("C", 6), ("D", 6)]
    assert len(view.workers) == len(true_clusters())


def test_view_of_a_run_that_goes_on_has_what_was_spent_so_far_and_the_names_that_are_known(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    tail = run_some(folder, 3)
    spent = [{"view": "server", "round": at, "epsilon_spent_by_client": [1.1 * at, 0.5]} for at in (1, 2)]
    write_lines(folder / "metrics.jsonl", spent)
    (folder / "run.json").write_text(
        json.dumps(run_json(state="running", name="run", algorithm="fesem", privacy=privacy(epsilon_spent=None)))
    )
    view = tail.view()
    assert (view.name, view.algorithm, view.state, view.wall_s) == ("run", "fesem", "running", None)
    assert view.epsilon_text == "2.2 of 5 after round 2"
    assert tail.view(dead=True).state == "dead"
    (folder / "run.json").write_text(json.dumps(run_json(state="failed")))
    assert (tail.view(dead=True).state, tail.view().wall_s) == ("failed", 168.2)
    (folder / "run.json").unlink()
    view = tail.view()
    assert (view.name, view.algorithm, view.state, view.rounds) == ("fmnist-r-dpcfl", "r-dpcfl", "running", 40)
    (folder / "protocol.json").unlink()
    (folder / "config.yaml").write_text("rounds: 50\n")
    view = tail.view()
    assert (view.name, view.algorithm, view.rounds) == ("run", "", 50)


def test_repeated_views_do_not_visit_each_client(tmp_path: Path) -> None:
    folder = write_start(tmp_path / "run")
    experiment = json.loads((folder / "experiment.json").read_text(encoding="utf-8"))
    experiment["true_clusters"] = [client % 3 for client in range(10_001)]
    (folder / "experiment.json").write_text(json.dumps(experiment), encoding="utf-8")
    write_round(folder, 1, 40)
    tail, calls = ProgressTail(folder), 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    first = tail.view()
    sys.setprofile(count)
    again = tail.view()
    sys.setprofile(None)
    assert [row[:2] for row in again.clusters] == [("A", 3334), ("B", 3334), ("C minority", 3333)]
    assert again == first
    assert 0 < calls < 5_000
    experiment["true_clusters"] = [0, 1, 1]
    (folder / "experiment.json").write_text(json.dumps(experiment), encoding="utf-8")
    assert [row[:2] for row in tail.view().clusters] == [("A minority", 1), ("B", 2)]


def test_the_last_count_of_epsilon_is_not_forgotten_with_the_figures_of_its_round(tmp_path: Path) -> None:
    tail = run_some(tmp_path / "run", 1)
    write_lines(tmp_path / "run" / "metrics.jsonl", [{"view": "server", "round": 1, "epsilon_spent_by_client": [2.25] * 21}])
    for at in range(2, 30):
        write_round(tmp_path / "run", at, 40)
    assert {tail.view().epsilon_text for _ in range(2)} == {"2.25 of 5 after round 1"}


def test_an_epsilon_that_lags_behind_says_so() -> None:
    view = ProgressView(round=8, epsilon=5, epsilon_stated=True, epsilon_spent=3.0, epsilon_round=1)
    assert view.epsilon_text == "3 of 5 after round 1"
    view.epsilon_round = 8
    assert view.epsilon_text == "3 of 5"


def test_an_empty_folder_and_half_written_files_are_a_view_too(tmp_path: Path) -> None:
    assert ProgressTail(tmp_path / "absent").view().round == 0
    folder = write_start(tmp_path / "run")
    (folder / "run.json").write_text("{", encoding="utf-8")
    tail = ProgressTail(folder)
    assert tail.view().epsilon_text == ""
    (folder / "run.json").write_text(json.dumps(run_json()), encoding="utf-8")
    os.utime(folder / "run.json", (START, START))
    assert tail.view().epsilon_text == "4.98 of 5"


@pytest.mark.parametrize("width", [60, 120])
@pytest.mark.parametrize("kind", [PlainLines, Screen])
def test_finish_prints_result_and_statement(kind: type[PlainLines] | type[Screen], width: int) -> None:
    console = plain(width)
    kind(console).finish(run_json())
    said = " ".join(text(console).split())
    for words in (
        "71.2 %",
        "69.8 %",
        "65.5 %",
        "recovered",
        "epsilon 5, delta 0.0001, per sample",
        "hyper-parameter search",
        "10.87",
    ):
        assert words in said
    assert all(len(line) <= width for line in text(console).splitlines())


def test_summary_compares_runs_and_warns_of_unequal_privacy() -> None:
    console = plain(60)
    print_summary(run_json(), [run_json(algorithm="global"), run_json(algorithm="local")], console=console)
    assert [line.split()[0] for line in text(console).splitlines() if "%" in line] == ["r-dpcfl", "global", "local"]
    assert "not at the same privacy" not in text(console)
    print_summary(run_json(), [run_json(algorithm="global", privacy=privacy(epsilon=None))], console=console)
    assert "not at the same privacy" in text(console)
    assert "inf" in text(console)


def test_summary_of_a_run_that_failed() -> None:
    console = plain()
    print_summary({"algorithm": "x", "state": "failed", "rounds_done": 3}, console=console)
    assert "the run is failed after 3 rounds" in text(console)
    assert "no privacy statement" in text(console)


def test_a_pause_below_the_quorum_is_shown_until_it_ends(tmp_path: Path) -> None:
    folder, said = tmp_path / "run", "round 4: 3 of 8 clients answered, the quorum is 6: paused, waiting up to 300 s"
    tail = run_some(folder, 3)
    tail.view()
    write_lines(folder / "warnings.jsonl", [{"view": "pause", "time": time.time(), "text": said, "seconds": 300}])
    view = tail.view()
    assert (view.pause, view.warnings[-1]) == (said, said)
    assert "3 of 8 clients answered" in drawn(view, 120)
    write_lines(folder / "warnings.jsonl", [{"view": "pause", "time": time.time(), "text": "the pause ended", "seconds": 0}])
    assert (tail.view().pause, tail.view().warnings[-1]) == ("", "the pause ended")
    write_lines(folder / "warnings.jsonl", [{"view": "pause", "time": time.time(), "text": said, "seconds": 300}])
    assert tail.view().pause == said
    write_round(folder, 4, 40)  # of a resumed run: a crash in the pause left no end
    assert tail.view().pause == ""
    write_lines(folder / "warnings.jsonl", [{"view": "pause", "time": time.time() - 10_000, "text": said, "seconds": 300}])
    assert tail.view().pause == ""
    write_lines(folder / "warnings.jsonl", [{"view": "pause", "time": time.time() - 450, "text": said, "seconds": 300}])
    assert tail.view().pause == said
    write_lines(folder / "warnings.jsonl", [{"view": "launcher", "time": time.time(), "text": "client 3 is lost"}])
    assert (tail.view().pause, tail.view().warnings[-1]) == (said, "client 3 is lost")
    write_lines(folder / "warnings.jsonl", [{"time": time.time(), "text": "in the log of the coordinator"}])
    assert tail.view().warnings[-1] == "client 3 is lost"


def test_one_cluster_is_not_shown_as_the_number_of_its_clients(tmp_path: Path) -> None:
    """The line of a round with one cluster of 21 clients said "clusters 21"."""
    tail = run_some(tmp_path / "run", 2)
    for at, (sizes, said) in enumerate([([21], "1 (21 clients)"), ([1], "1 (1 client)"), ([1, 20], "1/20")], start=3):
        one = {"view": "server", "round": at, "diagnostics": {"sizes": sizes}}
        write_lines(tmp_path / "run" / "clusters.jsonl", [one])
        write_lines(tmp_path / "run" / "metrics.jsonl", [{"view": "server", "round": at, "time": START, "seconds": 1.0}])
        assert tail.view().grouping == said


def test_aborted_secure_sums_are_named(tmp_path: Path) -> None:
    tail = run_some(tmp_path / "run", 2)
    said = {"secure sum": "ok"}, {"secure sum": "3 of 8 clients sent keys, needs 6"}, {"secure sums": "1: no client is there"}
    lines = [{"view": "server", "round": at, "diagnostics": shown} for at, shown in enumerate(said, start=1)]
    write_lines(tmp_path / "run" / "clusters.jsonl", lines)
    assert tail.view().warnings == [
        "round 2: no secure sum, models stay: 3 of 8 clients sent keys, needs 6",
        "round 3: no secure sum, models stay: 1: no client is there",
    ]


def test_late_answers_are_named(tmp_path: Path) -> None:
    tail = run_some(tmp_path / "run", 2)
    write_lines(tmp_path / "run" / "metrics.jsonl", [{"view": "server", "round": 3, "time": START, "missing": [], "late": [5]}])
    assert tail.view().warnings == ["round 3: late answer to an earlier round, set aside, from client 5"]
    lines = [{"view": "launcher", "time": START - at, "text": f"{at} s before"} for at in (2, 1)]
    write_lines(tmp_path / "run" / "warnings.jsonl", [*lines, {"view": "launcher", "time": START + 1, "text": "after"}])
    first, second, *others = ProgressTail(tmp_path / "run").view().warnings  # read together: in the order of their times
    assert (first, second, others[-1]) == ("2 s before", "1 s before", "after")
    assert len(others) == 2


def test_missing_answers_do_not_hide_that_a_client_is_lost(tmp_path: Path) -> None:
    """Each round named the lost client again, until its own warning was one of the earlier ones."""
    folder = write_start(tmp_path / "run")
    write_lines(
        folder / "warnings.jsonl", [{"view": "launcher", "time": START, "text": "client 7: lost for the rest of the run"}]
    )
    for at, missing in enumerate([(7,), (3, 7), (7,), (3, 7), (4, 7), (5, 7)], start=1):
        write_round(folder, at, 40, missing=missing)
    view = ProgressTail(folder).view()
    clients = (7, 3, 3, 4, 5)
    assert view.warnings[1:] == [
        f"round {at}: no answer from client {one}" for at, one in zip((1, 2, 4, 5, 6), clients, strict=True)
    ]
    console = plain()
    with Screen(console) as screen:
        screen.update(view)
        assert "! client 7: lost for the rest of the run" in drawn(view, 100)
        screen.finish(run_json())
    assert text(console).splitlines()[:4] == [
        "! 3 earlier warnings: see the report",
        "! client 7: lost for the rest of the run",
        "! round 5: no answer from client 4",
        "! round 6: no answer from client 5",
    ]


def table_lines(table: Table, console: Console) -> list[str]:
    print_table(table, console)
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text(console)).splitlines()]


def test_columns_that_do_not_fit_into_a_terminal_follow_below_with_those_that_tell_rows_apart() -> None:
    rows = [
        ["global", "5", "21.3 +- 2.8", "14.2 +- 1.2", "5.0 +- 1.6"],
        ["local", "5", "33.1 +- 0.6", "20.0 +- 7.9", "2.9 +- 0.2"],
    ]
    table = Table("", ["algorithm", "epsilon", "mean %", "worst %", "seconds"], rows, "a caption", keys=2)
    assert table_lines(table, terminal(45)) == [
        "",
        "algorithm  epsilon       mean %      worst %",
        "global           5  21.3 +- 2.8  14.2 +- 1.2",
        "local            5  33.1 +- 0.6  20.0 +- 7.9",
        "algorithm  epsilon     seconds",
        "global           5  5.0 +- 1.6",
        "local            5  2.9 +- 0.2",
        "a caption",
    ]
    assert len(table_lines(table, terminal(80))) == 5
    words = Table("", ["client", "cluster", "epsilon"], [["0", "A", "inf"], ["1", "–", "5"], ["2", "B minority", "5"]])
    assert table_lines(words, plain()) == [
        "",
        "client  cluster     epsilon",
        "0       A               inf",
        "1       –                 5",
        "2       B minority        5",
    ], "words are at the left of their column, numbers at the right"
    assert len(table_lines(table, terminal(30))) == 5, "no room beside the columns that tell rows apart: one line for each row"
    assert len(table_lines(table, plain(45))) == 5, "lines of a pipe or a file are whole"


def test_texts_of_other_processes_do_not_steer_the_terminal() -> None:
    """An agent or a client chooses them; a change of direction would show what follows in reverse."""
    for console in (plain(), terminal()):
        lines = PlainLines(console)
        lines.update(ProgressView(warnings=["\x1b[2J\x9b2J \u202eb\u2066c\u2028d é"]))
        lines.print_all()
        assert "warning: ?[2J?2J ?b?c?d é" in text(console)
