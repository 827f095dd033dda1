"""On a GPU: whole steps as graphs say what steps in halves say, with drafts and without."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
SPECULATIVE = str(Path(__file__).parents[1] / "speculative")


@pytest.fixture
def rounds(monkeypatch):
    """What an engine says with whole graphs and without, and how many were recorded."""
    from deepinfer import LLM
    from deepinfer.worker import recorded as steps
    from deepinfer_backend_cuda.device import CudaDevice

    monkeypatch.setattr(steps, "WISHED", 3)  # smaller steps have graphs of their own, too
    right, recorded = CudaDevice.record, []

    def record(device, fn):
        recorded.append(fn)
        return right(device, fn)

    def both(model, prompts, params, planner=None, **how):
        how = {"max_model_len": 128, "kv_cache_memory": "32MiB", "backend": "cuda", **how}
        found = []
        for way in (record, None):
            with monkeypatch.context() as patch:
                if way is None:
                    patch.delattr(CudaDevice, "record")
                else:
                    patch.setattr(CudaDevice, "record", way)
                with LLM(str(model), **how) as llm:
                    if planner:
                        llm.assembly.engine.scheduler.planner = planner()
                    asked = [{"prompt_token_ids": ids} for ids in prompts]
                    outs = [out for _ in range(3) for out in llm.generate(asked, params)]
            assert all(out.error is None for out in outs)
            found.append([list(out.outputs[0].token_ids) for out in outs])
        return *found, len(recorded)

    return both


def asked(count):
    from deepinfer import SamplingParams

    prompts = [list(range(5 + i, 9 + 3 * i)) for i in range(count)]
    kinds = [{"temperature": 0}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.8, "top_k": 9}]
    params = [
        SamplingParams(**{"seed": i, **kinds[i % 3]}, max_tokens=9 + 7 * (i % 5), ignore_eos=True)
        for i in range(count)
    ]
    return prompts, params


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_texts_are_those_of_steps_in_halves(tmp_path, rounds, dtype, family):
    from deepinfer.testing.tiny import write_tiny_checkpoint

    model = write_tiny_checkpoint(tmp_path, family)
    whole, halves, recorded = rounds(model, *asked(19), dtype=dtype, max_num_seqs=13)
    assert whole == halves and recorded > 3


@pytest.mark.parametrize("mode", ["static", "adaptive", "at random"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafts_change_no_text(tmp_path, rounds, monkeypatch, dtype, mode):
    pytest.importorskip("deepinfer_speculative")
    monkeypatch.syspath_prepend(SPECULATIVE)
    from dspark_rig import Moody, pair

    model, draft = pair(tmp_path, "llama")
    how = {"dtype": dtype, "max_num_seqs": 7, "batch_invariant": True}
    plain, _, _ = rounds(model, *asked(11), **how)
    planner, mode = (Moody, "static") if mode == "at random" else (None, mode)
    how["speculative"] = {"model": str(draft), "mode": mode}
    whole, halves, recorded = rounds(model, *asked(11), planner=planner, **how)
    assert whole == halves == plain and recorded > 3
