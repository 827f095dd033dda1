"""The grammar backend: specs to matchers, and the masks of a step in one call.

Order of a spec's life: ``check`` writes it as a grammar on the caller's thread, within a few
milliseconds; ``compile`` makes it a compiled grammar on a thread of the engine's pool, in this
process or, where nobody knows what it costs, in another one; ``ready`` finds it in the cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from deepinfer.api.grammar import GrammarContext, MaskJob
from deepinfer.errors import DeepInferError, InvalidRequestError

from deepinfer_structured import frames
from deepinfer_structured.cache import DiskCache, Locks, MemoryCache, Recent
from deepinfer_structured.child import reason
from deepinfer_structured.masks import Masks
from deepinfer_structured.matcher import Matcher
from deepinfer_structured.options import Options
from deepinfer_structured.processes import Processes, RefusedError, TooSlowError
from deepinfer_structured.sources import Source, key_of, source_of
from deepinfer_structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    from numpy.typing import NDArray

_REMEMBERED: Final = 256  # sources and refusals
_LARGE: Final = 100_000  # characters of a grammar of ours that may take many seconds to compile
_MANY: Final = 64  # rules of ours beyond which masks are made when a text first needs them


class XGrammarBackend:
    """A ``deepinfer.api.grammar.GrammarBackend`` over xgrammar, which is imported at first use."""

    def __init__(self, context: GrammarContext) -> None:
        self.options = Options.of(context.options)
        self.vocabulary = Vocabulary(context.tokenizer, context.vocab_size)
        self._size = context.vocab_size
        self._compiled = MemoryCache(self.options.cache_bytes)
        self._disk = DiskCache(context.cache_dir) if self.options.disk_cache else None
        self._sources = Recent[Source](_REMEMBERED)
        self._refused = Recent[DeepInferError](_REMEMBERED)
        self._locks = Locks()
        self._processes = Processes(lambda: str(self.vocabulary.info.serialize_json()))
        self._masks = Masks(self.options)

    # Specs.

    def check(self, spec: Any) -> None:
        self.vocabulary.check()
        key = key_of(spec, self.options)
        self._raise_refused(key)
        if self._compiled.get(key) is None:
            self._source(key, spec)

    def ready(self, spec: Any, ends: frozenset[int]) -> Matcher | None:
        key = key_of(spec, self.options)
        compiled = self._compiled.get(key)
        return None if compiled is None else self._matcher(compiled, spec, ends)

    def compile(self, spec: Any, ends: frozenset[int]) -> Matcher:
        self.vocabulary.check()
        key = key_of(spec, self.options)
        with self._locks.of(key):  # equal specs that come together are compiled once
            self._raise_refused(key)
            compiled = self._compiled.get(key)
            if compiled is None:
                try:
                    compiled = self._make(key, spec)
                except InvalidRequestError as why:  # what is wrong with it stays wrong
                    self._refused.put(key, why)
                    raise
        return self._matcher(compiled, spec, ends)

    def _raise_refused(self, key: str) -> None:
        why = self._refused.get(key)
        if why is not None:
            raise why.with_traceback(None)

    def _source(self, key: str, spec: Any) -> Source:
        source = self._sources.get(key)
        if source is None:
            source = source_of(spec, self.options, self.vocabulary.id_of)
            self._sources.put(key, source)
        return source

    def _make(self, key: str, spec: Any) -> Compiled:
        source = self._source(key, spec)
        name = f"{self.vocabulary.fingerprint}-{key}" if self._disk is not None else ""
        text = self._disk.get(name) if self._disk is not None else None
        grammar = None if text is None else self._read(text)
        if grammar is None:
            grammar, text = self._compile(source, spec.schema_type)
            if self._disk is not None and not self._lazy(source):  # to write is to make all masks
                self._disk.put(name, text or grammar.serialize_json())
        texts = self._texts(source) if source.tag else None
        compiled = Compiled(grammar, source.loose, texts)
        self._compiled.put(key, compiled, grammar.memory_size_bytes)
        return compiled

    def _read(self, text: str) -> Any | None:
        """A compiled grammar of an earlier start; None if another version wrote it."""
        import xgrammar

        try:
            return xgrammar.CompiledGrammar.deserialize_json(text, self.vocabulary.info)
        except RuntimeError:
            return None

    def _compile(self, source: Source, kind: str) -> tuple[Any, str | None]:
        """The compiled grammar, and its text if it came as one.

        All masks that the vocabulary alone decides are made here, beside the steps: some
        milliseconds a rule. Of a grammar of very many rules that would take too long.
        """
        lazy = self._lazy(source)
        if source.foreign or (len(source.text) > _LARGE and not lazy):
            text = self._compile_apart(source, kind)
            return self._read(text), text
        import xgrammar

        info = self.vocabulary.info
        compiler = xgrammar.GrammarCompiler(
            info, max_threads=1, cache_enabled=False, enable_dynamic_compilation=lazy
        )
        try:
            return compiler.compile_grammar(source.text), None
        except RuntimeError as why:
            raise InvalidRequestError(
                f"This {kind} is refused: {reason(why)}.", setting="so_args.schema"
            ) from why

    def _lazy(self, source: Source) -> bool:
        """Masks are made when a text first needs them, under the device's work."""
        return not source.foreign and source.text.count("\n") > _MANY

    def _compile_apart(self, source: Source, kind: str) -> str:
        task = frames.TAG if source.tag else frames.GRAMMAR
        slow = f"This {kind} takes more than {{}} s to compile."
        answer = self._ask(task, source.text, slow, f"This {kind} is refused")
        cost, _, text = answer.partition("\n")
        seconds, size = json.loads(cost)
        if seconds > self.options.fill_seconds:
            raise _costs(f"This {kind} has so many readings that a token takes {seconds:.1f} s.")
        if size > self.options.max_compiled_bytes:
            raise _costs(f"This {kind} takes {size >> 20} MiB of memory when it is compiled.")
        return text

    def _ask(self, task: bytes, text: str, slow: str, refused: str) -> str:
        """Another process's answer; ``slow`` and ``refused`` say what became of it otherwise."""
        try:
            return self._processes.run(task, text, self.options.compile_seconds)
        except TooSlowError:
            raise _costs(slow.format(f"{self.options.compile_seconds:g}")) from None
        except RefusedError as why:
            raise InvalidRequestError(
                f"{refused}: {str(why).rstrip('.')}.", setting="so_args.schema"
            ) from None

    # Matchers.

    def _matcher(self, compiled: Compiled, spec: Any, ends: frozenset[int]) -> Matcher:
        import xgrammar

        inner = xgrammar.GrammarMatcher(compiled.grammar)
        matcher = Matcher(inner, self._size, ends, compiled.texts)
        if compiled.loose:
            matcher.validate_with(self.vocabulary.tokens, self._validator(spec))
        return matcher

    def _texts(self, source: Source) -> NDArray[np.int32]:
        bits = np.ones(-(-self._size // 32) * 32, np.uint8)
        bits[[i for i in self.vocabulary.special - source.named if i < self._size]] = 0
        return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)

    def _validator(self, spec: Any) -> Callable[[bytes], str | None]:
        def validate(text: bytes) -> str | None:
            question = {"schema": spec.rule, "text": text.decode(errors="replace")}
            slow = "The text takes more than {} s to validate against its schema."
            refused = "The text cannot be validated against its schema"
            return self._ask(frames.VALIDATE, json.dumps(question), slow, refused) or None

        return validate

    def fill(self, jobs: Sequence[MaskJob], rows: NDArray[np.int32]) -> list[int | Exception]:
        return self._masks.fill(jobs, rows)

    def close(self) -> None:
        self._processes.close()


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled grammar, and what a matcher of it must know.

    ``loose``: it allows more than its spec. ``texts`` int32[⌈V/32⌉]: the ids that may be in it,
    where it has free text, which would let special tokens pass.
    """

    grammar: Any
    loose: bool
    texts: NDArray[np.int32] | None


def _costs(message: str) -> InvalidRequestError:
    return InvalidRequestError(
        message,
        setting="so_args.schema",
        next_step="Make it smaller, with less repetition and fewer alternatives that begin alike.",
    )
