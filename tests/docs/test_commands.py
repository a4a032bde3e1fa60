"""Every command and every Python block of the documentation is one that its program accepts. None of them runs here."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_checks import problem
from doc_commands import Command, commands, parse, program, shell_blocks
from own_modules import own_modules
from pages import ROOT, Block, blocks, pages, tokens

REASONS = {
    "a fragment", "a signature", "needs a tracker", "an overview of commands", "installs packages", "measures for minutes", "needs Ray",
    "needs SLURM", "needs a GPU", "needs a data set", "needs a download", "needs other hosts", "needs root", "needs several terminals",
    "runs for minutes", "runs the tests",
}  # fmt: skip
BLOCKS = shell_blocks()


def folder_of(page: Path, folder: Path) -> Path:
    """Make the folder that a reader of a page is in: the checkout, and the files that the pages show, this page's last."""
    folder.mkdir(parents=True)
    for name, there in (("configs", ROOT / "configs"), ("dpcfl_net", ROOT)):
        (folder / name).symlink_to(there)
    shutil.copytree(ROOT / "docs" / "examples", folder / "docs" / "examples")  # runs are written into it
    (folder / "docs" / "measured").symlink_to(ROOT / "docs" / "measured")
    for block in (block for shown in (*pages(), page) for block in blocks(shown) if "file" in block.marks):
        (folder / block.marks["file"]).write_text(block.text)
    return folder


@pytest.fixture
def modules(tmp_path: Path) -> Iterator[None]:
    """Forget the modules of a page afterwards: those of the next page may have the same names."""
    with own_modules(tmp_path):
        yield


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS}), ids=lambda page: str(page.relative_to(ROOT)))
def test_programs_accept_the_commands_of_a_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    here = folder_of(page, tmp_path / "reader")
    (tmp_path / "shell").mkdir()
    found: list[str | None] = []
    at, last = here, None
    for command in commands([block for block in BLOCKS if block.page == page], tmp_path / "shell"):
        at = at if command.block is last else here
        last = command.block
        if command.words[0] == "cd":
            at = at / command.words[1]
        monkeypatch.chdir(at)
        wrong = problem(command, at)
        if "fails" in command.block.marks:  # the page shows the message
            wrong = (
                None if wrong and wrong.partition(": ")[2].partition(": ")[2] in command.block.text else f"{command}: no error"
            )
        found.append(wrong)
    assert found
    assert [text for text in found if text] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dpcfl run quickstart", None),
        ("dpcfl runn quickstart", "No such command"),
        ("dpcfl run quickstart --dryrun", "No such option"),
        ("dpcfl run quickstart privacy.epsilonn=2", "unknown key"),
        ("dpcfl run quickstart privacy.epsilon=-1", "privacy.epsilon"),
        ("dpcfl run configs/lost.yaml", "no such configuration"),
        ("dpcfl sweep quickstart algorithm.name=global,lost", "lost"),
        ("dpcfl run quickstart --chaos lost.yaml", "lost.yaml"),
        ("dpcfl launch quickstart --on moon", "moon"),
        ("dpcfl bench lost", "lost"),
        ("dpcfl reproduce r-dpcfl/lost", "lost"),
        ("dpcfl account --json lost.json", "lost.json"),
        ("salloc -N 2 dpcfl launch lost", "no such configuration"),
        ("make lost", "lost"),
        ("pytest tests/lost.py", "lost.py"),
        ("python -m dpcfl_net.lost", "no module"),
    ],
)
def test_a_wrong_command_is_found(text: str, expected: str | None, tmp_path: Path):
    block = Block(ROOT / "README.md", 1, "sh", text + "\n")
    (command,) = commands([block], tmp_path)
    found = problem(command, tmp_path)
    assert found is None if expected is None else expected in str(found)


@pytest.mark.parametrize("text", ["lost-program --help", "dpcfl run 'quickstart", "if true; then dpcfl doctor"])
def test_a_block_that_no_shell_runs_is_found(text: str, tmp_path: Path):
    with pytest.raises(AssertionError):
        commands([Block(ROOT / "README.md", 1, "sh", text + "\n")], tmp_path)


def test_a_block_that_does_not_run_says_why():
    given = {block.place: block.marks["not run"] for page in pages() for block in blocks(page) if "not run" in block.marks}
    assert given, "the marks are gone"
    assert {place: reason for place, reason in given.items() if reason not in REASONS} == {}


def _inline() -> list[Command]:
    """Return the `dpcfl ...` in running text and tables."""
    found = []
    for page in (page for page in pages() if page.name != "CHANGELOG.md"):  # it names commands of earlier versions
        for token in tokens(page):
            for part in token.children or ():
                if part.type == "code_inline" and re.match(r"dpcfl [a-z]", part.content) and "|" not in part.content:
                    words = shlex.split(part.content, posix=False)
                    found.append(Command(Block(page, (token.map or [0])[0] + 1, "inline", part.content), tuple(words)))
    return found


def _names_of(path: list[str]) -> set[str]:
    """Return the options of a command, of any arity, as `dpcfl COMMAND --help` lists them."""
    command = program()
    for name in path:
        command = command.commands[name]
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}


def test_commands_in_sentences_name_existing_commands_and_options():
    found, problems = _inline(), []
    assert len(found) > 50
    for command in found:
        words = [word.strip("[]") for word in command.words[1:]]
        path = words[: 2 if words[0] in ("attack", "data") and len(words) > 1 else 1]
        try:
            known = _names_of(path)
        except KeyError as error:
            problems.append(f"{command}: no command {error}")
            continue
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        problems += [f"{command}: no option {name}" for name in sorted(given - known)]
    assert problems == []


OTHERS = {"--help", "--steps", "--array", "--stage", "--record-golden"}  # of scripts of dpcfl_net.adversaries, sbatch, pytest


def test_options_in_sentences_are_those_of_some_command():
    known, below = set(OTHERS), [program()]
    while below:
        command = below.pop()
        below += getattr(command, "commands", {}).values()
        known |= {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    named = {
        (page.name, part.content): part.content.split("=")[0].split()[0]
        for page in pages() if page.name != "CHANGELOG.md"
        for token in tokens(page)
        for part in token.children or ()
        if part.type == "code_inline" and part.content.startswith("--")
    }  # fmt: skip
    assert len(set(named.values())) > 40
    assert {place: option for place, option in named.items() if option not in known} == {}


def test_python_blocks_compile():
    found = [block for page in pages() for block in blocks(page) if block.language == "python"]
    assert len(found) > 8
    for block in found:
        ast.parse(block.text, block.place)


def test_the_parser_is_the_one_of_dpcfl():
    arguments = parse(["attack", "invert", "runs/a", "--against", "runs/b"])[1]
    assert Path(arguments["against"]) == Path("runs/b")  # typer below 0.21 makes it a path later
