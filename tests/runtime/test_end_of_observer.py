"""No client can hold up the end of a run, or fill the observer's memory, by messages to the observer."""

import itertools
import time
from types import SimpleNamespace

import pytest

from dpcfl_net.runtime import observer
from dpcfl_net.runtime.observer import Observer
from dpcfl_net.transport.observer_notes import End, Personal, Span

SPAN, REPORT = Span("client 0", "train", 1, 0.0, 1.0), Personal(0, 2, 0.5, 1.0)


class Inbox:
    """Yields given batches of messages, then the last one for ever."""

    def __init__(self, *batches):
        self.batches, self.until = itertools.chain(batches, itertools.repeat(batches[-1])), time.monotonic() + 60.0

    def poll(self, timeout_s):
        assert time.monotonic() < self.until, "the observer does not end"
        time.sleep(0.01)
        return next(self.batches)


class Ending(Observer):
    """An observer that reads no job: figures are missing until its last report."""

    def __init__(self, *, waits=False, last_round_is_done=False):
        self.taken, self.waits, self.done, self._personal = [], waits, last_round_is_done, None

    def take(self, note):
        self.taken.append(note)
        self.waits = self.waits and note != REPORT

    def _waiting(self):
        return self.waits

    def _last_round_is_done(self):
        return self.done

    def evaluate_last_round(self):
        pass


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    for name, seconds in {"LATE_S": 0.2, "MOST_LATE_S": 0.6, "SILENT_S": 0.3}.items():
        monkeypatch.setattr(observer, name, seconds, raising=False)


@pytest.mark.parametrize(("waits", "seconds"), [(False, 0.2), (True, 0.6)])
def test_a_client_that_reports_for_ever_does_not_hold_up_the_end(waits, seconds):
    started = time.monotonic()
    Ending(waits=waits).listen(Inbox([End(3, "")], [SPAN]))
    assert seconds <= time.monotonic() - started < seconds + 30  # not for ever, which is a minute here


def test_figures_that_come_while_others_report_are_taken(monkeypatch):
    monkeypatch.setattr(observer, "LATE_S", 15.0)  # however long the others take on a busy machine
    monkeypatch.setattr(observer, "MOST_LATE_S", 30.0)
    ending = Ending(waits=True)
    ending.listen(Inbox([End(3, "")], *[[SPAN]] * 30, [REPORT], []))
    assert REPORT in ending.taken


def test_figures_that_a_pause_of_the_run_held_up_are_taken(monkeypatch):
    """After Ctrl-Z and fg the observer may look before its clients have sent anything: the last figures were those of an earlier round."""
    monkeypatch.setattr(observer, "LATE_S", 15.0)
    running, paused = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: running() + sum(paused))

    def pause():
        yield [End(3, "")]
        paused.append(60.0)
        yield []
        yield [REPORT]
        while True:
            yield []

    ending, inbox = Ending(waits=True), Inbox([])
    inbox.batches, inbox.until = pause(), running() + 90
    ending.listen(inbox)
    assert REPORT in ending.taken


def test_a_lost_end_is_noticed_while_a_client_reports():
    started = time.monotonic()
    Ending(last_round_is_done=True).listen(Inbox([SPAN]))
    assert time.monotonic() - started < 30


def test_a_coordinator_that_is_silent_within_a_long_round_has_not_ended():
    until = time.monotonic() + 0.6  # twice as long as the silence that would count as the end after the last round

    def long_round():
        while time.monotonic() < until:
            yield []
        yield [REPORT]
        yield [End(3, "")]
        while True:
            yield []

    ending, inbox = Ending(), Inbox([])
    inbox.batches = long_round()
    ending.listen(inbox)
    assert REPORT in ending.taken


def test_figures_of_rounds_that_the_job_does_not_have_are_dropped():
    kept = []
    watching = Observer.__new__(Observer)
    watching.job, watching._written = SimpleNamespace(protocol=SimpleNamespace(rounds=3)), {2}
    watching._personal = SimpleNamespace(take=lambda note: kept.append(note.round) or [])
    for t in (0, 1, 2, 3, 4, 10**6):
        watching.take(Personal(0, t, 0.5, 1.0))
    assert kept == [1, 3]
