"""Epsilon depends on its arguments only: not on order, grouping, later rounds, threads or processors."""

from __future__ import annotations

import ast
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

from dpcfl_net.privacy import events
from dpcfl_net.privacy.accounting import accountant, document, pld
from dpcfl_net.privacy.accounting.accountant import calibrate, deltas, epsilon, epsilon_by_prefix
from dpcfl_net.privacy.accounting.cache import cost, sources
from dpcfl_net.privacy.accounting.document import account
from dpcfl_net.privacy.accounting.event_counts import EventCounts
from dpcfl_net.privacy.events import bounded_range_selection, fixed_size_gaussian, gaussian, sampled_gaussian
from dpcfl_net.privacy.events.base import event_types
from dpcfl_net.privacy.events.bounded_range_selection import BoundedRangeSelection
from dpcfl_net.privacy.events.fixed_size_gaussian import FixedSizeGaussian
from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian

ROUNDS = [[SampledGaussian(1.25, 1.0, 1)]]
ROUNDS += [[SampledGaussian(1.25, 0.01, 60), BoundedRangeSelection(0.15, 1), SampledGaussian(3.0, 1.0, 1)]] * 3
ROUNDS += [[SampledGaussian(1.25, 0.01, 60)], [], [BoundedRangeSelection(1e-5, 70)], [SampledGaussian(20.0, 0.5, 4)]]

QUESTIONS = [
    ([SampledGaussian(1.25, 32 / 6600, 199 * 207), SampledGaussian(1.25, 1.0, 1), BoundedRangeSelection(0.15, 20)], 1e-4),
    ([SampledGaussian(1.0, 0.1, 50)], 1e-9),
    ([SampledGaussian(0.8, 0.01, 10**6)], 1e-8),
    ([SampledGaussian(3000.0, 1.0, 10**9)], 1e-10),
    *([(list(chain(*ROUNDS[:t])), 1e-5) for t in range(1, len(ROUNDS) + 1)]),
    *([([BoundedRangeSelection(extent, count)], 1e-6) for extent in (1e-5, 0.3) for count in (3, 40, 70)]),
    ([BoundedRangeSelection(6.0, 10)], 1e-6),
]


def forget() -> None:
    """What another process would not know yet."""
    for kept in (
        accountant._spent,
        gaussian.plain_gaussian,
        sampled_gaussian.sampled_losses,
        sampled_gaussian._renyi_of_one,
        fixed_size_gaussian.fixed_size_losses,
        fixed_size_gaussian._renyi_of_one,
        bounded_range_selection.selection_block,
        bounded_range_selection._profile,
        bounded_range_selection._renyi_of_one,
    ):
        kept.cache_clear()


def answers(order: list[int], adjacency: str = "zero-out") -> list[float]:
    found = {i: epsilon(*QUESTIONS[i], adjacency) for i in order}
    return [found[i] for i in range(len(QUESTIONS))]


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_what_is_spent_after_a_round_does_not_depend_on_rounds_to_come(accountant):
    """A run in progress writes the same lines as at its end."""
    whole = epsilon_by_prefix(ROUNDS, 1e-5, accountant=accountant)
    for t in range(len(ROUNDS) + 1):
        forget()
        assert epsilon_by_prefix(ROUNDS[:t], 1e-5, accountant=accountant) == whole[:t]
        assert epsilon(list(chain(*ROUNDS[:t])), 1e-5, accountant=accountant) == [0.0, *whole][t]


@pytest.mark.parametrize("adjacency", [pytest.param("zero-out", marks=pytest.mark.slow), "replace-one"])
def test_the_order_and_the_company_of_questions_do_not_show(adjacency):
    places, rng = list(range(len(QUESTIONS))), random.Random(5)
    forget()
    first = answers(places, adjacency)
    rng.shuffle(places)
    forget()
    assert answers(places, adjacency) == first
    for i in rng.sample(places, 5):
        forget()
        assert epsilon(*QUESTIONS[i], adjacency) == first[i]


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_the_order_and_the_grouping_of_events_do_not_show(accountant):
    single = [SampledGaussian(1.1, 0.01, 1)] * 30 + [SampledGaussian(z, 1.0, 1) for z in (3.0, 7.0, 0.9)] * 3
    single += [BoundedRangeSelection(extent, 1) for extent in (0.1, 1e-5, 0.3)] * 4 + [SampledGaussian(2.0, 0.02, 3)]
    wanted = epsilon(single, 1e-5, accountant=accountant)
    for seed in range(4):
        random.Random(seed).shuffle(single)
        forget()
        assert epsilon(single, 1e-5, accountant=accountant) == wanted
        assert epsilon_by_prefix([single[:9], single[9:]], 1e-5, accountant=accountant)[-1] == wanted
    fixed = [FixedSizeGaussian(z, 10, 100, 2) for z in (3.0, 2.0, 4.0)]
    assert epsilon(fixed, 1e-3, "replace-one", accountant) == epsilon(fixed[::-1], 1e-3, "replace-one", accountant)


