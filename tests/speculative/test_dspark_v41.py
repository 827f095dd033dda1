"""The draft layers of DeepSeek-V4.1 against recorded drafts, and through the engine."""

from pathlib import Path

import pytest
import torch
from deepinfer import LLM, SamplingParams
from deepinfer.errors import ConfigError
from deepinfer_speculative.dspark import base
from deepinfer_speculative.dspark.v41 import visible
from safetensors.torch import load_file

GOLDEN = Path(__file__).parents[1] / "data" / "deepseek-v41" / "a"
PROMPTS = ("p31", "p33", "p200")
MTP = {"method": "mtp", "mode": "static"}


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN / "golden.safetensors")


def engine(speculative=MTP, **options):
    options = {"num_threads": 1, "max_model_len": 256, "max_num_seqs": 4, **options}
    return LLM(str(GOLDEN), speculative=speculative, **options)


def ask(llm, prompts, count=12, **more):
    params = SamplingParams(**{"temperature": 0, "max_tokens": count, "ignore_eos": True, **more})
    return llm.generate([{"prompt_token_ids": p} for p in prompts], params)


class Steps:
    """What every round was drafted from: (text, head's logits, corrected logits, ids, raw sure)."""

    def __init__(self, monkeypatch):
        self.found = []
        steps, sure, propose = base.draft_steps, base.confidence_logits, base.BlockDrafter.propose
        now = {}

        def watched_steps(model, logits, anchors, pick, candidates=0):
            now["base"], now["logits"] = logits.clone(), []

            def watching(k, corrected):
                now["logits"].append(corrected.clone())
                return pick(k, corrected)

            return steps(model, logits, anchors, watching, candidates)

        def watched_sure(*args):
            now["sure"] = sure(*args)
            return now["sure"]

        def watched_propose(drafter, anchors, slots):
            drafts = propose(drafter, anchors, slots)
            view = drafter._slots
            for row, slot in enumerate(slots.tolist()):
                length = int(view.length[slot])
                if length < int(view.limit[slot]):
                    text = view.tokens[slot, :length].tolist()
                    logits = torch.stack([step[row] for step in now["logits"]])
                    self.found.append(
                        (text, now["base"][row], logits, drafts.ids[row], now["sure"][row])
                    )
            return drafts

        monkeypatch.setattr(base, "draft_steps", watched_steps)
        monkeypatch.setattr(base, "confidence_logits", watched_sure)
        monkeypatch.setattr(base.BlockDrafter, "propose", watched_propose)


@pytest.mark.parametrize("chunk, prompts", [(512, PROMPTS), (7, PROMPTS[:2])])
def test_drafts_are_the_recorded_ones(golden, monkeypatch, chunk, prompts):
    """Tokens, both kinds of logits and confidences, of every round whose text was recorded."""
    steps = Steps(monkeypatch)
    asked = {name: golden[f"{name}/ids"].tolist() for name in prompts}
    more = {"max_num_batched_tokens": chunk, "yoco_prefill_truncation_mode": "off"}
    with engine(dtype="float32", **more) as llm:
        ask(llm, list(asked.values()), 25)
    wrong, compared = dict.fromkeys(prompts, 0), dict.fromkeys(prompts, 0)
    for text, head, logits, ids, sure in steps.found:
        name = next(n for n, prompt in asked.items() if text[: len(prompt)] == prompt)
        at, s = f"{name}/f32/draft", len(text) - len(asked[name]) - 1
        assert golden[f"{at}/anchors"][s].tolist() == [len(text) - 2, text[-1]]
        pairs = [(sure, golden[f"{at}/confidence"][s])]
        if f"{at}/s{s}/logits" in golden:
            pairs += [
                (head, golden[f"{at}/s{s}/base_logits"]),
                (logits, golden[f"{at}/s{s}/logits"]),
            ]
        close = all((mine - theirs).abs().max() < 1e-3 for mine, theirs in pairs)
        compared[name] += 1
        wrong[name] += not (close and ids.tolist() == golden[f"{at}/tokens"][s, 1:].tolist())
    assert min(compared.values()) > 12
    # An eight-bit code of the target that flips in the last bit moves a window of drafts with it
    # (the golden README has the shares of such rows): in p200 there may be one.
    assert wrong.pop("p200", 0) <= 2 and not any(wrong.values()), wrong


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_texts_are_those_without(golden, dtype):
    asked = [golden[f"{name}/ids"].tolist() for name in ("p5", "p33")]
    heats = [0.0, 1.0]
    found = []
    for speculative in (None, MTP):
        with engine(speculative, dtype=dtype, batch_invariant=True) as llm:
            outs = [
                out for t in heats for out in ask(llm, asked, 8, temperature=t, seed=3, logprobs=2)
            ]
        found.append([[(t.token_id, t.logprob) for t in out] for out in outs])
        drafted = sum(out.metrics.drafted for out in outs)
    assert drafted > 0
    assert found[0] == found[1]


def test_steps_that_reach_no_tapped_layer(golden):
    """Chunks of a truncated prompt that end before its floor: late layers run no row of them."""
    asked = [golden["p200/ids"].tolist()]
    with engine(None, max_num_batched_tokens=16) as llm:
        alone = ask(llm, asked, 4)[0].outputs[0].token_ids
    with engine(max_num_batched_tokens=16) as llm:
        out = ask(llm, asked, 4)[0]
    assert out.outputs[0].token_ids == alone and out.metrics.drafted > 0


def test_the_variable_finds_it(golden, monkeypatch):
    monkeypatch.setenv("DEEPINFER_ENABLE_MTP_VARLEN", "1")
    monkeypatch.setenv("DEEPINFER_USE_NEXTN_DECODE", "3")
    with engine(None) as llm:
        out = ask(llm, [golden["p5/ids"].tolist()], 8)[0]
    assert out.metrics.drafted > 0
    monkeypatch.setenv("DEEPINFER_USE_NEXTN_DECODE", "6")
    with pytest.raises(ConfigError, match="DEEPINFER_USE_NEXTN_DECODE=6"):
        engine(None)


def test_what_a_row_sees():
    there = torch.tensor([[False, True], [True, True]])
    assert visible(there, 3).tolist() == [
        [-1, 1, 3, 4], [-1, 1, 2, 4], [-1, 1, 2, 3], [0, 1, 3, 4], [0, 1, 2, 4], [0, 1, 2, 3],
    ]  # fmt: skip
