"""Every dense and MoE family on tiny random checkpoints against transformers, float32.

Tolerance: 5e-6 of the largest logit. Measured: at most 4e-6 with the references, whose rotary table
is computed in float64 where transformers computes it in float32.
"""

import importlib.util

import pytest
import torch
from deepinfer.api.backend import OpContext
from deepinfer.ops.backend import ReferenceBackend
from deepinfer.testing.textbook import TextbookRunner
from deepinfer.testing.tiny import FAMILIES, VOCAB, write_tiny_checkpoint

CPU = torch.device("cpu")
TOLERANCE = 5e-6
IDS = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(5)).tolist()


def runner(path, backend="reference", **ctx):
    if backend == "cpu":
        if importlib.util.find_spec("deepinfer.native._kernels") is None:
            pytest.skip("the native kernels are not built")
        from deepinfer.native.backend import NativeCPUBackend

        made = NativeCPUBackend()
    else:
        made = ReferenceBackend()
    ctx = OpContext(**{"dtype": torch.float32, "device": CPU, "page_size": 4, **ctx})
    return TextbookRunner(path, made, ctx, max_model_len=128)


@pytest.fixture(scope="module", params=FAMILIES)
def path(request, tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp(request.param), request.param, seed=1)


@pytest.fixture(scope="module")
def oracle(path):
    """(logits of IDS, 20 greedy ids after them) from transformers."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0]
        ids = list(IDS)
        for _ in range(20):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return logits, ids[len(IDS) :]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("invariant", [False, True])
def test_logits_and_greedy_ids_equal_transformers(path, oracle, backend, invariant):
    ours = runner(path, backend, invariant=invariant)
    logits, ids = oracle
    got = ours.logits(IDS)
    assert got.dtype == torch.float32 and got.shape == (len(IDS), VOCAB)
    assert float((got - logits).abs().max()) <= TOLERANCE * float(logits.abs().max())
    assert ours.greedy(IDS, 20)[0] == ids


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_chunks_change_no_bit(path, backend, dtype):
    ours = runner(path, backend, invariant=True, dtype=dtype)
    whole = ours.hidden(IDS)
    assert not whole.isnan().any()
    for chunks in ([1] * 40, [7, 1, 16, 16], [39, 1]):
        assert torch.equal(ours.hidden(IDS, chunks), whole)
    assert torch.equal(ours.hidden(IDS, first_page=3), whole)


def test_int8_backends_agree_and_stay_near(path):
    """Measured on these tiny random models: within 7 % of float32.

    The backends' products agree to float32 rounding (``tests/core/native`` holds them to it). Over
    a model they differ by more: a row value at a rounding border falls to either side of it.
    """
    full = runner(path).logits(IDS)
    packed = runner(path, quantization="int8").logits(IDS)
    native = runner(path, "cpu", quantization="int8").logits(IDS)
    if "moe" not in path.name:  # there, a choice of experts may flip
        assert float((full - packed).norm()) < 0.1 * float(full.norm())
        assert float((native - packed).norm()) < 0.05 * float(full.norm())
    assert bool(native.isfinite().all())


def test_taps_get_the_residual_stream(path):
    class Taps:
        layers = (0, 2)

        def __init__(self):
            self.rows = {}

        def put(self, layer, hidden):
            self.rows[layer] = hidden

    ours, taps = runner(path), Taps()
    hidden = ours.hidden(IDS, taps=taps)
    assert set(taps.rows) == {0, 2}
    assert torch.equal(taps.rows[2], hidden)  # the last layer's
    assert not torch.equal(taps.rows[0], hidden)
