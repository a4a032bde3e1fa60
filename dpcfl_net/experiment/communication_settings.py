"""The `communication` section of a configuration: short forms of `up`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from dpcfl_net.core.files import shown
from dpcfl_net.core.signed_settings import Communication, Upload

FORMS = "float32, int8, topk:FRACTION with a fraction in (0, 1], or a mapping {form, fraction, error_feedback}"


def _long_form(value: Any) -> Any:
    """Expand float32, int8 and topk:FRACTION to a mapping."""
    if not isinstance(value, str):
        return value
    if value in ("float32", "int8"):
        return {"form": value}
    name, _, fraction = value.partition(":")
    try:
        share = float(fraction)
    except ValueError:
        share = 0.0
    if name not in ("topk", "top-k") or not 0 < share <= 1:
        raise ValueError(f"is {shown(value)}: must be {FORMS}")
    return {"form": "top-k", "fraction": share}


class CommunicationSettings(Communication):
    """The `communication` section."""

    up: Annotated[Upload, BeforeValidator(_long_form)] = Field(
        default=Upload(), description=f"form of the updates that clients send: {FORMS}"
    )

    @property
    def usual(self) -> bool:
        """True if every message holds float32, as without this section."""
        return self.signed() == Communication()

    def signed(self) -> Communication:
        """Return the section as it is in the signed protocol."""
        return Communication.model_validate(self.model_dump())
