"""Records ``tests/data/eagle3``: ``python tests/speculative/record_eagle3.py OUT.safetensors``.

Needs ``speculators`` and ``transformers``; no test runs it.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from deepinfer_speculative.dspark.save import OF_TARGET
from eagle3_golden import KINDS, TEXTS, VOCAB, written
from safetensors.torch import load_file, save_file
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

DRAFTS = 3
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def opened(target, head):
    """(the target, the library's draft model, its tables)."""
    raw = json.loads((head / "config.json").read_text())
    fields = raw.get("transformer_layer_config", raw)
    family = Qwen3Config if fields["model_type"] == "qwen3" else LlamaConfig
    known = {name: fields[name] for name in OF_TARGET if name in fields}
    layer = family(**known, num_hidden_layers=1, tie_word_embeddings=False)
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=VOCAB,
        eagle_aux_hidden_state_layer_ids=[0, 1, 2],
        **{flag: raw.get(flag, False) for flag in FLAGS},
    )
    causal = AutoModelForCausalLM.from_pretrained(
        str(target), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    stored = load_file(str(head / "model.safetensors"))
    weights = {name.replace("midlayer.", "layers.0."): t for name, t in stored.items()}
    weights["embed_tokens.weight"] = causal.get_input_embeddings().weight.detach()
    model = Eagle3DraftModel(config)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and all(name.startswith("verifier_") for name in missing)
    return causal, model.float().eval(), weights["d2t"]


@torch.no_grad()
def chain(causal, model, table, text):
    """(target ids of greedy drafts behind a text, their logits).

    In training the model reads, at its k-th step, the token k places further: so drafts are put
    behind the text, where the row of its last state finds them.
    """
    states = causal(torch.tensor([text]), output_hidden_states=True).hidden_states[:3]
    joined = torch.cat(states, -1)[:, :-1]
    hidden = torch.cat((joined, torch.zeros(1, DRAFTS, joined.shape[-1])), 1)
    seen, drafts, logits = [], [], []
    hook = model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out))
    for k in range(DRAFTS):
        ids = torch.tensor([[*text[1:], *drafts, *[0] * (DRAFTS - k)]])
        seen.clear()
        model(hidden, ids, torch.zeros_like(ids), ttt_steps=DRAFTS)
        logits.append(seen[k][0, len(text) - 2])
        best = int(logits[-1].argmax())
        drafts.append(best + int(table[best]))
    hook.remove()
    return torch.tensor(drafts), torch.stack(logits)


def main(out):
    found = {}
    for kind in KINDS:
        parts = opened(*written(Path(tempfile.mkdtemp()), kind))
        for number, text in enumerate(TEXTS):
            drafts, logits = chain(*parts, text)
            found |= {f"{kind}.{number}.drafts": drafts, f"{kind}.{number}.logits": logits}
    save_file(found, out)


if __name__ == "__main__":
    main(sys.argv[1])
