"""Random texts of a grammar, character by character."""

import random

import xgrammar


def compiled(ebnf, letters):
    """A grammar over a vocabulary of single characters, and the mask it fills."""
    info = xgrammar.TokenizerInfo([*letters, "</s>"], stop_token_ids=[len(letters)])
    return xgrammar.GrammarCompiler(info).compile_grammar(ebnf)


def walk(grammar, letters, rng: random.Random, longest=100_000):
    """A random text; where it may end it does, half the time."""
    matcher = xgrammar.GrammarMatcher(grammar)
    mask = xgrammar.allocate_token_bitmask(1, len(letters) + 1)
    text, end = "", len(letters)
    while len(text) < longest:
        matcher.fill_next_token_bitmask(mask)
        words = mask[0].tolist()
        allowed = [i for i in range(end + 1) if words[i // 32] >> (i % 32) & 1]
        if allowed == [end] or (end in allowed and rng.random() < 0.5):
            return text
        token = rng.choice([i for i in allowed if i != end])
        assert matcher.accept_token(token)
        text += letters[token]
    raise AssertionError("it does not come to an end")
