"""OpenAI's ``response_format`` as a spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from deepinfer.errors import InvalidRequestError, shown

_KINDS: Final = ("text", "json_object", "json_schema")


def format_spec(wish: Any) -> dict[str, Any] | None:
    """What ``SamplingParams(so_args=…)`` takes; None where any text will do.

    Raises:
        InvalidRequestError: naming the field that is missing or strange.
    """
    if wish is None:
        return None
    kind = wish.get("type") if isinstance(wish, Mapping) else None
    if kind not in _KINDS:
        raise InvalidRequestError(
            f"response_format must have a type of {', '.join(_KINDS)}, not {shown(kind)}.",
            setting="response_format.type",
        )
    if kind == "text":
        return None
    if kind == "json_object":
        return {"schema_type": "json_object"}
    form = wish.get("json_schema")
    if not isinstance(form, Mapping) or form.get("schema") is None:
        raise InvalidRequestError(
            "response_format of type json_schema needs json_schema.schema.",
            setting="response_format.json_schema.schema",
        )
    return {"schema_type": "json", "schema": form["schema"]}
