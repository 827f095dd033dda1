"""Sampling ops: from logits to ids. Rows are independent of each other bit for bit.

Every sum over the vocabulary is a fixed tree of elementwise additions (``_tree_sum``): torch may
split a reduction by threads or by the number of rows, elementwise work it cannot reorder. Rows are
taken in blocks, so that working memory does not grow with their number.

NaN logits count as −inf. Ties go to the lower id everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from deepinfer.ops.table import op
from deepinfer.sampling.philox import gumbel

_BLOCK_ELEMENTS = 1 << 18  # elements of one block of rows: 1 MiB in float32, so it stays in cache
_NO_ID = torch.iinfo(torch.int64).max
_CANDIDATES = 256  # top-k and top-p rarely leave more; where they do, the whole row is ordered


@op
def logit_bias(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """``logits[rows[i], ids[i]] += values[i]``, in place; returns ``logits``.

    rows, ids int64[k]; values float32[k], −inf forbids an id. An entry with row −1 is ignored.
    Entries for the same place add up.
    """
    values = torch.where(rows < 0, 0.0, values)
    return logits.index_put_((rows.clamp(min=0), ids), values, accumulate=True)


@op
def penalties(
    logits: Tensor,
    tokens: Tensor,
    prompt_len: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> Tensor:
    """Penalise what a row's text already holds, in place; returns ``logits``.

    tokens int64[m, L]: each row's text, prompt included, −1 behind its end; prompt_len int64[m];
    the rest float32[m]. An id of the text has its logit divided by ``repetition`` if positive,
    else multiplied; then each id of the output (positions >= prompt_len) loses
    ``frequency · its count + presence``. Neutral parameters (0, 0, 1) change no bit.
    """
    if tokens.shape[1] == 0:
        return logits
    real = tokens >= 0
    # Padding repeats the row's first token: the same id always gets the same value.
    ids = torch.where(real, tokens, tokens[:, :1]).clamp(min=0)
    output = torch.arange(tokens.shape[1], device=tokens.device) >= prompt_len[:, None]
    counted = torch.where(real & output, tokens, _NO_ID).sort(1).values
    count = torch.searchsorted(counted, ids, right=True) - torch.searchsorted(counted, ids)
    z, factor = logits.gather(1, ids), repetition[:, None]
    new = torch.where(z > 0, z / factor, z * factor)
    new = new - frequency[:, None] * count - presence[:, None] * (count > 0)
    return logits.scatter_(1, ids, torch.where(real[:, :1], new, z))


@op
def apply_bitmask(logits: Tensor, bitmask: Tensor, index: Tensor) -> Tensor:
    """Forbid ids, in place; returns ``logits``.

    bitmask int32[k, W]: bit v % 32 of word v // 32 is set if id v is allowed; ids behind the last
    word (a padded vocabulary) are forbidden. index int64[k]: whose row each mask is, −1 nobody's;
    a row may have several masks, which all hold.
    """
    vocab = logits.shape[1]
    width = min(vocab, bitmask.shape[1] * 32)
    bit = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    for block in _blocks(bitmask, width):
        rows = index[block]
        banned = ((bitmask[block, :, None] >> bit) & 1).flatten(1)[:, :width] == 0
        fill = torch.zeros((len(rows), vocab), dtype=logits.dtype, device=logits.device)
        fill[:, width:] = -torch.inf
        fill[:, :width].masked_fill_(banned, -torch.inf)
        fill.masked_fill_(rows[:, None] < 0, 0.0)
        logits.index_add_(0, rows.clamp(min=0), fill)
    return logits


@op
def filter_top(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Logits float32[m, V] with −inf for removed ids; the others are unchanged (not scaled).

    temperature, top_p, min_p float32[m]; top_k int64[m]. Per row, over p = softmax(z/T): keep the
    ``top_k`` best (<= 0: all); of those, renormalised, the fewest best whose sum reaches ``top_p``
    (>= 1: all), at least one; of those, what has at least ``min_p`` of the best one's probability
    (0: all). A row with T = 0 stays untouched. Probabilities and sums are float64.
    """
    out, vocab = logits.clone(), logits.shape[1]
    used = (temperature != 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    for block in _blocks(logits):
        rows = block.start + used[block].nonzero()[:, 0]
        for width in (min(_CANDIDATES, vocab), vocab):
            if len(rows) == 0:
                break
            how = (temperature[rows], top_k[rows], top_p[rows], min_p[rows])
            count, ids = _survivors(_no_nan(logits[rows]), *how, width)
            lead = torch.arange(width, device=ids.device) < count[:, None]
            kept = torch.where(lead, logits[rows[:, None], ids], -torch.inf)
            out[rows] = torch.full_like(logits[rows], -torch.inf).scatter_(1, ids, kept)
            # Survivors lead the order: if not all candidates survive, nothing behind them does.
            sure = (top_k[rows] <= width) & ((count < width) | (top_k[rows] == width))
            rows = rows[~sure]
    return out


def _survivors(
    z: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """The ``width`` best ids of each row in order, and how many of them survive: int64[r]."""
    best, ids = _best(z, width)
    peak, all_k = best[:, :1], (top_k <= 0)[:, None]
    weight = _weights(best, peak, temperature)  # the best one's is 1
    sums = _running_sum(weight)
    total = sums.gather(1, top_k.clamp(1, width)[:, None] - 1)
    if bool((all_k[:, 0] & (top_p < 1)).any()):
        total = torch.where(all_k, _tree_sum(_weights(z, peak, temperature))[:, None], total)
    keep = all_k | (torch.arange(width, device=z.device) < top_k[:, None])
    keep &= (sums - weight < top_p.double()[:, None] * total) | (top_p >= 1)[:, None]
    keep &= weight >= min_p.double()[:, None]
    keep[:, 0] = True
    return keep.sum(1), ids


def _weights(z: Tensor, peak: Tensor, temperature: Tensor) -> Tensor:
    """exp(z/T − peak/T): quotients float32, exp float64; 1 where z is the peak, even infinite."""
    t = temperature[:, None]
    distance = torch.where(z == peak, 0.0, z / t - peak / t)
    return distance.double().exp_()


@op
def gumbel_argmax(logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """int64[m]: the id with the highest z/T + G(seed, position, id); at T = 0 the highest logit.

    logits float32[m, V], temperature float32[m], seed and position int64[m] (64 bits; absolute
    position of the token being drawn). G as ``sampling.philox.gumbel``. A row in which nothing
    is above −inf gives 0.
    """
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for block in _blocks(logits):
        score, t = _no_nan(logits[block]), temperature[block]
        hot = t.nonzero()[:, 0]
        if len(hot):
            noise = gumbel(seed[block][hot], position[block][hot], score.shape[1])
            score[hot] = score[hot] / t[hot, None] + noise
        out[block] = score.argmax(1)  # the first of equals
    return out


@op
def logprobs(logits: Tensor, k: int, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-softmax of the best k ids and of a chosen one.

    logits float32[m, V]; 0 <= k <= V; chosen int64[m]. Returns (top_ids int32[m, k], top_values
    float32[m, k], chosen_value float32[m], chosen_rank int32[m]), best first; ranks start at 1.
    """
    rows = len(logits)
    top_ids = torch.empty((rows, k), dtype=torch.int32, device=logits.device)
    top_values = torch.empty((rows, k), dtype=torch.float32, device=logits.device)
    chosen_value = torch.empty(rows, dtype=torch.float32, device=logits.device)
    chosen_rank = torch.empty(rows, dtype=torch.int32, device=logits.device)
    ids = torch.arange(logits.shape[1], device=logits.device)
    for block in _blocks(logits):
        values = _log_softmax(logits[block])
        top_values[block], top_ids[block] = _best(values, k)
        pick = chosen[block, None]
        mine = values.gather(1, pick)
        before = (values > mine) | ((values == mine) & (ids < pick))
        chosen_value[block] = mine[:, 0]
        chosen_rank[block] = before.sum(1) + 1
    return top_ids, top_values, chosen_value, chosen_rank


@op
def accept_prefix(sampled: Tensor, drafts: Tensor, lengths: Tensor) -> Tensor:
    """How many tokens each row emits: 1 + the leading drafts that equal what was sampled.

    sampled int64[R, 1+γ], drafts int64[R, γ], lengths int64[R] in 0 … γ: the drafts that were
    verified. Returns int64[R] in 1 … 1 + lengths.
    """
    gamma = drafts.shape[1]
    verified = torch.arange(gamma, device=drafts.device) < lengths[:, None]
    same = (sampled[:, :gamma] == drafts) & verified
    return 1 + same.long().cumprod(1).sum(1)


def _blocks(rows: Tensor, width: int | None = None) -> Iterator[slice]:
    """Slices of rows whose [rows, width] working set is bounded."""
    size = max(1, _BLOCK_ELEMENTS // max(width or rows.shape[1], 1))
    for begin in range(0, len(rows), size):
        yield slice(begin, min(begin + size, len(rows)))


def _best(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of each row in order and their ids int64, ties to the lower id; no NaN in z.

    A float32 and its id become one int64 key that orders as wanted, so that no two are equal and
    any top-k gives the same answer.
    """
    if k == 0:
        return z[:, :0], torch.empty((len(z), 0), dtype=torch.int64, device=z.device)
    values, ids = z.topk(k, dim=1)
    if bool(((z >= values[:, -1:]).sum(1) != k).any()):  # the last of them ties with others
        ids = torch.arange(z.shape[1], device=z.device).expand_as(z)
        values = z
    bits = (values + 0.0).view(torch.int32)  # −0 ties with 0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (order.long() << 32) | (0xFFFFFFFF - ids)
    ids = 0xFFFFFFFF - (keys.topk(k, dim=1).values & 0xFFFFFFFF)
    return z.gather(1, ids), ids


def _no_nan(logits: Tensor) -> Tensor:
    return torch.where(logits.isnan(), -torch.inf, logits)


def _log_softmax(logits: Tensor) -> Tensor:
    z = _no_nan(logits)
    z = z - z.amax(1, keepdim=True)
    return z - _tree_sum(z.exp()).log()[:, None]


def _tree_sum(x: Tensor) -> Tensor:
    """Sum over dimension 1 by halving: the order of additions depends on the width only."""
    while x.shape[1] > 1:
        half = (x.shape[1] + 1) // 2
        low = x[:, :half].clone()
        low[:, : x.shape[1] - half] += x[:, half:]
        x = low
    return x[:, 0]


def _running_sum(x: Tensor) -> Tensor:
    """Inclusive prefix sums over dimension 1 by doubling: again only elementwise additions."""
    step = 1
    while step < x.shape[1]:
        x = torch.cat((x[:, :step], x[:, step:] + x[:, :-step]), 1)
        step *= 2
    return x
