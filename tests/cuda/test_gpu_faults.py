"""On a GPU: what goes wrong in one place stays there, or ends with one clear error."""

import json
import logging

import pytest
import torch

pytestmark = pytest.mark.gpu
IDS = 7, 300
"""The broken id, and one past those that prompts use."""


@pytest.fixture
def open_llm():
    """An engine on the GPU; closed behind the test."""
    from deepinfer import LLM

    opened = []

    def make(model, **how):
        how = {"max_num_seqs": 16, "max_model_len": 256, "kv_cache_memory": "64MiB", **how}
        opened.append(LLM(str(model), backend="cuda", **how))
        return opened[-1]

    yield make
    for llm in opened:
        llm.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_nan_ends_its_own_request_and_nothing_else(tmp_path, open_llm, dtype):
    """In the prompt of one of nine; and its pages are used by others afterwards."""
    from deepinfer import SamplingParams
    from deepinfer.errors import ModelFaultError
    from deepinfer.testing.tiny import write_tiny_checkpoint
    from safetensors.torch import load_file, save_file

    sound = write_tiny_checkpoint(tmp_path / "sound")
    ill = write_tiny_checkpoint(tmp_path / "ill")
    tensors = load_file(ill / "model.safetensors")
    tensors["model.embed_tokens.weight"][IDS[0]] = float("nan")
    save_file(tensors, ill / "model.safetensors", metadata={"format": "pt"})
    prompts = [list(range(20 + i, 50 + 2 * i)) for i in range(9)]
    hit = [p if i != 4 else [*p[:11], IDS[0], *p[11:]] for i, p in enumerate(prompts)]
    params = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, logit_bias={IDS[0]: -100.0}
    )

    def texts(llm, asked):
        return llm.generate([{"prompt_token_ids": p} for p in asked], params)

    want = [list(o.outputs[0].token_ids) for o in texts(open_llm(sound, dtype=dtype), prompts)]
    llm = open_llm(ill, dtype=dtype)
    for _ in range(3):
        got = texts(llm, hit)
        assert [i for i, o in enumerate(got) if o.error is not None] == [4]
        assert isinstance(got[4].error, ModelFaultError)
        for i in (0, 1, 2, 3, 5, 6, 7, 8):
            assert list(got[i].outputs[0].token_ids) == want[i]
        again = texts(llm, prompts)
        assert [list(o.outputs[0].token_ids) for o in again] == want


WIDE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000,
    "hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 2,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096, "hidden_act": "silu", "rope_theta": 1e4,
}  # fmt: skip


def test_memory_that_runs_out_within_a_step_costs_time_and_no_text(tmp_path, open_llm, caplog):
    """Real shortage: the allocator may take some megabytes more than weights and KV have."""
    from deepinfer import SamplingParams

    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    llm = open_llm(
        tmp_path,
        load_format="dummy",
        max_model_len=4096,
        kv_cache_memory="256MiB",
        enable_prefix_caching=False,
    )
    params = SamplingParams(temperature=0.8, max_tokens=12, ignore_eos=True, seq_seed=3)
    prompts = [{"prompt_token_ids": list(range(i, 1500 + i))} for i in range(8)]
    want = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params)]
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (80 << 20)) / total)
    try:
        with caplog.at_level(logging.WARNING, "deepinfer.worker.shortage"):
            short = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params)]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "Memory ran out" in caplog.text
    assert short == want


def test_a_lost_gpu_ends_the_engine_with_one_error_that_every_request_is_told(tmp_path, script):
    """In a process of its own, which cannot use CUDA afterwards, and still ends in order."""
    from deepinfer.testing.tiny import write_tiny_checkpoint

    said = json.loads(script("lost.py", str(write_tiny_checkpoint(tmp_path))).splitlines()[-1])
    assert said["told"] == said["asked"] == 6
    assert len(said["errors"]) == 1
    (error,) = said["errors"]
    assert error.startswith("The engine has stopped: cuda:0 cannot be used any more: CUDA error")
    assert error.endswith("Start the process again: CUDA does not recover within one.")
    assert said["later"] == "EngineDeadError" and said["closed"]
