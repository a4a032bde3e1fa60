"""Page of the Python API, from the docstrings of `import dpcfl_net`."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from reference_pages.markdown import WRITTEN, code, table

INTRODUCTION = """# Python API

After this page you know every public name of `import dpcfl_net as dpcfl`: its arguments, its result and its errors.
[Python](../how-to/python.md) shows them at work.
"""
PARTS: dict[str, tuple[str, ...]] = {
    "Functions": ("load", "run", "resume", "open_run", "sweep", "tune", "compare", "account"),
    "Results": ("Run", "RoundMetrics", "SweepResult", "TuneOptions", "TuneResult", "Comparison", "Config"),
    "Trackers": ("Tracker", "TensorBoard", "MLflow", "WandB"),
    "Errors": ("DpcflError", "ConfigError", "DataMissing", "Refused", "LedgerError", "RunFailed", "StopRun"),
    "To write an algorithm": (
        "Algorithm", "Options", "on_client", "on_central_server", "Client", "CentralContext", "ClippedSums", "Federation", "Results",
        "State", "Release", "TensorSpec", "Capabilities", "Setting",
    ),
    "Slots of a plan": (
        "DPSGDSlot", "GaussianSlot", "SelectionSlot", "SecureSlot", "StageSlot", "CentralSlot", "LabelledCentralSlot", "LabelSlot",
        "ParticipationSlot", "RawSlot", "UnprotectedSlot",
    ),
    "Privacy events": (
        "SampledGaussian", "FixedSizeGaussian", "AllocatedGaussian", "BoundedRangeSelection", "RandomisedResponse",
        "LabelledFixedSizeGaussian", "DataFree", "Unprotected",
    ),
}  # fmt: skip
RECEIVED = ("Client", "CentralContext")  # an algorithm is given it, and does not make one
WITHOUT_MEMBERS = ("Config", "Options")  # configuration-keys.md lists the fields


def page() -> str:
    """Return the page: every public name, in its part."""
    import dpcfl_net as dpcfl

    others = sorted({*dpcfl.__all__} - {"__version__", *(name for names in PARTS.values() for name in names)})
    lines = [*INTRODUCTION.splitlines(), ""]
    for part, names in {**PARTS, **({"Other names": tuple(others)} if others else {})}.items():
        lines += [f"## {part}", ""]
        for name in names:
            lines += _object(name, getattr(dpcfl, name))
    return "\n".join(lines).rstrip() + f"\n\n{WRITTEN}\n"


def _object(name: str, value: Any) -> list[str]:
    """Describe a function or a class with its public members."""
    lines = [f"### {name}", ""]
    if not inspect.isclass(value):
        return [*lines, *_call(name, value), *_docstring(inspect.getdoc(value), _annotations(value))]
    parents = [base.__name__ for base in value.__bases__ if base.__module__.startswith("dpcfl_net.core.errors")]
    if dataclasses.is_dataclass(value) and name not in RECEIVED:
        fields = [field for field in dataclasses.fields(value) if field.init and not field.name.startswith("_")]
        lines += _code(f"{name}({', '.join(map(_field, fields))})")
    lines += [f"Subclass of {', '.join(map(code, parents))}.", ""] if parents else []
    lines += _docstring(inspect.getdoc(value) if value.__doc__ else None, {})
    for member, inner in () if name in WITHOUT_MEMBERS else _members(value):
        if isinstance(inner, property | cached_property):
            text = _docstring(inspect.getdoc(inner), {})
            lines += [f"**`{name}.{member}`**: {text[0] if text else ''}", "", *text[2:]]
        else:
            lines += [*_call(f"{name}.{member}", inner), *_docstring(inspect.getdoc(inner), _annotations(inner))]
    return lines


def _field(field: Any) -> str:
    if field.default is not dataclasses.MISSING:
        return f"{field.name}={field.default!r}"
    return f"{field.name}=..." if field.default_factory is not dataclasses.MISSING else field.name


def _members(value: type) -> Iterator[tuple[str, Any]]:
    """Yield the documented public methods and properties that classes of this library define, bases first."""
    found: dict[str, Any] = {}
    for kind in reversed(value.__mro__):
        if kind.__module__.startswith("dpcfl_net"):
            found |= {name: member for name, member in vars(kind).items() if not name.startswith("_") and _documented(member)}
    for name, member in found.items():
        yield name, getattr(member, "__func__", member)


def _documented(member: Any) -> bool:
    plain = getattr(member, "__func__", member)
    return (isinstance(plain, property | cached_property) or inspect.isfunction(plain)) and bool(plain.__doc__)


def _call(name: str, function: Any) -> list[str]:
    """Return the signature without types, which are in the table of arguments."""
    signature = inspect.signature(function)
    kept = [p.replace(annotation=p.empty) for p in signature.parameters.values() if p.name not in ("self", "cls")]
    return _code(f"{name}{signature.replace(parameters=kept, return_annotation=signature.empty)}")


def _code(text: str) -> list[str]:
    """Return a signature as code; long ones have several lines."""
    return [
        "```text",
        *textwrap.wrap(text, 100, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False),
        "```",
        "",
    ]


def _annotations(function: Any) -> dict[str, str]:
    return {name: p.annotation for name, p in inspect.signature(function).parameters.items() if isinstance(p.annotation, str)}


def _docstring(text: str | None, types: dict[str, str]) -> list[str]:
    """Render a Google-style docstring as Markdown."""
    if not text:
        return []
    import griffe

    lines: list[str] = []
    for section in griffe.Docstring(text, lineno=1).parse("google", warnings=False):
        kind = section.kind.value
        if kind == "text":
            lines += [*_paragraphs(section.value), ""]
        elif kind in ("parameters", "attributes"):
            head = ("argument" if kind == "parameters" else "attribute", "type", "meaning")
            lines += table(
                head, [(code(i.name), code(types.get(i.name.lstrip("*"), "")), i.description) for i in section.value]
            )
        elif kind in ("returns", "yields"):
            lines += [f"{kind.capitalize()}: {_joined(section.value)}", ""]
        elif kind == "raises":
            lines += table(("raises", "when"), [(code(str(item.annotation)), item.description) for item in section.value])
        elif kind == "admonition":
            lines += [f"{section.title}: {' '.join(section.value.description.split())}", ""]
        else:
            raise ValueError(f"a docstring has a section {kind}, which this page does not know: {text[:80]}")
    return lines


def _joined(items: Sequence[Any]) -> str:
    """Return a section of results in one line; griffe reads `word: rest` as a type and its meaning."""
    parts = [f"{item.annotation}: {item.description}" if item.annotation else item.description for item in items]
    return " ".join(" ".join(parts).split())


def _paragraphs(text: str) -> list[str]:
    """Return paragraphs one a line; indented code is fenced."""
    lines: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        if paragraph.startswith("    "):
            lines += ["```python", inspect.cleandoc(paragraph), "```", ""]
        else:
            lines += [" ".join(paragraph.split()), ""]
    return lines[:-1]
