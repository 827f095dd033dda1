"""Counts in a caller's EBNF: xgrammar keeps them in 32 bits and would read 4294967298 as 2."""

from __future__ import annotations

import re
from typing import Final

from deepinfer.errors import InvalidRequestError

from deepinfer_structured.schema.write import MOST_TIMES

# What may hold a brace and is none (texts, classes, comments), or a count in braces.
_COUNTS: Final = re.compile(
    r'"(?:[^"\\\n]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|#[^\n]*|\{([\d\s,]*)\}', re.DOTALL
)


def check_counts(ebnf: str, whose: str) -> None:
    """Refuse counts that would be read as others; ``whose`` begins the message."""
    for found in _COUNTS.finditer(ebnf):
        for count in re.findall(r"\d+", found[1] or ""):
            if int(count[:40]) > MOST_TIMES:
                raise InvalidRequestError(
                    f"{whose} grammar counts to {count[:40]}, and {MOST_TIMES} is the most.",
                    setting="so_args.schema",
                )
