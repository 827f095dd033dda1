"""SmolLM2 against recorded outputs of transformers.

Weights rounded to bfloat16, float32 arithmetic. Greedy ids of all five prompts equal over 48
tokens; top-5 log-probabilities within 1e-3 (measured: 1.6e-4; the file is rounded to 1e-4).
"""

import importlib.util

import pytest
import torch
from deepinfer.api.backend import OpContext
from deepinfer.ops.backend import ReferenceBackend
from deepinfer.testing.textbook import TextbookRunner

pytestmark = pytest.mark.model

# The reference streams float32 weights through plain torch: one prompt is enough to hold it.
PROMPTS = {"cpu": range(5), "reference": range(1)}


@pytest.fixture(scope="module", params=PROMPTS)
def runner(request, demo_gguf):
    if request.param == "cpu":
        if importlib.util.find_spec("deepinfer.native._kernels") is None:
            pytest.skip("the native kernels are not built")
        from deepinfer.native.backend import NativeCPUBackend

        backend = NativeCPUBackend()
    else:
        backend = ReferenceBackend()
    ctx = OpContext(dtype=torch.float32, device=torch.device("cpu"), num_threads=2)
    return TextbookRunner(demo_gguf, backend, ctx, round_to=torch.bfloat16)


def test_greedy_ids_and_logprobs(runner, smollm2_golden):
    for index in PROMPTS[runner.backend.name]:
        case = smollm2_golden["cases"][index]
        ids, logits = runner.greedy(case["input_ids"], len(case["output_ids"]))
        assert ids == case["output_ids"]
        logprobs = logits.log_softmax(-1)
        for row, best in zip(logprobs, case["top5_logprobs"], strict=True):
            wanted = torch.tensor([value for _, value in best])
            got = row[[token for token, _ in best]]
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-3)


def test_a_tied_table_is_held_once(runner):
    """Embedding and head share 49152 · 576 values."""
    assert runner.model.head.weight is runner.model.embed.weight
    assert 134e6 * 4 < runner.bytes < 136e6 * 4
