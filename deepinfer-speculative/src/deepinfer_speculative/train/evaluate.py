"""What a draft is worth on texts that it has not seen: accepted lengths, acceptance, calibration.

A text of the target is walked as the engine would: a block is drafted, what agrees stands, the next
anchor is the token behind it. At T = 0 the text is the target's own greedy one. At T = 1 the noise
that the target drew with is not known, but its distribution given the token drawn is (truncated
Gumbel variables), and the draft is drawn with noise from there: as under the exact rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_speculative import calibration
from deepinfer_speculative.train.data import Pool
from deepinfer_speculative.train.network import Network


@dataclass(slots=True)
class Rounds:
    """n rounds: ``accepted`` int[n] of ``possible`` int[n] drafts, ``emitted`` int[n] tokens (at a
    text's end the token behind the drafts may be missing), ``logits`` float32[n, γ] of the
    confidence head, ``task`` int[n].
    """

    accepted: NDArray[np.int64]
    possible: NDArray[np.int64]
    emitted: NDArray[np.int64]
    logits: NDArray[np.float32]
    task: NDArray[np.int64]


@torch.no_grad()
def walk(
    network: Network, pool: Pool, head: Tensor, which: NDArray[np.int64], hot: bool, seed: int = 0
) -> Rounds:
    """All rounds of these texts, which were sampled at T = 1 if ``hot``, else greedy."""
    rows: list[tuple[int, int, int, int, NDArray[np.float32]]] = []
    source = torch.Generator(device=head.device).manual_seed(seed)
    block = network.config.block
    for index in which:
        stands, logits = _text(network, pool, head, int(index), source if hot else None)
        at, last = 0, len(stands)  # anchors count from the answer's first token on
        while at < last:
            could = min(block, last - at)
            stood = min(int(stands[at]), could)
            emitted = min(stood + 1, last - at)
            rows.append((stood, could, emitted, int(pool.texts.task[index]), logits[at]))
            at += stood + 1
    columns = tuple(zip(*rows, strict=True))
    accepted, possible, tokens, tasks = (np.array(columns[i], np.int64) for i in range(4))
    return Rounds(accepted, possible, tokens, np.stack(columns[4]), tasks)


def _text(
    network: Network, pool: Pool, head: Tensor, index: int, source: torch.Generator | None
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """For every anchor of one text: drafts that stand, and the block's confidence logits."""
    ids, lengths, joined, final = pool.states(np.array([index]))
    prompt, end, block = int(pool.texts.prompt[index]), int(lengths[0]), network.config.block
    anchors = torch.arange(prompt, end - 1, device=ids.device)
    hidden = network(joined, lengths, anchors[None], ids[:, anchors])[0]
    noise = None if source is None else _noise(final[0], head, ids[0], (prompt, end), source)
    w2 = network.get("markov_head.markov_w2.weight").to(head.dtype)
    before, same, logits = ids[0, anchors], [], []
    for k in range(block):
        e = network.markov(before)
        z = (hidden[:, k] @ head.T).float() + (e.to(head.dtype) @ w2.T).float()
        place = (anchors + k + 1).clamp(max=end - 1)
        if noise is not None:
            z = torch.log_softmax(z, 1) + noise[place - prompt]
        logits.append(network.confidence(hidden[:, k], e))
        before = z.argmax(1)
        same.append((before == ids[0, place]) & (anchors + k + 1 < end))
    stood = torch.stack(same, 1).long().cumprod(1).sum(1)
    return stood.cpu().numpy(), torch.stack(logits, 1).float().cpu().numpy()


def _noise(
    final: Tensor, head: Tensor, ids: Tensor, span: tuple[int, int], source: torch.Generator
) -> Tensor:
    """float32[end − prompt, V]: for each token of the answer, Gumbel noise with which the target
    draws just that token. The greatest score is Gumbel(0); the others are cut off below it.
    """
    prompt, end = span
    logp = torch.log_softmax((final[prompt - 1 : end - 1] @ head.T).float(), 1)
    token = ids[prompt:end, None]
    top = -torch.log(_exponential(logp[:, :1], source))
    score = -torch.log(torch.exp(-top) + _exponential(logp, source) / logp.exp())
    score = score.scatter(1, token, top)
    return score - logp


def _exponential(like: Tensor, source: torch.Generator) -> Tensor:
    return torch.empty_like(like).exponential_(generator=source).clamp(min=1e-30)


def summary(rounds: Rounds, tasks: tuple[str, ...]) -> dict[str, Any]:
    """Accepted length (tokens a round: drafts that stand and the one behind them) in all and by
    task; acceptance of each position given those before it, over rounds that could have had it.
    """
    by_task = {
        name: float(rounds.emitted[rounds.task == i].mean())
        for i, name in enumerate(tasks)
        if (rounds.task == i).any()
    }
    positions = []
    for k in range(rounds.logits.shape[1]):
        asked = (rounds.accepted >= k) & (rounds.possible > k)
        positions.append(float((rounds.accepted[asked] > k).mean()) if asked.any() else None)
    return {
        "rounds": len(rounds.accepted),
        "accepted_length": float(rounds.emitted.mean()),
        "by_task": by_task,
        "acceptance_by_position": positions,
    }


def fit(rounds: Rounds) -> tuple[list[float], dict[str, Any]]:
    """Temperatures from every other whole round, and calibration errors on the remaining ones."""
    whole = rounds.possible == rounds.logits.shape[1]
    found = calibration.fit_halves(rounds.logits[whole], rounds.accepted[whole])
    return list(found.temperatures), {"before": list(found.before), "after": list(found.after)}
