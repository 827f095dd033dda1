"""Grammars at work, through xgrammar over a vocabulary of single bytes."""

from __future__ import annotations

import random

import xgrammar

END = 256
INFO = xgrammar.TokenizerInfo(
    [bytes([byte]) for byte in range(256)] + [b"</s>"],
    xgrammar.VocabType.RAW,
    vocab_size=257,
    stop_token_ids=[END],
)


def compiled(ebnf: str) -> xgrammar.CompiledGrammar:
    """As the plugin compiles it."""
    compiler = xgrammar.GrammarCompiler(INFO, max_threads=1, cache_enabled=False)
    return compiler.compile_grammar(ebnf)


def accepts(grammar: xgrammar.CompiledGrammar, text: str) -> bool:
    """Whether a text is one of the grammar's: all of it, and the end may follow."""
    matcher = xgrammar.GrammarMatcher(grammar)
    return matcher.accept_string(text.encode()) and matcher.accept_token(END)


def walk(grammar: xgrammar.CompiledGrammar, rng: random.Random, steps: int = 600) -> str | None:
    """A random text of the grammar; None if the walk did not come to an end.

    After half of the steps it ends as soon as it can, and prefers bytes that close something.
    """
    matcher = xgrammar.GrammarMatcher(grammar)
    mask = xgrammar.allocate_token_bitmask(1, INFO.vocab_size)
    out = bytearray()
    for step in range(steps):
        matcher.fill_next_token_bitmask(mask)
        allowed = [t for t in range(257) if mask[0, t // 32].item() >> (t % 32) & 1]
        late = step > steps // 2 or step > rng.randrange(steps)
        if END in allowed and (len(allowed) == 1 or late or rng.random() < 0.3):
            return out.decode()
        allowed = [t for t in allowed if t != END]
        closing = [t for t in allowed if t in b'"]}'] if late or rng.random() < 0.3 else []
        plain = [t for t in allowed if t < 128 and t not in b" \n\t\\"]
        some = closing or (plain if rng.random() < 0.8 else []) or allowed
        token = rng.choice(some)
        assert matcher.accept_token(token)
        out.append(token)
    return None
