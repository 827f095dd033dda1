"""Structural tags: free text and marks with contents that obey a rule, as tool calls have them.

xgrammar reads the tag; what is inside is ours: JSON schemas, patterns and choices are written by
``schema/``, so that a call's arguments are held to the same as a text of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from deepinfer.errors import InvalidRequestError

from deepinfer_structured.counts import check_counts
from deepinfer_structured.schema import (
    SchemaOptions,
    UnsupportedSchemaError,
    compile_regex,
    compile_schema,
)

_DEPTH: Final = 32
_MOST: Final = 2**31 - 1
_PLAIN_JSON: Final = {"type", "json_schema", "style"}


def prepared(
    tag: Mapping[str, Any], options: SchemaOptions, id_of: Callable[[str], int | None]
) -> tuple[dict[str, Any], frozenset[int]]:
    """The tag as xgrammar takes it, contents as EBNF, tokens as ids; and the ids that it names.

    Args:
        tag: ``{"type": "structural_tag", "format": …}``, or the older ``{"structures": [{"begin",
            "schema", "end"}], "triggers": […]}``.
        options: how schemas inside are compiled.
        id_of: a token's id, special ones included.

    Raises:
        InvalidRequestError: where in the tag, and why.
    """
    if "structures" in tag:
        tag = _of_structures(tag)
    if tag.get("type") != "structural_tag" or not isinstance(tag.get("format"), Mapping):
        raise _wrong("", 'it must read {"type": "structural_tag", "format": {…}}')
    writer = _Writer(options, id_of)
    form = writer.write(tag["format"], "/format")
    return {"type": "structural_tag", "format": form}, frozenset(writer.named)


def _of_structures(tag: Mapping[str, Any]) -> dict[str, Any]:
    tags = []
    for place, entry in enumerate(tag["structures"] or ()):
        if not isinstance(entry, Mapping) or not {"begin", "schema", "end"} <= set(entry):
            raise _wrong(f"/structures/{place}", "it must have begin, schema and end")
        content = {"type": "json_schema", "json_schema": entry["schema"]}
        tags.append(
            {"type": "tag", "begin": entry["begin"], "content": content, "end": entry["end"]}
        )
    triggered = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
    return {"type": "structural_tag", "format": triggered}


class _Writer:
    def __init__(self, options: SchemaOptions, id_of: Callable[[str], int | None]) -> None:
        self._options = options
        self._id_of = id_of
        self.named: set[int] = set()

    def write(self, part: Any, path: str, depth: int = 0) -> Any:
        """A part of the tag with everything in it that is ours to write."""
        if depth > _DEPTH:
            raise _wrong(path, f"tags are nested deeper than {_DEPTH}")
        if isinstance(part, list):
            return [self.write(p, f"{path}/{i}", depth + 1) for i, p in enumerate(part)]
        if isinstance(part, int | float) and abs(part) > _MOST:  # xgrammar would wrap it
            raise _wrong(path, f"no number may be beyond {_MOST}")
        if not isinstance(part, Mapping):
            return part
        kind = part.get("type")
        if kind == "json_schema":
            return self._schema(part, path)
        if kind == "regex":
            return self._regex(part, path)
        if kind == "grammar" and isinstance(part.get("grammar"), str):
            check_counts(part["grammar"], f"structural_tag at {path}/grammar: the")
        if kind == "token":
            return {**part, "token": self._token(part.get("token"), f"{path}/token")}
        written = {key: self.write(p, f"{path}/{key}", depth + 1) for key, p in part.items()}
        for key in ("trigger_tokens", "exclude_tokens"):
            if isinstance(part.get(key), list):
                ids = enumerate(part[key])
                written[key] = [self._token(t, f"{path}/{key}/{i}") for i, t in ids]
        return written

    def _schema(self, part: Mapping[str, Any], path: str) -> dict[str, Any]:
        strange = sorted(set(part) - _PLAIN_JSON)
        if strange or part.get("style", "json") != "json":
            what = strange[0] if strange else "style"
            raise _wrong(f"{path}/{what}", "only plain JSON is written for a schema")
        try:
            compiled = compile_schema(part.get("json_schema"), self._options)
        except UnsupportedSchemaError as why:
            raise _inside(why, f"{path}/json_schema") from None
        return {"type": "grammar", "grammar": compiled.ebnf}

    def _regex(self, part: Mapping[str, Any], path: str) -> dict[str, Any]:
        strange = sorted(set(part) - {"type", "pattern"})
        if strange or not isinstance(part.get("pattern"), str):
            raise _wrong(path, "a regex has a pattern, and nothing else")
        try:
            return {"type": "grammar", "grammar": compile_regex(part["pattern"]).ebnf}
        except UnsupportedSchemaError as why:
            raise _inside(why, f"{path}/pattern") from None

    def _token(self, token: Any, path: str) -> int:
        found = self._id_of(token) if isinstance(token, str) else token
        if not isinstance(found, int) or isinstance(found, bool):
            raise _wrong(path, f"the vocabulary has no token {token!r}")
        self.named.add(found)
        return found


def _inside(why: UnsupportedSchemaError, path: str) -> UnsupportedSchemaError:
    what = why.unsupported
    return UnsupportedSchemaError(path + what.path, what.keyword, what.reason, what.instead)


def _wrong(path: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"structural_tag at {path or '/'}: {why}.", setting="so_args.schema")
