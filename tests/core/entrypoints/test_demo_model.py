"""The real small model through the front door: recorded ids, seeds, streams, chat."""

import asyncio
import json

import pytest
import torch
from deepinfer import LLM, AsyncLLM, SamplingParams
from deepinfer.entrypoints.assemble import assemble

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def rounded(demo_gguf, tmp_path_factory):
    """The demo model as the recording had it: a directory of safetensors, rounded to bf16."""
    from deepinfer.models.checkpoint import open_checkpoint
    from deepinfer.models.source import resolve
    from safetensors.torch import save_file

    checkpoint = open_checkpoint(resolve(str(demo_gguf)))
    path = tmp_path_factory.mktemp("smollm2")
    tensors = {name: checkpoint.tensor(name, torch.bfloat16) for name in checkpoint.names()}
    save_file(tensors, str(path / "model.safetensors"), metadata={"format": "pt"})
    config = {**checkpoint.config, "tie_word_embeddings": checkpoint.tied}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def llm(rounded, demo_gguf):
    with LLM(str(rounded), str(demo_gguf), dtype="float32", max_model_len=512) as llm:
        yield llm


def talks(golden):
    return [[{"role": "user", "content": case["prompt"]}] for case in golden["cases"]]


def test_recorded_ids_and_logprobs_come_back(llm, smollm2_golden):
    greedy = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=5)
    outputs = llm.chat(talks(smollm2_golden), greedy)
    for case, output in zip(smollm2_golden["cases"], outputs, strict=True):
        assert output.prompt == case["templated_text"]
        assert output.prompt_token_ids == case["input_ids"]
        assert output.outputs[0].token_ids == case["output_ids"]
        pairs = zip(output.outputs[0].logprobs, case["top5_logprobs"], strict=True)
        for got, recorded in pairs:
            for token, value in recorded:
                assert got[token].logprob == pytest.approx(value, abs=1e-3)


def test_bfloat16_leaves_the_recording_only_at_near_ties(rounded, demo_gguf, smollm2_golden):
    """A first other token may stand only where the two best were recorded within 0.02."""
    greedy = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    with LLM(str(rounded), str(demo_gguf), dtype="bfloat16", max_model_len=512) as llm:
        outputs = llm.chat(talks(smollm2_golden), greedy)
    for case, output in zip(smollm2_golden["cases"], outputs, strict=True):
        pairs = zip(output.outputs[0].token_ids, case["output_ids"], strict=True)
        flip = next((i for i, (got, recorded) in enumerate(pairs) if got != recorded), None)
        if flip is not None:
            best, second = case["top5_logprobs"][flip][:2]
            assert best[1] - second[1] < 0.02


def test_it_stops_where_a_server_would(llm, smollm2_golden):
    (output,) = llm.chat(talks(smollm2_golden)[0], SamplingParams(temperature=0, max_tokens=30))
    out = output.outputs[0]
    assert (out.text, out.finish_reason) == ("The capital of France is Paris.", "stop")
    assert len(out.token_ids) == smollm2_golden["cases"][0]["first_eos_index"] + 1


def test_a_seed_gives_the_same_text_alone_and_in_company(llm, smollm2_golden):
    params = SamplingParams(temperature=1.0, seq_seed=7, max_tokens=12, ignore_eos=True)
    together = llm.chat(talks(smollm2_golden), params)
    alone = llm.chat(talks(smollm2_golden)[2], params)[0]
    assert alone.text == together[2].text


def test_streams_say_the_same(llm, smollm2_golden):
    talk = talks(smollm2_golden)[1]
    params = SamplingParams(temperature=0, max_tokens=12, output_kind="delta")
    expected = llm.chat(talk, params)[0].text

    async def main():
        async with AsyncLLM.from_assembly(assemble(llm.assembly.config)) as streaming:
            parts = [out.text async for o in streaming.chat(talk, params) for out in o.outputs]
            return "".join(parts)

    assert asyncio.run(main()) == expected
