"""The other process: compiles foreign grammars and validates texts, where it can be ended.

Where you are: on the far side of ``processes.py``, which starts this with ``main`` and kills it
when a grammar takes too long. xgrammar's compiler cannot be interrupted, and neither can a regular
expression of Python's that goes back and forth without end.
"""

from __future__ import annotations

import json
import random
import re
import signal
import sys
import time
from typing import Any

from deepinfer_structured import frames
from deepinfer_structured.endless import endless_rules

_TRIAL = 48  # tokens
_NAMED = 3  # rules in a message
_OWN = re.compile(
    r"^\[[\d:]+\] \S+:\d+: (Check failed: .*? is false: )?"
    r"(Invalid structural tag error: |EBNF \w+ error (?=at ))?"
)
_MEMORY = 2 << 30  # bytes that a grammar may need beyond what xgrammar itself does


def main() -> None:
    """Answer frames until the other side closes the pipe."""
    incoming, outgoing = sys.stdin.buffer, sys.stdout.buffer
    work = _Work()
    while (frame := frames.receive(incoming)) is not None:
        kind, text = frame
        seconds, _, text = text.partition("\n")
        try:
            bound_time(float(seconds))
            answer = work.answer(kind, text)
        except MemoryError:
            frames.send(outgoing, frames.REFUSAL, "it needs too much memory")
        except Exception as why:
            frames.send(outgoing, frames.REFUSAL, reason(why))
        else:
            frames.send(outgoing, frames.ANSWER, answer)
        bound_time(0)


class _Work:
    def __init__(self) -> None:
        self._info: Any = None

    def answer(self, kind: bytes, text: str) -> str:
        """What a frame asks for; raises what it is refused with."""
        if kind == frames.VALIDATE:
            from deepinfer_structured.validation import first_violation

            question = json.loads(text)
            return first_violation(question["schema"], question["text"]) or ""
        if kind == frames.VOCABULARY:
            import xgrammar

            self._info = xgrammar.TokenizerInfo.deserialize_json(text)
            bound_memory(_MEMORY)
            return ""
        import xgrammar

        compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        if kind == frames.TAG:
            compiled: Any = compiler.compile_structural_tag(text)
            check_ends(compiled.grammar)
        else:
            grammar = xgrammar.Grammar.from_ebnf(text)
            check_ends(grammar)
            compiled = compiler.compile_grammar(grammar)
        slowest = slowest_mask(compiled, self._info.vocab_size)
        cost = json.dumps([slowest, compiled.memory_size_bytes])
        return f"{cost}\n{compiled.serialize_json()}"


def check_ends(grammar: Any) -> None:
    """Raise ValueError where a rule of an ``xgrammar.Grammar`` never comes to an end."""
    endless = endless_rules(str(grammar))
    if endless:
        names = ", ".join(map(repr, endless[:_NAMED])) + ", …" * (len(endless) > _NAMED)
        raise ValueError(f"no text of its rule {names} ever ends")


def slowest_mask(compiled: Any, vocab_size: int) -> float:
    """Seconds of the slowest mask along a few random texts.

    A grammar that can be read in many ways at once compiles quickly and costs at every token.

    Raises:
        ValueError: a text can go no further and is not complete.
    """
    import numpy as np
    import xgrammar

    draw, worst = random.Random(0), 0.0
    row = np.empty((1, -(-vocab_size // 32)), np.int32)
    for _ in range(2):
        matcher = xgrammar.GrammarMatcher(compiled)
        for length in range(_TRIAL):
            start = time.thread_time()
            matcher.fill_next_token_bitmask(row, 0)
            worst = max(worst, time.thread_time() - start)
            bits = np.unpackbits(row.view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[:vocab_size])
            if not len(allowed) and not matcher.is_completed():
                raise ValueError(f"no token may follow the {length} that it has allowed so far")
            if not len(allowed) or not matcher.accept_token(int(draw.choice(allowed))):
                break
    return worst


def bound_time(seconds: float) -> None:
    """End this process when it has worked for so long: by its own time, which a busy machine does
    not use up for it. 0 takes the bound away.
    """
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def bound_memory(more: int) -> None:
    """Let this process grow by ``more`` bytes and no further, where the platform can say so."""
    try:
        import resource

        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (now + more, hard))
    except (ImportError, OSError, ValueError):
        return


def reason(why: Exception) -> str:
    """xgrammar's messages without the time, and the place and condition in its own source."""
    text = str(why).strip().splitlines()
    line = next((part for part in text if part.strip()), type(why).__name__)
    line = _OWN.sub("", line).strip()
    return f"{line} the end" if line.endswith("but got") else line
