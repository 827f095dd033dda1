"""The text against its schema by ``jsonschema``, for ``on_unsupported="validate"``."""

from __future__ import annotations

import json
from typing import Any


def first_violation(schema: Any, text: str) -> str | None:
    """What of the schema (draft 2020-12 unless it says otherwise) the text breaks, in words.

    Formats are asserted, as the grammar does. References that leave the schema are not followed.
    """
    import jsonschema
    from referencing import Registry

    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as why:
        return f"the text is no JSON: {why}"
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    checker = kind(schema, registry=Registry(), format_checker=kind.FORMAT_CHECKER)
    try:
        errors = sorted(checker.iter_errors(value), key=lambda error: list(map(str, error.path)))
    except Exception as why:  # an unresolvable reference, a pattern that is none
        return f"the schema cannot be validated against: {why}"
    if not errors:
        return None
    where = "".join(f"/{part}" for part in errors[0].absolute_path) or "/"
    return f"{where}: {errors[0].message}"
