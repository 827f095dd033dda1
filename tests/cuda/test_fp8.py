"""FP8 weights: nearest codes at the least scale; products have the bits of the decoded weight."""

import pytest
import torch
from tested import NEEDS_TRITON

CODES = torch.arange(256).to(torch.uint8)
VALUES = CODES.view(torch.float8_e4m3fn).float()
VALUES = VALUES[VALUES.isfinite()]


@pytest.fixture
def fp8(sources):
    return pytest.importorskip("deepinfer_backend_cuda.fp8", reason="needs Triton")


@pytest.mark.parametrize("shape", [(32, 32), (70, 96), (1, 1), (33, 65), (3, 40, 50)])
def test_values_are_the_nearest_at_the_least_scale(fp8, shape):
    source = torch.Generator().manual_seed(1)
    spread = torch.randint(-9, 6, shape, generator=source)
    w = torch.randn(shape, generator=source) * 2.0**spread
    found = fp8.block_scaled(w.bfloat16())
    w = w.bfloat16().float()
    assert found.shape == w.shape
    got = found.dequantize()
    for index in range(w.flatten(0, -3).shape[0] if w.dim() > 2 else 1):
        one, decoded = (t.reshape(-1, *t.shape[-2:])[index] for t in (w, got))
        scales = found.scales.reshape(-1, *found.scales.shape[-2:])[index]
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                part = one[32 * i : 32 * i + 32, 32 * j : 32 * j + 32]
                unit = 2.0 ** (int(scales[i, j]) - 127)
                assert part.abs().max() <= 448 * unit, "the tile's largest does not fit"
                assert part.abs().max() > 224 * unit, "half the scale would do"
                nearest = (VALUES * unit - part[..., None]).abs().amin(-1)
                mine = decoded[32 * i : 32 * i + 32, 32 * j : 32 * j + 32]
                assert torch.equal((mine - part).abs(), nearest)


def test_zeros_stay_and_what_is_not_finite_is_refused(fp8):
    assert not fp8.block_scaled(torch.zeros(40, 40)).dequantize().any()
    for odd in (float("nan"), float("inf")):
        w = torch.ones(40, 40)
        w[3, 35] = odd
        with pytest.raises(ValueError, match="not finite"):
            fp8.block_scaled(w)


@pytest.mark.parametrize("use", ["embedding", "route", "hyper_mix", "compress"])
def test_what_decides_or_is_looked_up_in_is_left_alone(fp8, use):
    w = torch.ones(64, 128, dtype=torch.bfloat16)
    assert fp8.prepare(w, frozenset({use, "linear"})) is w
    assert fp8.prepare(w, frozenset({"linear"})).nbytes < 0.6 * w.nbytes


def test_float32_rows_are_refused_by_name(sources):
    pytest.importorskip("triton")
    from deepinfer.api import OpContext
    from deepinfer.errors import UnsupportedError
    from deepinfer_backend_cuda.backend import CudaBackend

    context = OpContext(dtype=torch.float32, device=torch.device("cpu"), quantization="fp8")
    with pytest.raises(UnsupportedError, match="bfloat16") as caught:
        CudaBackend().provide(context)
    assert caught.value.setting == "dtype"


@NEEDS_TRITON
def test_products_have_the_bits_of_the_decoded_weight(script):
    assert script("quantized.py", TRITON_INTERPRET="1").endswith("0 wrong\n")
