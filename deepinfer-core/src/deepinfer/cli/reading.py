"""What people hand over as files and lines: bytes to text, text to JSON.

Where you are: before ``generate``, ``chat`` and ``run-batch`` look at what they were given. What is
no text, or no JSON that the rest can walk through, is refused here and gets no further; a byte
order mark is taken off.
"""

from __future__ import annotations

from typing import IO, Final

import click

from deepinfer.entrypoints.json_text import as_json, as_text

__all__ = ["TEXT_FILE", "as_json", "as_text", "standard_input"]

TEXT_FILE: Final = click.File("r", encoding="utf-8-sig", errors="surrogateescape")
"""Reading never fails: a bad byte costs the line it is in, which ``as_text`` refuses."""


def standard_input() -> IO[str]:
    """Standard input, read like any file."""
    source: IO[str] = TEXT_FILE.convert("-", None, None)
    return source
