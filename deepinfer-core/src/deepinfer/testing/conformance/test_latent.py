"""Latent attention's rows belong to texts: a text alone and cut anywhere has the batch's own bits.

Asked of the ops in ``facts().invariant``, on what ``provide`` returns for an invariant engine.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from deepinfer.api.model import DeviceBatch
from deepinfer.ops.reference.latent import Window, ring_slots
from deepinfer.ops.reference.scaled import quantize
from deepinfer.ops.reference.sparse import Blocks
from deepinfer.testing.conformance.draw import Draw
from deepinfer.testing.conformance.kit import Kit, Run, same_bits, tensors
from deepinfer.testing.conformance.latents import Latents, Text

TEXTS = [Text(3, 5), Text(33, 12), Text(1, 20)]
WIDTH, RING = 64, 48


class Inputs(NamedTuple):
    """Rows of a step, and the caches that its texts share."""

    at: Latents
    q: Tensor
    own: Tensor
    index_q: Tensor
    weights: Tensor
    pairs: Tensor
    sink: Tensor
    compressed: Tensor
    index_keys: Tensor

    @classmethod
    def make(cls, run: Run) -> Inputs:
        run.draw = Draw(run.dtype, seed=5)
        at, draw = Latents(run, TEXTS), run.draw
        return cls(
            at=at,
            q=run.put(draw.normal(at.rows, 3, WIDTH)),
            own=run.put(quantize(draw.normal(at.rows, WIDTH), "fp8")),
            index_q=run.put(quantize(draw.normal(at.rows, 2, 32), "mxfp4")),
            weights=run.put(draw.wide(at.rows, 2)),
            pairs=run.put(draw.wide(at.rows, 2, WIDTH)),
            sink=run.put(draw.wide(3)),
            compressed=at.growing(WIDTH, 1, "nvfp4", True),
            index_keys=at.growing(32, 1, "mxfp4", True),
        )

    def step(
        self, run: Run, batch: DeviceBatch, rows: slice, ring: Tensor, state: Tensor
    ) -> list[Tensor]:
        """Everything that some rows give; their latents and open groups are left behind."""
        picks = run.ops.select_sparse(
            self.index_q[rows], self.weights[rows], self.index_keys, batch, 1, 6, Blocks(3, 4)
        )
        own = self.own[rows]
        o: Any = run.ops.latent_attention(
            self.q[rows],
            Window(own, ring, batch, 8, False),
            batch,
            self.sink,
            WIDTH**-0.5,
            self.compressed,
            picks.entries,
        )
        run.ops.latent_write(own, ring, ring_slots(batch, RING), "fp8")
        u, s = self.pairs[rows].unbind(1)
        return tensors((picks, o, run.ops.compress(u, s, state, batch)))


@pytest.mark.parametrize("chunk", [1, 2, 5, 16, 33])
def test_texts_are_bitwise_equal_in_chunks(kit: Kit, dtype: str, chunk: int) -> None:
    """Alone, in chunks, one by one: the bits of the whole batch."""
    needed = {"select_sparse", "latent_attention", "latent_write", "compress"}
    if not needed <= kit.claims():
        pytest.skip(f"{sorted(needed - kit.claims())} are not claimed to be invariant")
    run = kit.run(dtype, invariant=True)
    with torch.inference_mode():
        given = Inputs.make(run)
        ring, state = given.at.ring(WIDTH, RING, True), given.at.open(WIDTH, 2)
        everything = slice(0, given.at.rows)
        whole = given.step(run, given.at.batch, everything, ring.clone(), state.clone())
        first = 0
        for text, of in enumerate(TEXTS):
            mine, left = ring.clone(), state.clone()
            for begin in range(0, of.rows, chunk):
                end = min(begin + chunk, of.rows)
                rows = slice(first + begin, first + end)
                batch = given.at.part(text, begin, end)
                got = given.step(run, batch, rows, mine, left)
                for one, all_of_it in zip(got, whole, strict=True):
                    same = same_bits(one, all_of_it[rows])
                    assert same, f"text {text}, rows {begin} to {end}"
            first += of.rows
