"""Immutable models, of which a signed job consists: canonical form, hash, and values computed once per object."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, ValidationError, model_serializer

from dpcfl_net.core.canonical import canonical_json

Value = TypeVar("Value")
_found: dict[int, dict[Hashable, Any]] = {}  # by the identity of parts that are alive


class StrictModel(BaseModel):
    """Immutable model; an unknown field or a value of a wrong type is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    def __setattr__(self, name: str, value: Any) -> None:
        """Raise AttributeError, which says how to change a configuration."""
        self._refuse_change(name, "assigned")

    def __delattr__(self, name: str) -> None:
        """Raise AttributeError as for an assignment."""
        self._refuse_change(name, "deleted")

    def _refuse_change(self, name: str, change: str) -> NoReturn:
        raise AttributeError(
            f"{name} of {type(self).__name__} cannot be {change}: configurations and jobs do not change; for a changed copy of a "
            "configuration use dpcfl.load, as in dpcfl.load(config, {'local.lr': 0.1})"
        )


class FrozenModel(StrictModel):
    """Part of a signed job.

    Attributes:
        added: Fields that are omitted where they have their default, so that the hash of jobs without them is unchanged.
    """

    added: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _without_added_defaults(self, standard: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        omitted = {name for name in self.added if getattr(self, name) == fields[name].default}
        return {key: value for key, value in standard(self).items() if key not in omitted}


def invalid_fields(error: ValidationError) -> str:
    """Describe the first five invalid fields of a part on one line.

    Args:
        error: The error of a model that was validated.

    Returns:
        Field and reason of each, and the number of the others.
    """
    errors = error.errors(include_url=False, include_input=False)
    found = [": ".join(filter(None, [".".join(map(str, e["loc"])), e["msg"]])) for e in errors]
    return " ".join("; ".join(found[:5]).split()) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")


def canonical(part: FrozenModel) -> bytes:
    """Encode a part as canonical JSON, which is hashed and signed.

    Args:
        part: The part.

    Returns:
        ASCII bytes, as `canonical_json`.

    Raises:
        ValueError: If the part holds NaN or infinity.
    """
    return canonical_json(part.model_dump(mode="json"))


def once(part: FrozenModel, name: Hashable, compute: Callable[[], Value]) -> Value:
    """Compute a value of a part once per object: with 100,000 clients a pass over the roster takes a tenth of a second.

    Args:
        part: The part, which never changes.
        name: Name of the value.
        compute: Computes the value; it must not refer to the part.

    Returns:
        The value; the same object at each call.
    """
    if id(part) not in _found:
        _found[id(part)] = {}
        weakref.finalize(part, _found.pop, id(part), None)
    found = _found[id(part)]
    if name not in found:
        found[name] = compute()
    value: Value = found[name]
    return value


def digest(part: FrozenModel) -> str:
    """Hash the canonical JSON of a part; the digest of the protocol is the job hash.

    Args:
        part: The part.

    Returns:
        SHA-256, 64 hex digits.

    Raises:
        ValueError: As `canonical`.
    """
    return once(part, "digest", lambda: hashlib.sha256(canonical(part)).hexdigest())
