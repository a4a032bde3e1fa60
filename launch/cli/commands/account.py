"""`dpcfl account`: epsilon of DP-SGD or of listed events, or the noise for an epsilon."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from dpcfl_net.launch.cli.commands import completion
from dpcfl_net.launch.cli.commands.parameters import at_most
from dpcfl_net.launch.cli.commands.parameters import delta as check_delta
from dpcfl_net.launch.cli.commands.parameters import epsilon as check_epsilon

if TYPE_CHECKING:
    from dpcfl_net.launch.cli.account import Question

MOST = 1_000_000_000
AS_JSON = "\0"  # the value of `--json` without a file; no file has this name


class AccountCommand(TyperCommand):
    """Accepts `--json FILE`, a question in a file, and `--json` alone, an answer in JSON."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give `--json` without a file a value of its own."""
        given = list(args)
        for index in reversed([k for k, word in enumerate(given) if word == "--json"]):
            if index + 1 == len(given) or (given[index + 1].startswith("-") and given[index + 1] != "-"):
                given.insert(index + 1, AS_JSON)
        return super().parse_args(ctx, given)


def _noise(value: float | None) -> float | None:
    """Refuse a noise multiplier outside (0, a million]."""
    return at_most(value, 1_000_000)


def account(
    epsilon: Annotated[
        float | None, typer.Option(callback=check_epsilon, help="find the noise multiplier for this epsilon")
    ] = None,
    noise_multiplier: Annotated[
        float | None,
        typer.Option(
            callback=_noise,
            help="find epsilon for this noise multiplier: deviation of the noise over the clip norm, and with --clients and --adjacency "
            "replace-one over twice the clip norm",
        ),
    ] = None,
    delta: Annotated[float | None, typer.Option(callback=check_delta, help="delta of epsilon, for example 1e-5")] = None,
    records: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="records of a client: protects one record by DP-SGD")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, max=MOST, help="--records: expected size of a batch")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, max=MOST, help="--records: epochs, or epochs of each round")] = None,
    sampling: Annotated[
        str | None,
        typer.Option(
            help="--records: poisson (default), or allocation: each record in one batch of each epoch",
            autocompletion=completion.one_of(("poisson", "allocation")),
        ),
    ] = None,
    clients: Annotated[int | None, typer.Option(min=1, max=MOST, help="number of clients: protects one client")] = None,
    per_round: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="--clients: clients that a round samples (default: all)")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, max=MOST, help="number of rounds (default with --records: 1)")] = None,
    adjacency: Annotated[
        str,
        typer.Option(
            help="neighbours that --epsilon is for: zero-out or replace-one",
            autocompletion=completion.one_of(("zero-out", "replace-one")),
        ),
    ] = "zero-out",
    accountant: Annotated[
        str, typer.Option(help="pld: tight; rdp: the numbers of the papers", autocompletion=completion.one_of(("pld", "rdp")))
    ] = "pld",
    json_file: Annotated[
        str | None,
        typer.Option(
            "--json",
            metavar="[FILE]",
            help="with FILE: read events and delta from this JSON file (-: standard input); alone: print the answer as JSON",
        ),
    ] = None,
) -> None:
    """Compute epsilon of DP-SGD, or the noise for an epsilon.

    For one client's records: --epsilon 5 --delta 1e-4 --records 2000 --batch 32 --epochs 40. For whole clients: --epsilon 5 --delta
    1e-4 --clients 1000 --per-round 50 --rounds 100. Other mechanisms, such as selections: --json FILE.
    """
    from dpcfl_net.launch.cli.account import Question

    given = locals()
    asked = Question(**{field.name: given[field.name] for field in fields(Question)})
    if json_file in (None, AS_JSON):
        _answer(asked, as_json=json_file == AS_JSON)
    else:
        _answer_file(asked, str(json_file))


def _answer(asked: Question, *, as_json: bool) -> None:
    """Answer the question of the options."""
    from dpcfl_net.core.errors import ConfigError
    from dpcfl_net.launch.cli.account import Question, answer, lines
    from dpcfl_net.launch.cli.json_output import print_json

    if asked == Question():
        raise ConfigError(
            "give the numbers of a run, for example --epsilon 5 --delta 1e-4 --records 2000 --batch 32 --epochs 40, or --json FILE"
        )
    found = answer(asked)
    if as_json:
        print_json(found)
    else:
        typer.echo("\n".join(lines(found)))


def _answer_file(asked: Question, name: str) -> None:
    """Answer the question in a JSON file."""
    from dpcfl_net.core.errors import ConfigError
    from dpcfl_net.core.files import parse_json, read_json, read_stdin, shown
    from dpcfl_net.launch.cli.account import Question
    from dpcfl_net.launch.cli.json_output import print_json
    from dpcfl_net.privacy.accounting.document import account as solve

    usual = Question()
    if extra := [field.name for field in fields(asked) if getattr(asked, field.name) != getattr(usual, field.name)]:
        options = ", ".join(f"--{key.replace('_', '-')}" for key in extra)
        raise ConfigError(f"--json {name} holds the whole question: leave out {options}")
    most, where = 1 << 20, "standard input" if name == "-" else name
    document = parse_json(read_stdin(most), where) if name == "-" else read_json(Path(name), most)
    if not isinstance(document, dict):
        raise ConfigError(f"{where} must hold a JSON object with events and delta, got {shown(document)}")
    print_json(solve(document))
