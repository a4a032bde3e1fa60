"""Commands and Python blocks of the documentation run, page by page, and print what the page shows."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from doc_commands import forms, outputs, script, shell_blocks
from pages import ROOT, Block, blocks, pages
from test_commands import folder_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

RUNNABLE = [block for block in shell_blocks() if "not run" not in block.marks]
PYTHON = [block for page in pages() for block in blocks(page) if block.language == "python" and "not run" not in block.marks]
SECONDS = 600  # of one block
SERVED = 15  # seconds until Ctrl-C ends `dpcfl serve`


def _with_programs(folder: Path) -> dict[str, str]:
    """Return an environment whose `dpcfl` and `python` are those of the tests."""
    programs = folder / "programs"
    programs.mkdir()
    for name, start in (("dpcfl", f"{sys.executable} -m dpcfl_net"), ("python", sys.executable)):
        (programs / name).write_text(f'#!/bin/sh\nexec {start} "$@"\n')
        (programs / name).chmod(0o755)
    path = os.pathsep.join((str(programs), os.environ["PATH"]))
    python = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    return {**os.environ, "PATH": path, "PYTHONPATH": python, "PLOTLY_RENDERER": "json", "COLUMNS": "200", "BROWSER": "true"}


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command with its own process group, which ends with it."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, errors = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, errors = process.communicate()
            errors += f"\nended after {SECONDS} s"
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


@pytest.fixture(scope="session")
def sample_sweep(tmp_path_factory) -> Path:
    """A small sweep over r-dpcfl and local, whose runs stand for RUN, RUN2 and LOCAL."""
    folder = tmp_path_factory.mktemp("sample")
    settings = ["rounds=4", "algorithm.name=r-dpcfl,local"]
    done = _run(["dpcfl", "sweep", "quickstart", *settings], folder, _with_programs(folder))
    assert done.returncode == 0, done.stderr
    return folder


def _runs(sample: Path) -> tuple[Path, Path, Path]:
    """Return the sample's folders: a run of r-dpcfl, one of local, and the sweep."""
    (base,), (local,) = (list(sample.glob(f"runs/store/{name}-*")) for name in ("r-dpcfl", "local"))
    (sweep,) = (path.parent for path in sample.glob("runs/*/sweep.json"))
    return base, local, sweep


def _in_shell(text: str, sample: Path) -> str:
    """Let the names in capitals stand for a configuration and for runs: at that moment the newest here, else those of the sample."""
    base, local, sweep = _runs(sample)
    listed = f"{{ ls -td runs/*/run.json 2>/dev/null; echo {base}/run.json; echo {local}/run.json; }}"
    function = f'run() {{ dirname "$({listed} | sed -n "$1p")"; }}\n'
    names = {"CONFIG": "quickstart", "RUN": '"$(run 1)"', "RUN2": '"$(run 2)"', "LOCAL": str(local), "SWEEP": str(sweep)}
    newest = re.sub(r"\bruns/NAME\b", lambda _: names["RUN"], text)
    # In the foreground the command alone gets the signal; else it gets that of its group, too, as from a second Ctrl-C.
    newest = re.sub(r"\bdpcfl serve\b", f"timeout --foreground --preserve-status --signal=INT {SERVED} dpcfl serve", newest)
    return function + re.sub(r"(?<![\w/$])(CONFIG|RUN2|RUN|LOCAL|SWEEP)(?![\w/=])", lambda name: names[name[0]], newest)


def _pattern(line: str) -> re.Pattern[str]:
    """Build a pattern of a shown line: numbers, hashes, names of runs and spaces may differ, `...` stands for anything."""
    parts = [re.escape(part) for part in line.split("...")]
    loose = ".*".join(parts)
    number = r"\d[\d,]*(\.\d+)?(e-?\d+)?"
    loose = re.sub(r"[0-9a-f]{12,}|\d[\d,]*(\\\.\d+)?", lambda m: "[0-9a-f]+" if len(m[0]) > 11 else number, loose)
    return re.compile(re.sub(r"(\\ )+", r"\\s+", loose))


def _unlike(shown: str, printed: str) -> list[str]:
    """List the shown lines that were not printed, in this order."""
    lines, missing = iter(printed.splitlines()), []
    for line in shown.splitlines():
        if line.strip() in ("", "..."):
            continue
        if not any(_pattern(line.strip()).search(candidate) for candidate in lines):
            missing.append(line)
            lines = iter(())
    return missing


def _missing(block: Block) -> bool:
    """True if a block needs a module or a program that is not installed."""
    needed = block.marks.get("needs")
    return needed is not None and importlib.util.find_spec(needed) is None and shutil.which(needed) is None


@pytest.mark.parametrize("page", sorted({block.page for block in RUNNABLE}), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path, sample_sweep: Path):
    folder = folder_of(page, tmp_path / "reader")
    (folder / "runs").mkdir(exist_ok=True)
    environment = _with_programs(tmp_path)
    own = [block for block in RUNNABLE if block.page == page]
    left_out = [block for block in own if _missing(block)]
    for block in (block for block in own if block not in left_out):
        commands = [*outputs(block)] if block.language == "console" else [(forms(script(block))[0], "")]
        for number, (command, shown) in enumerate(commands, 1):
            text = _in_shell(command, sample_sweep)
            done = _run(["bash", "-c", f"set -eu\n{text}"], folder, environment)
            # An audit accuses a sound run once in 1,000; another run then has to stand.
            if command.startswith("dpcfl audit") and done.returncode == 3:
                for again, _ in commands[:number]:
                    done = _run(["bash", "-c", f"set -eu\n{_in_shell(again, sample_sweep)}"], folder, environment)
            expected = int(block.marks["fails"].split()[-1]) if "fails" in block.marks else 0
            assert done.returncode == expected, f"{block.place}: {text}\n{done.stdout}\n{done.stderr}"
            missing = _unlike(shown, done.stdout + done.stderr)
            assert not missing, f"{block.place}: {text}\nprinted\n{done.stdout}\n{done.stderr}\nbut the page shows {missing}"
            if command.startswith("cd "):
                folder = folder / command.split()[1]
    if left_out:
        pytest.skip("only not run: " + ", ".join(f"{block.place} (needs {block.marks['needs']})" for block in left_out))


@pytest.mark.parametrize("page", sorted({block.page for block in PYTHON}), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_python_blocks_of_a_page_run_in_order(page: Path, tmp_path: Path, sample_sweep: Path):
    folder = folder_of(page, tmp_path / "reader")
    text = "\n\n".join(block.text for block in PYTHON if block.page == page)
    (folder / "page.py").write_text(text.replace("runs/NAME", str(_runs(sample_sweep)[0])))
    done = _run([sys.executable, "page.py"], folder, _with_programs(tmp_path))
    assert done.returncode == 0, done.stderr


def test_loose_comparison_finds_another_line():
    assert _unlike("round 1/20  accuracy 10.4 %\n...\nclaim holds", "round 2/20 accuracy 3.1 %\nx\nthe claim holds") == []
    assert _unlike("job 08c04f579b8323df, 1,064 records", "job 0e8fc3ec9737cbe1, 12 records") == []
    assert _unlike("claim holds", "claim broken") == ["claim holds"]
    assert _unlike("first\nsecond", "second\nfirst") == ["second"]


def test_every_block_is_executed_or_marked():
    listed = {block.place for block in shell_blocks()}
    executed = {block.place for block in RUNNABLE}
    marked = {block.place for block in shell_blocks() if "not run" in block.marks}
    assert executed | marked == listed
    assert isinstance(next(iter(RUNNABLE)), Block)
    assert len(executed) > 15
