"""From a spec to what is compiled: :func:`source_of`.

JSON schemas, patterns and choices are written as EBNF by ``schema/``: small, deterministic and
within limits. EBNF and structural tags come from the caller as they are, so what they cost is
anybody's guess: they are *foreign*, and compiled where they can be ended.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from deepinfer.errors import InvalidRequestError

from deepinfer_structured.counts import check_counts
from deepinfer_structured.options import Options
from deepinfer_structured.schema import (
    SchemaOptions,
    compile_choice,
    compile_regex,
    compile_schema,
)
from deepinfer_structured.tags import prepared


@dataclass(frozen=True, slots=True)
class Source:
    """A grammar's text.

    Args:
        text: EBNF in xgrammar's dialect with the rule ``root``, or a structural tag's JSON.
        tag: it is a structural tag.
        foreign: the caller wrote it.
        loose: the grammar allows more than the spec, so the text must be validated.
        named: the special tokens that a structural tag asks for.
    """

    text: str
    tag: bool = False
    foreign: bool = False
    loose: bool = False
    named: frozenset[int] = frozenset()


def key_of(spec: Any, options: Options) -> str:
    """Equal for specs that come to the same grammar under the same settings."""
    parts = [
        spec.schema_type,
        spec.rule,
        spec.on_unsupported,
        whitespace_of(spec, options),
        digits_of(spec, options),
        options.additional_properties,
        options.formats,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def whitespace_of(spec: Any, options: Options) -> int:
    """Most blanks in a row: the request's word, else the engine's."""
    return options.max_whitespace if spec.max_whitespace is None else int(spec.max_whitespace)


def digits_of(spec: Any, options: Options) -> int:
    """Most digits in a row, likewise."""
    return options.max_digits if spec.max_digits is None else int(spec.max_digits)


def source_of(spec: Any, options: Options, id_of: Callable[[str], int | None]) -> Source:
    """Write a spec as a grammar; ``id_of`` finds the tokens that structural tags name.

    Raises:
        InvalidRequestError: where in the spec, why, and what to write instead.
    """
    if spec.schema_type == "structural_tag":
        tag, named = prepared(spec.rule, _schema_options(spec, options, False), id_of)
        source = Source(json.dumps(tag), tag=True, foreign=True, named=named)
    else:
        source = _WRITERS[spec.schema_type](spec, options)
    if len(source.text) > options.max_grammar_bytes:
        raise InvalidRequestError(
            f"This {spec.schema_type} comes to a grammar of {len(source.text)} characters; "
            f"{options.max_grammar_bytes} are the most.",
            setting="so_args.schema",
            next_step="Make it smaller, or raise max_grammar_bytes in plugin_config.",
        )
    return source


def _json(spec: Any, options: Options) -> Source:
    loose = spec.on_unsupported == "validate"
    compiled = compile_schema(spec.rule, _schema_options(spec, options, loose))
    return Source(compiled.ebnf, loose=bool(compiled.loose))


def _json_object(spec: Any, options: Options) -> Source:
    compiled = compile_schema({"type": "object"}, _schema_options(spec, options, False))
    return Source(compiled.ebnf)


def _regex(spec: Any, options: Options) -> Source:
    return Source(compile_regex(spec.rule).ebnf)


def _choice(spec: Any, options: Options) -> Source:
    return Source(compile_choice(spec.rule).ebnf)


def _ebnf(spec: Any, options: Options) -> Source:
    check_counts(spec.rule, "The")
    return Source(spec.rule, foreign=True)


def _schema_options(spec: Any, options: Options, loose: bool) -> SchemaOptions:
    return SchemaOptions(
        loose=loose,
        max_whitespace=whitespace_of(spec, options),
        integer_digits=digits_of(spec, options),
        additional_properties=cast("Any", options.additional_properties),
        formats=cast("Any", options.formats),
    )


_WRITERS: Mapping[str, Callable[[Any, Options], Source]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "ebnf": _ebnf,
}