def test_threads_that_ask_at_the_same_time_get_the_same():
    forget()
    wanted = answers(list(range(len(QUESTIONS))))
    forget()
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda _: answers(list(range(len(QUESTIONS)))), range(3)))
    assert all(each == wanted for each in found)


def test_a_curve_of_deltas_does_not_depend_on_how_many_are_asked():
    events = [SampledGaussian(1.3, 0.1, 100), SampledGaussian(2.0, 1.0, 1)]
    whole = deltas(events, [0.0, 0.5, 1.0, 2.0, 4.0])
    assert [deltas(events, [spent])[0] for spent in (0.0, 0.5, 1.0, 2.0, 4.0)] == list(whole)


ASK = """
import json, sys
from dpcfl_net.privacy.accounting.document import account
print(json.dumps([account(document) for document in json.load(sys.stdin)]))
"""


def elsewhere(documents: list[dict], **environment: str) -> list[dict]:
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        input=json.dumps(documents),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


NUMPY_FOUND = np.show_config(mode="dicts").get("SIMD Extensions", {}).get("found", [])


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}, marks=pytest.mark.slow, id="one thread"),
        pytest.param({"OMP_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "4"}, marks=pytest.mark.slow, id="four threads"),
        pytest.param({"NPY_DISABLE_CPU_FEATURES": " ".join(NUMPY_FOUND)}, id="numpy without vectors"),
        pytest.param({"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-AVX512F"}, id="libm without vectors"),
    ],
)
def test_other_processes_threads_and_processors_give_the_same_seven_digits(environment):
    """A processor without the instructions that numpy and the C library find here is what the last two imitate."""
    documents = [cost(*question, "zero-out", "pld") for question in QUESTIONS]
    documents += [cost(*question, "replace-one", "pld") for question in QUESTIONS[:3]]
    open_noise = [{"type": "SampledGaussian", "sampling_rate": rate, "steps": 30} for rate in (0.05, 1.0)]
    documents.append({"events": open_noise, "delta": 1e-5, "target_epsilon": 3.0})
    here = [account(document) for document in documents]
    assert elsewhere(documents[::-1], **environment) == here[::-1]


def test_seven_digits_are_rounded_up():
    for question, delta in QUESTIONS[:8]:
        exact = pld.pld_epsilon(EventCounts().add(question).merged(), delta, "zero-out", pld.FINE)
        assert exact <= epsilon(question, delta) <= exact * (1 + 1e-6)
        assert float(f"{epsilon(question, delta):.6e}") == epsilon(question, delta)
    noise = calibrate(lambda z: [SampledGaussian(z, 0.05, 100)], 3.0, 1e-5)
    assert float(f"{noise:.6e}") == noise


def test_kept_answers_are_keyed_by_every_file_that_they_come_from():
    """Modules that the accountant imports, here or in a function, are among those whose content is part of an answer's name."""
    others = {"dpcfl_net.core.errors", "dpcfl_net.core.files"}
    seen, left = (
        set(),
        {
            Path(sys.modules[module].__file__)
            for module in (document.__name__, *{kind.__module__ for kind in event_types().values()})
        },
    )
    while left:
        file = left.pop()
        seen.add(file)
        imports = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
        names = {f"{node.module}.{alias.name}" for node in imports for alias in node.names} | {
            str(node.module) for node in imports
        }
        own = {ROOT / f"{name.replace('.', '/')}.py" for name in names - others if name.startswith("dpcfl_net.")}
        left |= {path for path in own if path.exists()} - seen
    assert seen | {Path(events.__file__)} == set(sources())
