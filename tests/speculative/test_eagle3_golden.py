"""EAGLE-3 drafts against another library's: ``speculators`` 0.9.0 over ``transformers`` 5.24.

``golden.safetensors`` holds, for each kind of head and each text, three greedy drafts and their
logits over the head's own ids (float32[3, vocab]), as ``Eagle3DraftModel.forward`` gives them with
eager attention and the drafts as its tokens, on hidden states of ``LlamaForCausalLM`` or
``Qwen3ForCausalLM``. Targets and heads are written again from their seeds.
"""

from pathlib import Path

import pytest
import torch
from deepinfer import LLM, SamplingParams
from deepinfer_speculative.eagle3.drafter import Eagle3Drafter
from draft_rig import Watched
from eagle3_golden import KINDS, TEXTS, written
from eagle3_rig import Plain
from safetensors.torch import load_file

GOLDEN = load_file(Path(__file__).parents[1] / "data" / "eagle3" / "golden.safetensors")


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory):
    return request.param, *written(tmp_path_factory.mktemp("golden"), request.param)


@pytest.mark.parametrize("number", range(len(TEXTS)))
def test_the_engine_drafts_what_was_recorded(kind, number, monkeypatch):
    name, target, head = kind
    text, logits = TEXTS[number], GOLDEN[f"{name}.{number}.logits"]
    watched = Watched(monkeypatch, Eagle3Drafter)
    options = {"model": str(head), "mode": "static"}
    # The text's last token is the one that is drawn: drafts are made behind it.
    last = SamplingParams(
        temperature=0, allowed_token_ids=(text[-1],), max_tokens=2, ignore_eos=True
    )
    with LLM(str(target), max_model_len=64, num_threads=1, speculative=options) as llm:
        llm.generate([text[:-1]], last)
    seen, drafts, sure = watched.rounds[0]
    assert seen == text
    assert drafts == GOLDEN[f"{name}.{number}.drafts"].tolist()
    assert torch.allclose(sure, logits.softmax(1).amax(1), atol=1e-4)


@pytest.mark.parametrize("number", range(len(TEXTS)))
def test_plain_torch_is_as_good_an_oracle(kind, number):
    """What every other test is held to."""
    name, target, head = kind
    drafts = GOLDEN[f"{name}.{number}.drafts"].tolist()
    mine = Plain(target, head).chain(TEXTS[number], drafts)
    assert torch.allclose(mine, GOLDEN[f"{name}.{number}.logits"], atol=1e-3)
