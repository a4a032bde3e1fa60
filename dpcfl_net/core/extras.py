"""Advice on how to install an optional dependency. No package index has dpcfl-net, so its name alone installs nothing."""

from __future__ import annotations


def advice(extra: str) -> str:
    """Return the command that installs an extra of `pyproject.toml`, for an error message.

    Args:
        extra: Name of the extra, such as "ray".
    """
    return (
        f"pip install -e '.[{extra}]' in a checkout of dpcfl_net, or pip install 'dpcfl-net[{extra}] @ file:///path/to/the.whl'"
    )
