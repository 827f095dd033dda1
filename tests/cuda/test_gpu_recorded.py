"""On a GPU: whole steps as graphs say what steps in halves say, with drafts and without."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
SPECULATIVE = str(Path(__file__).parents[1] / "speculative")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 64, 200])
@pytest.mark.parametrize("parts", [5, 9], ids=["by the kernel", "by the reference"])
def test_rows_that_replays_append_are_those_of_the_reference(tokens, parts, dtype):
    """Twice in a graph, behind a launch that it overlaps; the last of 200 do not fit."""
    import torch
    from deepinfer.ops.table import table
    from deepinfer_backend_cuda import rows
    from deepinfer_backend_cuda.graphs import Graphs

    device, right = torch.device("cuda"), table()["append_rows"].reference
    source = torch.Generator(device).manual_seed(tokens)
    new = torch.zeros(parts, tokens, 2 * 4096, dtype=getattr(torch, dtype), device=device)
    numbers = torch.zeros(2, tokens, dtype=torch.int64, device=device)
    kept = new.new_zeros(1900, parts * 4096)
    ints, count = numbers.new_full((2, 1900), -1), numbers.new_zeros(1)
    want = [tensor.clone() for tensor in (kept, ints, count)]

    def step():
        made = rows.silu_mul(new).unbind()
        rows.append_rows(made, numbers.unbind(), kept, ints, count)
        rows.append_rows(made[::-1], numbers.flip(0).unbind(), kept, ints, count)
        return made

    replay, made = Graphs(device).capture(step), rows.silu_mul(new).unbind()
    for turn in range(6):  # the first ran while the kernels were compiled
        if turn:
            new.copy_(torch.randn(new.shape, generator=source, device=device))
            numbers.random_(0, 1 << 40, generator=source)
            made = replay()
        right(made, numbers, *want)
        right(made[::-1], numbers.flip(0), *want)
        assert count.tolist() == want[2].tolist() == [2 * tokens * (turn + 1)]
        assert torch.equal(kept, want[0]) and torch.equal(ints, want[1])


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


def asked(count, more=0):
    from deepinfer import SamplingParams

    prompts = [[n % 320 for n in range(5 + i, 9 + 3 * i + more)] for i in range(count)]
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


@pytest.mark.parametrize("count, more", [(24, 0), (1, 600), (3, 250)])
def test_long_prompts_end_in_graphs(tmp_path, rounds, monkeypatch, count, more):
    """A wave of short ones, and long ones alone and beside each other."""
    from deepinfer.testing.tiny import write_tiny_checkpoint
    from deepinfer.worker.recorded import RecordedSteps

    kinds, right = [], RecordedSteps._recorded

    def record(steps, kind, stage):
        kinds.append(kind)
        return right(steps, kind, stage)

    monkeypatch.setattr(RecordedSteps, "_recorded", record)
    wide = {"max_position_embeddings": 1024, "head_dim": 128}
    model = write_tiny_checkpoint(tmp_path, "llama", overrides=wide)
    how = {"dtype": "bfloat16", "max_num_seqs": 40, "max_model_len": 1024}
    how |= {"kv_cache_memory": "64MiB", "enable_prefix_caching": False}
    whole, halves, recorded = rounds(model, *asked(count, more), **how)
    assert whole == halves and recorded > 1
    assert max(kind.more for kind in kinds) >= 512


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
