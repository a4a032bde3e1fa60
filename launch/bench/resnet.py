"""Row resnet: steps of DP-SGD on ResNet-18 with GroupNorm, and their memory."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

from dpcfl_net.core.errors import RunFailed
from dpcfl_net.launch.bench import dpsgd_ways
from dpcfl_net.launch.bench.figures import Figure, Target
from dpcfl_net.launch.bench.options import Options
from dpcfl_net.launch.bench.sizes import MIB
from dpcfl_net.launch.bench.timing import enough, interleave, timed

BATCH, STEPS, SECONDS = 64, 2, 3.0  # at least so many steps and so long in a repetition


def measure(options: Options) -> list[Figure]:
    """Measure a step at batch size 64 in one thread, and the peak of memory in a separate process."""
    batch = 4 if options.quick else BATCH
    with dpsgd_ways.one_thread():
        ways = dpsgd_ways.steps(dpsgd_ways.Records("resnet18", 1000), batch, options)
        # A task of few steps would measure its beginning: memory that the task before gave back to the system.
        counts = {name: enough(run, 1, 0.1) if options.quick else enough(run, STEPS, SECONDS) for name, run in ways.items()}
        samples = interleave(
            {name: timed(partial(run, counts[name]), counts[name]) for name, run in ways.items()}, options.times(3)
        )
    found = [Figure.of_times(f"batch {batch}", "ms per step", samples, (Target(9.0, "opacus"), Target(0.6, "plain")))]
    if not options.quick:
        peaks = {name: [_peak(name, batch) / MIB] for name in ways}
        found.append(
            Figure.of_values(f"peak memory at batch {batch}", "MiB beyond the loaded model", peaks, [Target(5.0, "opacus")])
        )
    return found


def _peak(way: str, batch: int) -> float:
    """Peak of memory of one way in a fresh process, in bytes beyond the loaded model."""
    command = [sys.executable, "-W", "ignore", "-m", "dpcfl_net.launch.bench.resnet", way, str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunFailed(f"measuring the memory of {way} failed: {done.stderr[-500:]}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def _measure_peak(way: str, batch: int) -> None:
    with dpsgd_ways.one_thread():
        run = dpsgd_ways.steps(dpsgd_ways.Records("resnet18", 1000), batch, Options())[way]
        before = _status("VmRSS")
        run(STEPS)
        print(max(0, _status("VmHWM") - before))


def _status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    with open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith(f"{field}:"))


if __name__ == "__main__":
    _measure_peak(sys.argv[1], int(sys.argv[2]))
