"""Check of a function's signature before it is called, so that a user's mistake is found before anything is spent."""

from __future__ import annotations

import inspect
from typing import Any


def misfit(function: Any, *arguments: Any, **named: Any) -> str:
    """Say why a function cannot be called with some arguments; it is not called.

    Args:
        function: The function or bound method.
        *arguments: Positional arguments, of which only the number counts.
        **named: Keyword arguments, of which only the names count.

    Returns:
        Its parameters and the reason, to end a sentence; empty if it can be called.
    """
    if not callable(function):
        return f"is of type {type(function).__name__}, not a method"
    # Not the signature of what a decorator wraps: the decorator's own function is called.
    signature = inspect.signature(function, follow_wrapped=False)
    try:
        signature.bind(*arguments, **named)
    except TypeError as error:
        return f"is defined with {signature.replace(return_annotation=inspect.Signature.empty)}: {error}"
    return ""
