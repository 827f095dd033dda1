"""DeepSeek-V4.1's references keep rows apart as they are, in every mode: equal bits in any company.

Dense projections are ``linear``'s business (``test_invariant``); stored ones are here.
"""

import pytest
import torch
from deepinfer.ops.lowbit import BlockScaled
from deepinfer.ops.reference.hyper import split_mix
from deepinfer.ops.table import OpSet

OPS = OpSet({}, "reference")
MOST, STREAMS, WIDTH = 70, 4, 36
COUNTS = [1, 2, 7, 31, 33, 64]


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def stored(kind, *shape):
    *lead, n, k = shape
    generator = torch.Generator().manual_seed(5)
    fp8 = kind == "fp8"
    codes = torch.randint(0, 120, (*lead, n, k if fp8 else k // 2), generator=generator)
    scales = torch.full((*lead, -(-n // 32) if fp8 else n, k // 32), 118)
    return BlockScaled(codes.to(torch.uint8), scales.to(torch.uint8), kind)


def functions(dtype):
    """name -> (rows, function of rows)."""
    x, streams = draw(MOST, 96, dtype=dtype), draw(MOST, STREAMS, WIDTH, dtype=dtype)
    asks, answers = draw(STREAMS, WIDTH, seed=4), draw(STREAMS, WIDTH, seed=5)
    fp8, fp4 = stored("fp8", 300, 96), stored("fp4", 70, 96)
    experts = stored("fp4", 2, 70, 96)

    def grouped(rows):
        return OPS.grouped_scaled_linear(rows, experts, torch.tensor([0, 0, len(rows)]))

    return {
        **{kind: (x, lambda r, k=kind: OPS.quantize(r, k)) for kind in ("fp8", "mxfp4", "nvfp4")},
        "pack_rows": (x, lambda r: OPS.pack_rows(r, "nvfp4")),
        "fp8 linear": (x, lambda r: OPS.scaled_linear(r, fp8)),
        "fp4 linear": (x, lambda r: OPS.scaled_linear(r, fp4)),
        "fp4 experts": (x, grouped),
        "split_mix": (draw(MOST, 24), lambda r: torch.cat([p.flatten(1) for p in mix(r)], 1)),
        "hyper_collapse": (streams, lambda r: OPS.hyper_collapse(r, r[:, :, 0].float())),
        "hyper_merge": (streams, lambda r: OPS.hyper_merge(r, r[:, 0], *of_itself(r))),
        "engram_gate": (
            streams,
            lambda r: OPS.engram_gate(r, r.flip(1), r[:, 0], asks, answers, 1e-20),
        ),
    }


def mix(rows):
    return split_mix(rows, draw(3, seed=6), draw(24, seed=7), 20, 1e-6, STREAMS)


def of_itself(rows):
    """A post and a comb that each row has from its own numbers."""
    wide = rows.float()
    return wide[:, :, 1].contiguous(), wide[:, :, :STREAMS].contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted(functions(torch.float32)))
def test_rows_do_not_see_their_neighbours(dtype, name, rows_apart):
    rows, fn = functions(dtype)[name]
    assert len(rows) == MOST
    rows_apart(rows, fn, COUNTS, 5)
