"""Structured output: :class:`GrammarBackend` and :class:`Grammar`. House section 7.6.

A request's spec (:class:`deepinfer.sampling_params.StructuredSpec`) is checked at submission,
compiled beside the steps, and then masks the logits of every token it may emit. All of it happens
in the brain's process, on the host; the masks are applied by the backend's op ``apply_bitmask``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarContext:
    """What a grammar backend is made for.

    Attributes:
        tokenizer: the model's (``token_bytes``, ``special_ids``, ``name``), or None.
        vocab_size: columns of the logits; ids that the tokenizer lacks are padding.
        eos_ids: ids that end a text.
        options: ``EngineConfig.plugin_config`` of the plugin's name.
        cache_dir: where files may be kept if an option asks for it; it need not exist yet.
    """

    tokenizer: Any
    vocab_size: int
    eos_ids: frozenset[int] = frozenset()
    options: Mapping[str, Any] = field(default_factory=dict)
    cache_dir: Path


class Grammar(Protocol):
    """The state of one request's matcher. It moves by emitted tokens only."""

    def fill(self, rows: NDArray[np.int32], drafts: Sequence[int]) -> int:
        """Masks for the next token and for the one behind each legal draft.

        Args:
            rows: int32[1+len(drafts), ⌈V/32⌉], bit v%32 of word v//32 set if id v may come next.
                Row 0 is for the state as it is, row j for the state behind the first j drafts.
                Rows behind an illegal draft and bits behind the vocabulary may hold anything.
            drafts: ids that may be emitted next, in order.

        Returns:
            How many drafts are legal, counted to the first illegal one. The state is unchanged.
        """
        ...

    def accept(self, tokens: Sequence[int]) -> int:
        """Move by emitted tokens, until the text ends.

        Returns:
            How many of them belong to the text: all, or up to and with the one behind which
            nothing but the end may follow.

        Raises:
            Exception: a token is illegal, which is a bug of the engine or of the backend.
        """
        ...

    def done(self) -> bool:
        """Nothing but the end may follow: the text ends here, without an end token drawn."""
        ...

    def fork(self) -> Grammar:
        """A copy that moves on its own."""
        ...

    def unproven(self) -> bool:
        """Whether a text that ended still has to be looked at by :meth:`violation`."""
        ...

    def violation(self) -> str | None:
        """What of its spec the text that has ended breaks, in words; None: nothing.

        Called once, on another thread, for a grammar that is :meth:`unproven`. May be slow.
        """
        ...


@dataclass(frozen=True, slots=True)
class MaskJob:
    """One request's part of :meth:`GrammarBackend.fill`.

    Attributes:
        grammar: a matcher that this backend made.
        first: its rows are ``rows[first : first + 1 + len(drafts)]``.
        drafts: as for :meth:`Grammar.fill`.
    """

    grammar: Grammar
    first: int
    drafts: Sequence[int] = ()


class GrammarBackend(Protocol):
    """Compiles specs and fills masks. Constructed from a :class:`GrammarContext`, cheaply."""

    def check(self, spec: Any) -> None:
        """Refuse a spec at submission: on the caller's thread, so within milliseconds.

        Raises:
            InvalidRequestError: where in the spec, why, and what to write instead.
        """
        ...

    def ready(self, spec: Any, ends: frozenset[int]) -> Grammar | None:
        """A new matcher if this spec is compiled already; at once."""
        ...

    def compile(self, spec: Any, ends: frozenset[int]) -> Grammar:
        """A new matcher. Thread-safe, may be slow: runs in a pool while the request waits.

        Args:
            spec: what :meth:`check` has let through.
            ends: ids that end this request's text; they are allowed where the text may end.

        Raises:
            DeepInferError: it cannot be enforced, or costs more than the limits allow.
        """
        ...

    def fill(self, jobs: Sequence[MaskJob], rows: NDArray[np.int32]) -> list[int | Exception]:
        """Many requests' masks in one call, on worker threads where that is quicker.

        Args:
            jobs: no two of the same grammar; their rows do not overlap.
            rows: int32[k, ⌈V/32⌉], C-contiguous; rows that belong to no job stay as they are.

        Returns:
            For each job what its :meth:`Grammar.fill` answers or raises: one job's failure does
            not touch the others.
        """
        ...

    def close(self) -> None:
        """Give back threads and processes. Idempotent; calls that still run end soon."""
        ...
