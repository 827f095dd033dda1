"""The toy model of ``fake.py``: plain functions of one text, so that a naive loop can use them too.

An entry of KV depends on every entry before it; logits depend on a summary of all of them; a draw
depends on (logits, seed, position).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from deepinfer.api.plan import RowParams

M64 = (1 << 64) - 1
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
Floats = NDArray[np.float64]


def entry(summary: int, token: int, position: int) -> int:
    """The KV entry of a token after everything that ``summary`` sums up."""
    x = ((summary ^ (token * 0x9E3779B97F4A7C15)) + position * 0xD1B54A32D192ED03) & M64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
    return x ^ (x >> 27)


def attend(summary: int, kv: int, position: int) -> int:
    """The summary with one more entry."""
    return (summary + kv * (2 * position + 1)) & M64


def _uniform(x: int, vocab: int) -> Floats:
    """``vocab`` numbers in (0, 1) that depend on x."""
    h = (np.arange(1, vocab + 1, dtype=np.uint64) * _SPREAD) ^ np.uint64(x)
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: Floats = ((h >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52
    return result


def toy_logits(summary: int, vocab: int) -> Floats:
    """The model: logits from a summary of all entries read."""
    return _uniform(summary, vocab) * 6.0


def process(
    logits: Floats, tokens: Sequence[int], params: RowParams, mask: NDArray[np.bool_] | None
) -> Floats:
    """Bias, presence penalty, allowed ids, minimum length, mask: what needs the brain."""
    z = logits.copy()
    for token, bias in params.logit_bias:
        z[token] += bias
    if params.presence_penalty:
        z[list(set(tokens[params.prompt_len :]))] -= params.presence_penalty
    if params.allowed_token_ids is not None:
        keep = np.zeros(len(z), bool)
        keep[list(params.allowed_token_ids)] = True
        z[~keep] = -np.inf
    if len(tokens) < params.min_len:
        z[list(params.stop_ids)] = -np.inf
    if mask is not None:
        z[~mask] = -np.inf
    return z


def draw(z: Floats, seed: int, position: int, temperature: float) -> int:
    """The sampler: counter noise of (seed, absolute position, id); −1 if nothing is allowed."""
    if not np.isfinite(z).any():
        return -1
    if temperature > 0:
        u = _uniform(entry(seed, position, 7), len(z))
        z = z / temperature - np.log(-np.log(u))
    return int(np.argmax(z))


def candidates(logits: Floats, token: int, count: int) -> tuple[list[int], list[float], int]:
    """The token and the ``count`` best: ids, raw logprobs, the token's rank."""
    raw = logits - logits.max()
    raw = raw - np.log(np.exp(raw).sum())
    order = np.argsort(-raw, kind="stable")[:count].tolist()
    rank = 1 + int((raw > raw[token]).sum())
    return [token, *order], [float(raw[i]) for i in [token, *order]], rank
