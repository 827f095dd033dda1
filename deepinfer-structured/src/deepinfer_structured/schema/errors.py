"""What a schema is refused with: where, which keyword, why, and what to write instead."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Unsupported:
    """One thing that the grammar does not enforce.

    Args:
        path: JSON Pointer into the schema (RFC 6901); behind ``URI#`` in another document.
        keyword: the keyword at fault; ``schema`` for the whole of it.
        reason: why, one clause.
        instead: what to write instead, one clause.
    """

    path: str
    keyword: str
    reason: str
    instead: str


class UnsupportedSchemaError(InvalidRequestError):
    """A schema (or a regex) that is refused: nothing was enforced, nothing was generated."""

    code = "unsupported_schema"

    def __init__(self, path: str, keyword: str, reason: str, instead: str) -> None:
        self.unsupported = Unsupported(path, keyword, reason, instead)
        super().__init__(
            f"{keyword} at {path or '/'}: {reason}.",
            setting=path or "/",
            next_step=f"Instead: {instead}.",
        )

    @classmethod
    def of(cls, what: Unsupported) -> UnsupportedSchemaError:
        """The error that says it."""
        return cls(what.path, what.keyword, what.reason, what.instead)
