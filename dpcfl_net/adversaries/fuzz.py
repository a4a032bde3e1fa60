"""Fuzzing of all code that reads untrusted bytes: `python -m dpcfl_net.adversaries.fuzz --inputs 1000000 --seed 0`.

Each input is determined by the seed, its target and its number, so that a finding can be reproduced. Checked properties: only
typed refusals are raised; memory stays bounded; accepted input means what its bytes say and belongs to the expected hash, boot,
run, job and connection. The generators are plain `random.Random`: this module ships with the package, and hypothesis is a
dependency of the tests only.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Protocol

from dpcfl_net.adversaries.fuzz_encodings import Encodings
from dpcfl_net.adversaries.fuzz_floods import Floods
from dpcfl_net.adversaries.fuzz_peers import Clients, Servers
from dpcfl_net.adversaries.fuzz_readers import Chunks, Codec, Finding, Jobs, Transcripts
from dpcfl_net.adversaries.fuzz_sums import Sums
from dpcfl_net.core import buffers

TRACED = 25  # memory is measured in one of this many runs
MOST_TRACED = 16 << 20  # bytes that one run may hold at a time
MEMORY = Path("/dev/shm")  # folder in memory, if there is one
MOST_RESIDENT = 256 << 20  # bytes by which the process may grow over all inputs


class Target(Protocol):
    """Code to fuzz."""

    name: str
    share: float

    def run(self, rng: Random, counts: Counter[str]) -> int: ...


@dataclass
class FuzzResult:
    """Result of a target's inputs.

    Attributes:
        inputs: Number of inputs.
        seconds: Duration.
        counts: Number of inputs by error code, "accepted" or "delivered".
        peak: Peak memory of a measured run, in bytes.
    """

    inputs: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    peak: int = 0


def targets(folder: Path) -> list[Target]:
    """Create every target.

    Args:
        folder: Folder for targets that read files.
    """
    return [Codec(), Encodings(), Chunks(), Servers(), Clients(), Floods(), Transcripts(folder), Jobs(folder), Sums()]


def fuzz(target: Target, inputs: int, seed: int, first: int = 0) -> FuzzResult:
    """Feed at least `inputs` inputs to one target.

    Args:
        target: The target.
        inputs: Number of inputs.
        seed: Seed of the generators.
        first: Number of the first run.

    Raises:
        Finding: For the first violated property.
    """
    found, run = FuzzResult(), first
    began = time.monotonic()
    while found.inputs < inputs:
        rng = Random(f"{seed} {target.name} {run}")
        try:
            if (run - first) % TRACED == 0:
                found.inputs += _traced(target, rng, found)
            else:
                found.inputs += target.run(rng, found.counts)
        except Finding as finding:
            finding.add_note(f"repeat: --target {target.name} --seed {seed} --first {run} --inputs 1")
            raise
        run += 1
    found.seconds = time.monotonic() - began
    return found


def _traced(target: Target, rng: Random, result: FuzzResult) -> int:
    """One run under tracemalloc."""
    buffers.give_back()  # a buffer that is used again is no allocation
    tracemalloc.start()
    try:
        count = target.run(rng, result.counts)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    result.peak = max(result.peak, peak)
    if peak > MOST_TRACED:
        raise Finding(f"one run of {target.name} took {peak >> 20} MiB", peak)
    return count


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print a line for every target; returns 1 if a property is violated."""
    parser = argparse.ArgumentParser(prog="python -m dpcfl_net.adversaries.fuzz", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--inputs", type=int, default=100_000, help="messages, files and payloads in all (default 100,000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all inputs (default 0)")
    parser.add_argument("--target", help="fuzz only this target, with all inputs")
    parser.add_argument("--first", type=int, default=0, help="number of the first run (default 0); a finding names it")
    asked = parser.parse_args(arguments)
    if asked.inputs < 1:
        parser.error(f"--inputs is {asked.inputs}: must be at least 1")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        every = targets(Path(folder))
        chosen = [target for target in every if asked.target in (None, target.name)]
        if not chosen:
            parser.error(f"no target {asked.target!r}: {', '.join(target.name for target in every)}")
        total = FuzzResult()
        for target in chosen:
            try:
                own = max(1, round(asked.inputs * (target.share if asked.target is None else 1)))
                found = fuzz(target, own, asked.seed, asked.first)
            except Finding as finding:
                print(f"{target.name}: {finding}", *finding.__notes__, sep="\n", file=sys.stderr)
                return 1
            print(_line(target.name, found), flush=True)
            total = FuzzResult(
                total.inputs + found.inputs,
                total.seconds + found.seconds,
                total.counts + found.counts,
                max(total.peak, found.peak),
            )
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    print(_line("in all", total))
    print(f"the process grew by {grown / 2**20:.0f} MiB; only typed refusals were raised, and no invalid input was accepted")
    if grown > MOST_RESIDENT:
        print(f"the process grew by more than {MOST_RESIDENT / 2**20:.0f} MiB", file=sys.stderr)
        return 1
    return 0


def _line(name: str, found: FuzzResult) -> str:
    refused = found.counts.copy()
    accepted, delivered = refused.pop("accepted", 0), refused.pop("delivered", 0)
    codes = ", ".join(f"{code or '(none)'} {count}" for code, count in refused.most_common(12))
    rest = f", and {len(refused) - 12} codes more" if len(refused) > 12 else ""
    also = f", {delivered} delivered to the owner" if delivered else ""
    return (
        f"{name}: {found.inputs} inputs in {found.seconds:.0f} s, {accepted} accepted{also}, {sum(refused.values())} refused "
        f"({codes}{rest}), a run at most {found.peak / 2**20:.1f} MiB"
    )


if __name__ == "__main__":
    raise SystemExit(main())
