"""Runs on the same records: composed jointly, record by record, under one budget that is a pair, whatever slice each run takes."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import shutil
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from conftest import SMALL, dpcfl, write_config
from folder_names import after_each_kill

from dpcfl_net.algorithms.base import algorithm_of
from dpcfl_net.core.atomic import DRAFT
from dpcfl_net.core.errors import ConfigError, LedgerError, Refused
from dpcfl_net.core.signed_settings import LocalTraining
from dpcfl_net.core.types import Policy, Task
from dpcfl_net.data import cache
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.experiment.statement import privacy_statement
from dpcfl_net.federation.claim import composer
from dpcfl_net.launch.new_run import write_config as write_resolved
from dpcfl_net.privacy.accounting.accountant import deltas, epsilon
from dpcfl_net.privacy.accounting.adaptive import filtered_epsilon, order_for
from dpcfl_net.privacy.accounting.document import account
from dpcfl_net.privacy.events.allocated_gaussian import AllocatedGaussian
from dpcfl_net.privacy.events.bounded_range_selection import BoundedRangeSelection
from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian
from dpcfl_net.privacy.ledger import record_book
from dpcfl_net.privacy.ledger.book_claims import Budget, PrivacyBudgetClaim, read_claim
from dpcfl_net.privacy.ledger.record_book import ADAPTIVE_SHARE, BOOK, RecordBook, repeated
from dpcfl_net.results.summary import NOT_IN_BOOK, PARTLY_IN_BOOK, promised_over_runs
from dpcfl_net.runtime import client_hosts
from dpcfl_net.runtime.client_hosts import make_host
from dpcfl_net.runtime.one_process import Hosts
from dpcfl_net.runtime.specs import WorkerTerms
from dpcfl_net.transport.keys import make_keys

GAUSSIAN = SampledGaussian(4.0, 1.0, 1)
RECORDS = np.arange(100, dtype=np.uint64)
DELTA = 1e-5


def claim(job, events=(GAUSSIAN,), **changes):
    return PrivacyBudgetClaim(
        **{"job": job, "client": 0, "unit": "sample", "adjacency": "zero-out", "events": tuple(events), **changes}
    )


def exactly(events, delta, adjacency, order=None):
    return epsilon(events, delta, adjacency) if order is None else filtered_epsilon(events, delta, order, adjacency)


def enrol(book, job, records=RECORDS, budget=None, **changes):
    book.enrol(claim(job, **changes), records, budget, exactly)


@pytest.fixture
def book(tmp_path):
    return RecordBook(tmp_path / "book", durable=False)


def code_of(call):
    with pytest.raises((Refused, LedgerError)) as error:
        call()
    return error.value.code


def test_equal_runs_cost_their_square_root_and_not_their_number(book):
    one = epsilon([GAUSSIAN], DELTA)
    for k in range(16):
        enrol(book, f"job {k}")
    together, runs = book.spent("job 15", 0, DELTA, exactly)
    assert (together, runs) == (epsilon([SampledGaussian(4.0, 1.0, 16)], DELTA), 16)
    assert 4 * one < together < 5 * one  # sqrt(16), and a little for what is not linear


def test_a_budget_is_a_pair(book):
    """Two runs at (1, .4) fit (2.5, .4) only if they do together at .4, not because 1 + 1 is below 2.5."""
    weak = SampledGaussian(0.5, 1.0, 1)
    assert epsilon([weak], 0.4) < 2.1
    budget = Budget(2 * epsilon([weak], 0.4), 0.4)
    together = epsilon([SampledGaussian(0.5, 1.0, 2)], 0.4)
    assert together > budget.epsilon
    enrol(book, "a", events=[weak], budget=budget)
    assert code_of(lambda: enrol(book, "b", events=[weak], budget=budget)) == "budget"
    enough = Budget(epsilon([SampledGaussian(0.5, 1.0, 2)], 0.4 * (1 - ADAPTIVE_SHARE)), 0.4)
    other = RecordBook(book.folder.with_name("other"), durable=False)
    enrol(other, "a", events=[weak], budget=enough)
    enrol(other, "b", events=[weak], budget=enough)
    assert [[p.job for p in each.claims()] for each in (book, other)] == [["a"], ["a", "b"]]


FIRST = SampledGaussian(1 / 0.55, 1.0, 1)
# Each of them, after the first, meets epsilon 3 at delta 1e-4.
SECOND = (SampledGaussian(1.653245, 1.0, 1), SampledGaussian(0.3811067, 0.002, 5))


def test_a_single_run_may_use_all_of_delta_and_several_equal_ones_a_part(book):
    alone, twice = (Budget(epsilon([SampledGaussian(0.5, 1.0, runs)], 0.4), 0.4) for runs in (1, 2))
    weak = SampledGaussian(0.5, 1.0, 1)
    enrol(book, "a", events=[weak], budget=alone)
    other = RecordBook(book.folder.with_name("other"), durable=False)
    enrol(other, "a", events=[weak], budget=twice)
    assert code_of(lambda: enrol(other, "b", events=[weak], budget=twice)) == "budget"


def test_an_epsilon_just_above_the_budget_is_refused(book):
    def compose(excess):
        return lambda events, delta, adjacency, order=None: 2.0 + excess

    for excess in (1e-7, math.nan):
        assert code_of(lambda excess=excess: book.enrol(claim("a"), RECORDS, Budget(2.0, DELTA), compose(excess))) == "budget"
    book.enrol(claim("a"), RECORDS, Budget(2.0, DELTA), compose(0.0))


def test_a_claim_is_entered_again_only_with_its_ledger(book):
    enrol(book, "a")
    enrol(book, "a")
    assert code_of(lambda: book.enrol(claim("a"), RECORDS, None, exactly, again=False)) == "book"
    assert code_of(lambda: book.refuse_entered("a", 0)) == "book"
    book.refuse_entered("a", 1)  # another client of the job, and another job
    book.refuse_entered("b", 0)


def test_a_claim_that_is_entered_at_the_same_time_counts(book):
    """Without the lock both jobs would find the book empty, and each would be the only one under its budget."""
    budget, codes = Budget(1.01 * epsilon([GAUSSIAN], DELTA), DELTA), []

    def enter_b():
        try:
            enrol(book, "b", budget=budget)
        except Refused as refusal:
            codes.append(refusal.code)

    other = threading.Thread(target=enter_b)

    def compose(*question):
        other.start()
        other.join(0.5)
        return exactly(*question)

    book.enrol(claim("a"), RECORDS, budget, compose)
    other.join()
    assert (codes, [each.job for each in book.claims()]) == (["budget"], ["a"])


def test_the_budget_of_a_record_is_fixed_by_its_first_run(book):
    """The order of the filter, and the number of equal runs, follow from the budget: it may not depend on earlier releases."""
    first, larger = Budget(2.0, DELTA), Budget(20.0, DELTA)
    enrol(book, "a", budget=first)
    for later in (larger, Budget(1.5, DELTA), Budget(2.0, DELTA / 10)):
        assert code_of(lambda later=later: enrol(book, "b", budget=later)) == "budget"
        assert code_of(lambda later=later: enrol(book, "a", budget=later)) == "budget"  # the same job again
    assert (
        code_of(lambda: enrol(book, "a", client=1, budget=larger)) == "budget"
    )  # another client of the job with these records
    enrol(book, "c", records=RECORDS + np.uint64(1000), budget=larger)  # other records
    enrol(book, "b", budget=first)
    assert book.spent("b", 0, DELTA, exactly, first)[0] <= first.epsilon
    enrol(book, "d")  # without a budget nothing is refused, and nothing is promised under the budget any more
    assert book.spent("b", 0, DELTA, exactly, first) == (math.inf, 3)
    assert math.isfinite(book.spent("d", 0, DELTA, exactly)[0])
    assert code_of(lambda: enrol(book, "e", budget=first)) == "budget"


@pytest.mark.slow
def test_a_second_plan_chosen_by_the_first_release_exceeds_what_both_pairs_promise():
    """Why plans that differ are not composed jointly: after each loss of the first run the worse second one is taken."""
    assert all(epsilon([FIRST, second], 1e-4) <= 3 for second in SECOND)
    loss = np.linspace(-4.3, 4.6, 801)
    chance = np.exp(-(((loss - 0.15125) / 0.55) ** 2) / 2) / (0.55 * math.sqrt(2 * math.pi)) * (loss[1] - loss[0])
    left = 3 - loss
    after = []
    for second in SECOND:
        above = np.array(deltas([second], np.abs(left).tolist()))
        after.append(np.where(left >= 0, above, 1 - np.exp(left) + np.exp(left) * above))
    assert [float(chance @ each) <= 1.01e-4 for each in after] == [True, True]
    assert float(chance @ np.maximum(*after)) > 1.7e-4


def test_plans_that_differ_are_held_by_a_filter_and_equal_ones_jointly(tmp_path):
    for number, second in enumerate(SECOND):
        book = RecordBook(tmp_path / str(number), durable=False)
        enrol(book, "a", events=[FIRST], budget=Budget(3, 1e-4))
        with pytest.raises(Refused, match="by the bound for plans that differ; the budget is 3"):
            enrol(book, "b", events=[second], budget=Budget(3, 1e-4))
        enrol(book, "c", events=[SampledGaussian(8.0, 1.0, 1)], budget=Budget(3, 1e-4))
        with pytest.raises(
            Refused, match=r"3 runs with different plans .* AllocatedGaussian has none under zero-out"
        ) as refused:
            enrol(book, "d", events=[AllocatedGaussian(9.0, 10, 1)], budget=Budget(3, 1e-4))
        assert refused.value.code == "budget"
        spent, runs = book.spent("c", 0, 1e-4, exactly, Budget(3, 1e-4))
        assert runs == 2
        plans, delta = [FIRST, SampledGaussian(8.0, 1.0, 1)], 1e-4 * ADAPTIVE_SHARE  # equal plans have the rest of delta
        assert spent == filtered_epsilon(plans, delta, order_for(3, delta)) <= 3
        assert epsilon(plans, 1e-4) < spent


def test_the_filter_adds_up_at_one_order_that_the_budget_fixes():
    order = order_for(3, 1e-5)
    none, one, two, both = (filtered_epsilon(events, 1e-5, order) for events in ([], [FIRST], [SECOND[0]], [FIRST, SECOND[0]]))
    assert both == pytest.approx(one + two - none)
    assert one == pytest.approx(order * 0.55**2 / 2 + none)
    assert epsilon([FIRST], 1e-5) < one < 1.2 * epsilon([FIRST], 1e-5)
    with pytest.raises(ValueError, match="AllocatedGaussian"):
        filtered_epsilon([AllocatedGaussian(1.0, 10, 1)], 1e-5, order)
    asked = {"events": [FIRST.as_json()], "delta": 1e-5, "accountant": "rdp", "order": order}
    assert account(asked)["epsilon"] == pytest.approx(one)
    with pytest.raises(ConfigError, match="order: needs accountant rdp, got 'pld'"):
        account({**asked, "accountant": "pld"})
    with pytest.raises(ConfigError, match="order must be above 1"):
        account({**asked, "order": 1})


def test_the_accountant_of_a_worker_is_tight_for_equal_plans_and_of_one_order_for_others(tmp_path):
    compose, order = composer(tmp_path / "cache"), order_for(3, 1e-5)
    for events in ([FIRST], [FIRST, SECOND[0]]):
        assert compose(events, 1e-5, "zero-out") == pytest.approx(epsilon(events, 1e-5), rel=1e-5)
        assert compose(events, 1e-5, "zero-out", order) == pytest.approx(filtered_epsilon(events, 1e-5, order), rel=1e-5)


def test_what_shares_one_record_is_composed_whatever_else_differs(book):
    tight = Budget(epsilon([GAUSSIAN], DELTA) * 1.01, DELTA)
    enrol(book, "first", records=RECORDS, budget=tight)
    assert code_of(lambda: enrol(book, "other seed", records=RECORDS[99:], budget=tight)) == "budget"
    assert code_of(lambda: enrol(book, "validation", records=RECORDS[:98], budget=tight)) == "budget"
    assert code_of(lambda: enrol(book, "other client", records=RECORDS[::-1], budget=tight, client=5)) == "budget"
    enrol(book, "others", records=RECORDS + np.uint64(1000), budget=tight)


def test_the_costliest_record_decides(book):
    """One record in all three runs, the others in two: the budget is held by the one."""
    enrol(book, "a", records=RECORDS[:50])
    enrol(book, "b", records=RECORDS[49:])
    enrol(book, "c", records=RECORDS)
    assert book.spent("c", 0, DELTA, exactly) == (epsilon([SampledGaussian(4.0, 1.0, 3)], DELTA), 3)
    assert book.spent("a", 0, DELTA, exactly)[1] == 3
    enrol(book, "d", records=RECORDS[:49])
    assert book.spent("d", 0, DELTA, exactly)[1] == 3


@pytest.mark.parametrize(("kinds", "each", "accounted"), [(5, 2, True), (6, 3, False)])
def test_many_histories_are_bounded_from_above(book, kinds, each, accounted):
    """More ways through the runs than are accounted one by one, 20 here: what is taken is as costly as all runs together."""
    events = [SampledGaussian(3.0 + k, 1.0, 1) for k in range(kinds)]
    ways = list(itertools.combinations(range(kinds), each))
    for k, event in enumerate(events):
        enrol(book, f"job {k}", records=RECORDS[[n for n, way in enumerate(ways) if k in way]], events=[event])
    enrol(book, "last", records=RECORDS[: len(ways)])
    true = max(epsilon([GAUSSIAN, *(events[k] for k in way)], DELTA) for way in ways)
    bound = epsilon([GAUSSIAN, *events], DELTA)
    assert true < bound
    assert book.spent("last", 0, DELTA, exactly)[0] == pytest.approx(true if accounted else bound, rel=1e-9)


def test_a_whole_client_is_in_every_run_that_one_of_its_records_was_in(book):
    for job, records in (("a", RECORDS[:50]), ("b", RECORDS[50:])):
        enrol(book, job, records=records, unit="client")
    enrol(book, "c", unit="client")
    assert book.spent("c", 0, DELTA, exactly)[1] == 3


@pytest.mark.parametrize("halves_first", [True, False])
def test_a_whole_client_that_is_two_clients_of_another_run_is_refused(book, halves_first):
    """Without its records the sum of the other run lacks the updates of two clients: twice the clip norm, and not once."""
    together = epsilon([GAUSSIAN, SampledGaussian(GAUSSIAN.noise_multiplier / 2, 1.0, 1)], DELTA)
    assert together > 1.5 * epsilon([GAUSSIAN, GAUSSIAN], DELTA)  # what the book would promise
    halves = [{"job": "halves", "records": RECORDS[:50]}, {"job": "halves", "records": RECORDS[50:], "client": 1}]
    whole = {"job": "whole", "records": RECORDS}
    *entered, last = [*halves, whole] if halves_first else [whole, *halves]
    for one in entered:
        enrol(book, unit="client", **one)
    assert code_of(lambda: enrol(book, unit="client", **last)) == "unit"
    assert len(book.claims()) == 2


def test_a_budget_holds_for_a_whole_client_whose_parts_are_clients_of_later_runs(book):
    """Each later run is on other records of it, and the two have no record in common."""
    two, three = (epsilon([GAUSSIAN] * runs, (1 - ADAPTIVE_SHARE) * DELTA) for runs in (2, 3))
    budget = Budget((two + three) / 2, DELTA)
    enrol(book, "whole", unit="client", budget=budget)
    enrol(book, "second half", records=RECORDS[50:], unit="client", budget=budget)
    assert code_of(lambda: enrol(book, "first half", records=RECORDS[:50], unit="client", budget=budget)) == "budget"
    assert book.spent("whole", 0, DELTA, exactly, budget) == (two, 2)


def test_whole_clients_of_one_partition_are_composed_also_if_some_hold_copies(book):
    for job in ("one", "two"):
        for client, (first, end) in enumerate([(0, 50), (50, 100), (0, 50), (40, 90)]):
            enrol(book, job, records=RECORDS[first:end], unit="client", client=client)
    enrol(book, "fewer records", records=RECORDS[:30], unit="client")
    assert [book.spent("two", client, DELTA, exactly)[1] for client in range(4)] == [3, 2, 3, 2]


def test_a_book_that_holds_a_divided_client_promises_it_nothing(book, monkeypatch):
    """As one of an earlier version, which composed such runs."""
    with monkeypatch.context() as earlier:
        earlier.setattr(RecordBook, "_wholes", lambda *claim: [])
        enrol(book, "halves", records=RECORDS[:50], unit="client")
        enrol(book, "halves", records=RECORDS[50:], unit="client", client=1)
        enrol(book, "whole", unit="client")
    assert book.spent("whole", 0, DELTA, exactly) == (math.inf, 2)
    assert book.spent("halves", 0, DELTA, exactly) == (epsilon([GAUSSIAN, GAUSSIAN], DELTA), 2)


def test_several_clients_of_one_job_that_hold_a_record_count_once(book):
    for client in range(4):
        enrol(book, "rotations", client=client)
    assert book.spent("rotations", 2, DELTA, exactly) == (epsilon([GAUSSIAN], DELTA), 1)


def test_a_job_counts_for_the_records_of_all_of_its_clients(book):
    for client, records in ((0, RECORDS[:50]), (1, RECORDS[50:])):
        enrol(book, "a", records=records, client=client)
    enrol(book, "b", records=RECORDS[:50])
    enrol(book, "c")
    assert book.spent("c", 0, DELTA, exactly)[1] == 3


@pytest.mark.parametrize("change", [{"unit": "client"}, {"adjacency": "replace-one"}])
def test_other_units_and_adjacencies_are_refused(book, change):
    enrol(book, "a")
    assert code_of(lambda: enrol(book, "b", **change)) == "unit"
    enrol(book, "c", records=RECORDS + np.uint64(1000), **change)


def test_a_budget_holds_under_the_adjacency_of_the_claim(book):
    """To replace a record costs a Gaussian twice the sensitivity of leaving it out."""
    zero_out, replaced = (epsilon([GAUSSIAN], DELTA, adjacency=each) for each in ("zero-out", "replace-one"))
    budget = Budget((zero_out + replaced) / 2, DELTA)
    assert code_of(lambda: enrol(book, "a", budget=budget, adjacency="replace-one")) == "budget"
    enrol(book, "a", budget=budget)


def test_the_same_again_changes_nothing_and_something_else_is_refused(book):
    enrol(book, "a")
    content = (book.folder / BOOK).read_bytes()
    enrol(book, "a", records=RECORDS[::-1])
    assert (book.folder / BOOK).read_bytes() == content
    assert code_of(lambda: enrol(book, "a", events=[SampledGaussian(8.0, 1.0, 1)])) == "claim"
    assert code_of(lambda: enrol(book, "a", records=RECORDS[1:])) == "claim"
    assert code_of(lambda: enrol(book, "a", budget=Budget(1e-3, DELTA))) == "budget"


def edit_line(book, number):
    """Put a cheaper event into one line."""
    lines = book.read_bytes().splitlines(keepends=True)
    lines[number] = lines[number].replace(b"4.0", b"9.0")
    book.write_bytes(b"".join(lines))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda folder: (folder / BOOK).write_bytes((folder / BOOK).read_bytes()[:-9]), "book-broken"),
        (lambda folder: edit_line(folder / BOOK, 0), "book-broken"),
        (lambda folder: edit_line(folder / BOOK, 1), "book-broken"),
        (lambda folder: (folder / BOOK).write_bytes((folder / BOOK).read_bytes().splitlines(True)[0]), "book-rolled-back"),
        (lambda folder: (folder / BOOK).unlink(), "book-rolled-back"),
        (lambda folder: (folder / "counter").unlink(), "book-broken"),
        (lambda folder: [path.write_bytes(b"\0" * 8) for path in (folder / "records").iterdir()], "book-broken"),
        (lambda folder: [path.unlink() for path in (folder / "records").iterdir()], "book-broken"),
    ],
)
def test_an_edited_book_is_refused(book, change, code):
    enrol(book, "a")
    enrol(book, "b")
    change(book.folder)
    assert code_of(lambda: enrol(book, "c")) == code


def test_a_crash_at_any_write_leaves_a_book_that_goes_on(tmp_path, monkeypatch):
    """Killed before the k-th change of a file: the claim is in the book or it is not, and is entered once in the end."""
    real, k = os.replace, 0
    while True:
        folder = tmp_path / str(k)
        enrol(RecordBook(folder), "a")
        left = [k]

        def dying(source, target, left=left):
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            real(source, target)

        monkeypatch.setattr(os, "replace", dying)
        try:
            enrol(RecordBook(folder), "b", records=RECORDS[:40])
            done = True
        except KeyboardInterrupt:
            done = False
        monkeypatch.setattr(os, "replace", real)
        enrol(RecordBook(folder), "b", records=RECORDS[:40])
        assert [p.job for p in RecordBook(folder).claims()] == ["a", "b"]
        if done:
            break
        k += 1
    assert k == 3


def test_two_crashes_before_the_counter_leave_a_book_that_goes_on(tmp_path, monkeypatch):
    """The first two claims of a book, each cut after its line: the restart in between brings the counter up to the line."""
    real = os.replace

    def dying(source, target):
        if Path(target).name == "counter":
            raise KeyboardInterrupt
        real(source, target)

    for job in ("a", "b"):
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", dying)
            with pytest.raises(KeyboardInterrupt):
                enrol(RecordBook(tmp_path / "book"), job)
        enrol(RecordBook(tmp_path / "book"), job)
    assert [p.job for p in RecordBook(tmp_path / "book").claims()] == ["a", "b"]
    (tmp_path / "book" / BOOK).unlink()
    assert code_of(lambda: enrol(RecordBook(tmp_path / "book"), "a")) == "book-rolled-back"


def test_a_line_that_a_killed_process_left_is_durable_before_it_is_counted(tmp_path, monkeypatch):
    """A power failure that kept the new counter and lost the name of the new book left one that was refused as rolled back."""
    book, real, fsync, trail = RecordBook(tmp_path / "book"), os.replace, os.fsync, []

    def dying(source, target):
        real(source, target)
        if Path(target).name == BOOK:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dying)
        with pytest.raises(KeyboardInterrupt):
            enrol(book, "a")
    monkeypatch.setattr(os, "replace", lambda source, target: (trail.append(Path(target).name), real(source, target)))
    monkeypatch.setattr(os, "fsync", lambda fd: (trail.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    enrol(book, "a")
    assert str(book.folder) in trail[: trail.index("counter")]
    assert [p.job for p in book.claims()] == ["a"]


def test_drafts_that_a_killed_process_left_are_removed(book):
    enrol(book, "a")
    whole = {path for path in book.folder.rglob("*") if path.is_file()}
    for folder in (book.folder, book.folder / "records"):
        (folder / f".x.7{DRAFT}").write_bytes(b"half a file")
    enrol(book, "b")
    assert {path for path in book.folder.rglob("*") if path.is_file()} == whole


def test_folders_of_a_new_book_are_flushed_into_the_folders_above(tmp_path, monkeypatch):
    """A folder whose name is lost in a crash of the machine takes all claims along."""
    folder = tmp_path / "home" / "books"
    flushed, real = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (flushed.add(Path(os.readlink(f"/proc/self/fd/{fd}"))), real(fd)))
    enrol(RecordBook(folder), "a")
    assert {tmp_path, tmp_path / "home", folder, folder / "records"} <= flushed
    flushed.clear()
    enrol(RecordBook(folder), "b")  # an earlier process may have been killed before it flushed the name of the same records
    assert folder / "records" in flushed


def test_folders_that_a_killed_process_created_without_a_flush_are_flushed_before_a_claim_is_entered(tmp_path, monkeypatch):
    """A power failure that kept the line of the first claim and lost the folder of its records left a book that was refused as edited."""
    real = os.replace

    def use(folder, unflushed):
        def replace(draft, path):
            assert unflushed == set() or path.name != BOOK
            real(draft, path)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace)
            enrol(RecordBook(folder), "a")

    after_each_kill(tmp_path, monkeypatch, use)


def test_plans_run_several_times_are_merged():
    plan = (SampledGaussian(2.0, 0.1, 5), SampledGaussian(2.0, 0.1, 7), BoundedRangeSelection(0.2, 3))
    assert set(repeated([(plan, 2), ((GAUSSIAN,), 3), (plan, 0)])) == {
        SampledGaussian(2.0, 0.1, 24), BoundedRangeSelection(0.2, 6), SampledGaussian(4.0, 1.0, 3)
    }  # fmt: skip


# ---- runs


SLICE = {"dataset": "digits", "clients": [2], "shift": "none", "train_per_client": 287, "test_per_client": 20}
PRIVACY = {"epsilon": 1, "delta": 1e-4}


def run(tmp_path, name, *overrides, **changes):
    settings = {
        "data": SLICE, "rounds": 2, "algorithm": {"name": "global"}, "model": {"name": "linear"}, "privacy": PRIVACY,
        "runtime": {"federation": "in-process"}, "output": {"transcript": "off"},
        "ledger": {"scope": "dataset", "root": str(tmp_path / "book"), "budget": {"epsilon": 1.6, "delta": 1e-4}},
        **changes,
    }  # fmt: skip
    path = write_config(tmp_path / f"c-{name}", name=name, **settings)
    done = dpcfl("run", path, "--out", tmp_path / "runs", *overrides)
    folder = next((p for p in (tmp_path / "runs").iterdir() if p.name.startswith(f"{name}-")), None)
    return done, folder


@pytest.fixture(scope="module")
def spent_book(tmp_path_factory):
    """Where two runs share a book and have used its budget up."""
    tmp_path = tmp_path_factory.mktemp("spent")
    first, folder = run(tmp_path, "one")
    assert first.returncode == 0, first.stderr
    second, folder = run(tmp_path, "two")
    assert second.returncode == 0, second.stderr
    privacy = json.loads((folder / "run.json").read_text())["privacy"]
    (said,) = [line for line in privacy["covered"] if line.startswith("all runs on the same records")]
    together = float(said.split("epsilon ")[1].split()[0])
    assert 1.3 < together < 1.6
    assert said.startswith("all runs on the same records in this record book: 2 promise a record")
    assert said.endswith("at delta 0.0001 together, at most")
    assert dpcfl("verify", folder).returncode == 0
    return tmp_path


@pytest.mark.parametrize(
    ("name", "change"),
    [
        pytest.param("same", {}, marks=pytest.mark.slow),
        pytest.param("seed", {"seed": 7}, marks=pytest.mark.slow),
        pytest.param("validation", {"data": {**SLICE, "validation": 0.02}, "seed": 9}, marks=pytest.mark.slow),
        pytest.param("fewer", {"data": {**SLICE, "train_per_client": 281}}, marks=pytest.mark.slow),
        pytest.param("turned", {"data": {**SLICE, "clients": [1, 1], "shift": "rotation"}}, marks=pytest.mark.slow),
    ],
)
def test_a_third_run_on_the_same_records_is_refused(spent_book, name, change):
    """Neither another seed nor another validation share nor another slice opens a new budget."""
    refused, _ = run(spent_book, name, **change)
    assert refused.returncode == 3, (name, refused.stdout, refused.stderr)
    assert "3 runs together would promise a record" in refused.stderr, (name, refused.stderr)
    assert "the budget is 1.6" in refused.stderr


@pytest.mark.slow
def test_a_trusted_servers_clients_have_a_book_too(tmp_path):
    changes = {
        "data": {**SLICE, "clients": [8], "train_per_client": 20}, "rounds": 3,
        "privacy": {"epsilon": 2, "delta": 1e-3, "unit": "client", "trust": "trusted-server", "adjacency": "replace-one"},
        "algorithm": {"name": "dp-fedavg", "sampling_rate": 0.5},
        "ledger": {"scope": "dataset", "root": str(tmp_path / "book"), "budget": {"epsilon": 2.5, "delta": 1e-3}},
    }  # fmt: skip
    first, folder = run(tmp_path, "one", **changes)
    assert first.returncode == 0, first.stderr
    assert "promise a client epsilon 2" in " ".join(json.loads((folder / "run.json").read_text())["privacy"]["covered"])
    second, _ = run(tmp_path, "two", seed=3, **changes)
    assert (second.returncode, "2 runs together would promise a client" in second.stderr) == (3, True), second.stderr
    other, _ = run(
        tmp_path,
        "other",
        **{**changes, "privacy": {"epsilon": 1, "delta": 1e-3}, "algorithm": {"name": "global"}},
        local={"batch_size": 10},
    )
    assert (other.returncode, "the two cannot be composed; use another book" in other.stderr) == (3, True), other.stderr


def test_one_record_decides_whether_a_run_is_refused_and_the_statement_says_so(book, tmp_path):
    budget = Budget(1.2 * exactly([GAUSSIAN], DELTA, "zero-out"), DELTA)
    enrol(book, "one", RECORDS[:1], budget)
    fresh = np.arange(1_000, 1_100, dtype=np.uint64)
    known = np.append(fresh[1:], RECORDS[:1])
    enrol(book, "two", fresh, budget)
    assert code_of(lambda: enrol(RecordBook(book.folder, durable=False), "two", known, budget, client=1)) == "budget"
    make_keys(tmp_path / "keys", 2)
    document = {**SMALL, "data": SLICE, "algorithm": {"name": "global"}, "privacy": PRIVACY}
    named = []
    for ledger in ({}, {"ledger": {"scope": "dataset", "root": "x"}}):
        job = make_job(config.resolve({**document, **ledger}), tmp_path / "keys")
        lines = privacy_statement(job.protocol, None)["not_covered"]
        named.append(sum(line.startswith("which records runs have in common") for line in lines))
    assert named == [0, 1]


def test_a_budget_of_epsilon_alone_is_refused():
    with pytest.raises(ConfigError, match=r"ledger\.budget"):
        config.resolve({**SMALL, "privacy": PRIVACY, "ledger": {"scope": "dataset", "root": "x", "budget": 2.5}})


def test_a_worker_without_a_book_refuses_a_job_that_composes_runs(tmp_path):
    make_keys(tmp_path / "keys", 2)
    document = {**SMALL, "data": SLICE, "algorithm": {"name": "global"}, "privacy": PRIVACY}
    job = make_job(config.resolve({**document, "ledger": {"scope": "dataset", "root": "x"}}), tmp_path / "keys")
    assert code_of(lambda: make_host(job, 0, tmp_path / "ledgers")) == "book"
    make_host(job, 0, tmp_path / "ledgers", terms=WorkerTerms(book=tmp_path / "book")).close()
    (own,) = RecordBook(tmp_path / "book").claims()
    spent, runs = RecordBook(tmp_path / "book").spent(own.job, 0, 1e-4, composer(cache.folder() / "claims"))
    assert (runs, round(spent, 2)) == (1, 1.0)
    assert not math.isnan(spent)
    assert WorkerTerms().policy == Policy()


def read_files(monkeypatch):
    """Numbers of the lines of the book that are parsed, and names of the sets of record digests that are read."""
    lines, sets, read_bytes = [], [], Path.read_bytes

    def counted(path):
        if path.suffix == ".u8":
            sets.append(path.stem)
        return read_bytes(path)

    def parsed(fields):
        lines.append(fields["sequence"])
        return read_claim(fields)

    monkeypatch.setattr(record_book, "read_claim", parsed)
    monkeypatch.setattr(Path, "read_bytes", counted)
    return lines, sets


@pytest.mark.parametrize("unit", ["sample", "client"])
def test_an_entry_verifies_what_is_new_and_what_shares_a_record_also_beside_another_process(book, unit, monkeypatch):
    """All of it again for each of 400 clients took half a minute."""
    lines, sets = read_files(monkeypatch)

    def entered(to, job, client):
        enrol(to, job, records=RECORDS + np.uint64(1000 * client), client=client, unit=unit, budget=Budget(9, 1e-4))
        return to.claims()[-1].records

    for job, client in itertools.product("ab", range(5)):
        entered(book, job, client)
    assert lines == [*range(10)]
    entered(RecordBook(book.folder, durable=False), "c", 0)
    lines.clear()
    sets.clear()
    own = entered(book, "c", 1)
    assert (lines, set(sets)) == ([10, 11], {own})
    assert [(one.job, one.client) for one in book.claims()][-2:] == [("c", 0), ("c", 1)]
    assert book.spent("c", 1, DELTA, exactly)[1] == 3


@pytest.fixture
def composed_job(tmp_path):
    """A job whose clients are entered in a book."""
    make_keys(tmp_path / "keys", 2)
    document = {**SMALL, "data": SLICE, "algorithm": {"name": "global"}, "model": {"name": "linear"}, "privacy": PRIVACY}
    return make_job(config.resolve({**document, "ledger": {"scope": "dataset", "root": "x"}}), tmp_path / "keys")


def test_the_statement_promises_over_all_runs_only_what_the_book_holds(composed_job, tmp_path, monkeypatch):
    """Also if it is written in another folder than that of the run, to which `ledger.root` was relative."""
    document = {**SMALL, "data": SLICE, "algorithm": {"name": "global"}, "privacy": PRIVACY}
    monkeypatch.chdir(tmp_path)
    write_resolved(tmp_path / "run", config.resolve({**document, "ledger": {"scope": "dataset", "root": "book"}}))
    monkeypatch.chdir("/")
    assert promised_over_runs(tmp_path / "run", composed_job) == ([], [NOT_IN_BOOK])
    assert not (tmp_path / "book").exists()
    for client, whose, rest in ((0, "records of 1 of 2 clients", [PARTLY_IN_BOOK]), (1, "same records", [])):
        terms = WorkerTerms(book=tmp_path / "book", budget=(1.0, 1e-4))
        make_host(composed_job, client, tmp_path / "ledgers", terms=terms).close()
        (said,), others = promised_over_runs(tmp_path / "run", composed_job)
        assert said.startswith(f"all runs on the {whose} in this record book: 1 promise a record epsilon")
        assert others == rest


def test_the_clients_of_one_process_read_the_book_once(composed_job, tmp_path, monkeypatch):
    lines, _ = read_files(monkeypatch)
    terms = WorkerTerms(book=tmp_path / "book", budget=(1.0, 1e-4))
    for read in ([0], [0, 1]):  # the last line of the first start has no reader
        with closing(Hosts(composed_job, tmp_path / "ledgers", terms=terms)):
            assert lines == read
        lines.clear()


def answer(job, tmp_path, ledgers):
    """The answer of client 0 to the first task of its job, with ledgers in this folder."""
    task = Task(1, "train", {"model": np.zeros(job.protocol.model.parameters, np.float32)})
    with closing(make_host(job, 0, tmp_path / ledgers, terms=WorkerTerms(book=tmp_path / "book", budget=(1.0, 1e-4)))) as host:
        return host.answer(task)


def crash_before_the_book(job, tmp_path, monkeypatch, ledgers):
    """Kill a worker before its client is entered in the book."""
    with monkeypatch.context() as crashed:
        crashed.setattr(client_hosts, "enrol", lambda *args, **more: os._exit(7))
        child = os.fork()
        if not child:
            try:
                answer(job, tmp_path, ledgers)
            finally:
                os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_client_that_is_in_the_book_spends_its_plan_once_wherever_its_ledger_is_looked_for(composed_job, tmp_path):
    """With an empty ledger it would answer each round again, with other noise, and the book would count one run."""
    first = answer(composed_job, tmp_path, "ledgers")
    for _ in range(2):  # the first attempt left no ledger
        assert code_of(lambda: answer(composed_job, tmp_path, "elsewhere")) == "book"
    assert not (tmp_path / "elsewhere").exists()
    assert answer(composed_job, tmp_path, "ledgers").release == first.release
    shutil.rmtree(tmp_path / "ledgers")
    assert code_of(lambda: answer(composed_job, tmp_path, "ledgers")) == "book"


def test_a_crash_before_a_client_is_in_the_book_leaves_one_that_starts(composed_job, tmp_path, monkeypatch):
    assert crash_before_the_book(composed_job, tmp_path, monkeypatch, "ledgers")
    assert [*(tmp_path / "ledgers").iterdir()]
    first = answer(composed_job, tmp_path, "ledgers")
    assert answer(composed_job, tmp_path, "ledgers").release == first.release
    assert len(RecordBook(tmp_path / "book").claims()) == 1


def test_a_crash_of_a_worker_without_its_ledger_leaves_no_empty_one_that_would_spend_the_plan_again(
    composed_job, tmp_path, monkeypatch
):
    answer(composed_job, tmp_path, "ledgers")
    shutil.rmtree(tmp_path / "ledgers")
    crash_before_the_book(composed_job, tmp_path, monkeypatch, "ledgers")
    assert code_of(lambda: answer(composed_job, tmp_path, "ledgers")) == "book"


def test_a_disk_that_is_full_once_a_client_is_in_the_book_leaves_one_that_starts(composed_job, tmp_path, monkeypatch):
    """Without the ledger the client would be refused for ever, and its budget would be spent for nothing."""

    def full(self, lines):
        if lines:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as filled:
        filled.setattr(RecordBook, "_count", full)
        with pytest.raises(OSError, match="No space left"):
            answer(composed_job, tmp_path, "ledgers")
    first = answer(composed_job, tmp_path, "ledgers")
    assert answer(composed_job, tmp_path, "ledgers").release == first.release
    assert len(RecordBook(tmp_path / "book").claims()) == 1


@pytest.mark.parametrize("terms", [{"book": "book"}, {"budget": (1.0, 1e-3)}])
def test_a_worker_with_a_book_refuses_a_job_that_would_not_be_entered(tmp_path, terms):
    make_keys(tmp_path / "keys", 2)
    job = make_job(
        config.resolve({**SMALL, "data": SLICE, "algorithm": {"name": "global"}, "privacy": PRIVACY}), tmp_path / "keys"
    )
    own = WorkerTerms(**{name: tmp_path / value if name == "book" else value for name, value in terms.items()})
    assert code_of(lambda: make_host(job, 0, tmp_path / "ledgers", terms=own)) == "book"
    assert not (tmp_path / "ledgers").exists()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"unprotected": ["noise is seeded"]}, "no epsilon to compose: noise is seeded"),
        ({"local": LocalTraining(pace="constant")}, "a part of the job's delta is reserved"),
    ],
)
def test_a_worker_enters_no_job_that_cannot_be_composed(tmp_path, change, why):
    """The configuration is checked by the operator; a worker gets a signed job."""
    make_keys(tmp_path / "keys", 2)
    document = {**SMALL, "data": SLICE, "algorithm": {"name": "global"}, "privacy": PRIVACY}
    job = make_job(config.resolve({**document, "ledger": {"scope": "dataset", "root": "x"}}), tmp_path / "keys")
    algorithm = algorithm_of(job.protocol.model_copy(update=change))
    with pytest.raises(Refused, match=why) as error:
        client_hosts.enrol(
            algorithm, 0, lambda part: pytest.fail("data was read"), WorkerTerms(), RecordBook(tmp_path / "book", durable=False)
        )
    assert error.value.code == "book"
