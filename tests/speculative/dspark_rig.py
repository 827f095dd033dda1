"""Tiny targets with drafts for them, and what a drafter is compared with: plain torch, no cache."""

import json

import numpy as np
import torch
from deepinfer import LLM, SamplingParams
from deepinfer.models.checkpoint import open_checkpoint
from deepinfer.models.source import resolve
from deepinfer.testing.tiny import write_tiny_checkpoint
from deepinfer_speculative.dspark.base import BlockDrafter
from deepinfer_speculative.dspark.save import draft_config, save_draft, write_random_draft
from deepinfer_speculative.train.answers import Texts
from deepinfer_speculative.train.data import Pool
from deepinfer_speculative.train.loop import TrainPlan, train
from deepinfer_speculative.train.network import Network
from deepinfer_speculative.train.target import Target

BLOCK = 5


def pair(folder, family, layers=2, taps=(0, 1), rank=8, block=BLOCK, **more):
    """(target folder, draft folder): random weights."""
    target = write_tiny_checkpoint(folder / family, family)
    raw = json.loads((target / "config.json").read_text())
    config = draft_config(
        raw, layers=layers, block=block, taps=taps, mask_token=3, rank=rank,
        norms=family == "qwen3",
    )  # fmt: skip
    return target, write_random_draft(folder / f"{family}-draft", config, **more)


def prompts(count, seed=0, length=12):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 320, size=int(rng.integers(2, length))).tolist() for _ in range(count)]


def trained(folder, steps=150):
    """A tiny Llama and a draft that has learnt some of what it says."""
    target, draft = pair(folder, "llama", rank=16)
    asked = prompts(48)
    with LLM(str(target), max_model_len=96, seed=1) as llm:
        outs = llm.generate(asked, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    rows = [[*ids, *out.outputs[0].token_ids] for ids, out in zip(asked, outs, strict=True)]
    count = len(rows)
    texts = Texts(
        tokens=np.concatenate([np.array(row, np.int32) for row in rows]),
        start=np.cumsum([0, *map(len, rows)]),
        prompt=np.array([len(ids) for ids in asked], np.int32),
        hot=np.zeros(count, bool),
        held=np.zeros(count, bool),
        task=np.zeros(count, np.int32),
        tasks=("tiny",),
    )
    found = Target(open_checkpoint(resolve(str(target))), torch.device("cpu"))
    raw = json.loads((draft / "config.json").read_text())
    network = Network(raw, found.embed, found.norm)
    pool = Pool(texts, np.arange(count), found, network.config.taps)
    # The head of a tiny target is its own; the draft borrows it as the engine will.
    plan = TrainPlan(steps=steps, batch=16, anchors=24, lr=1e-2)
    history = train(network, pool, found.head, plan, folder / "state.pt", lambda line: None)
    save_draft(draft, raw, network.tensors())
    return target, draft, history


class Watched:
    """Every round of a drafter: texts, drafts and confidences as the engine had them."""

    def __init__(self, monkeypatch, kind=BlockDrafter):
        self.rounds = []
        right = kind.propose

        def propose(drafter, anchors, slots):
            drafts = right(drafter, anchors, slots)
            view = drafter._slots
            for row, slot in enumerate(slots.tolist()):
                length = int(view.length[slot])
                if length >= int(view.limit[slot]):
                    continue  # ended: its pages may be somebody else's
                text = view.tokens[slot, :length].tolist()
                assert text[-1] == int(anchors[row])
                sure = None if drafts.confidence is None else drafts.confidence[row].clone()
                self.rounds.append((text, drafts.ids[row].tolist(), sure))
            return drafts

        monkeypatch.setattr(kind, "propose", propose)


class Plain:
    """A draft by itself: everything computed anew from the text alone."""

    def __init__(self, target, draft):
        checkpoint = open_checkpoint(resolve(str(draft)))
        self.target = Target(open_checkpoint(resolve(str(target))), torch.device("cpu"))
        self.network = Network(checkpoint.config, self.target.embed, self.target.norm)
        with torch.no_grad():
            for name in self.network.tensors():
                self.network.get(name).copy_(checkpoint.tensor(name, torch.float32))

    @torch.no_grad()
    def logits(self, text, before):
        """(logits float32[γ, V], confidences [γ]) behind a text, given the id before each slot."""
        ids = torch.tensor([text])
        joined, _ = self.target.states(ids, self.network.config.taps)
        anchor = torch.tensor([[len(text) - 1]])
        hidden = self.network(joined, torch.tensor([len(text)]), anchor, ids[:, -1:])[0, 0]
        e = self.network.markov(torch.tensor(before))
        w2 = self.network.get("markov_head.markov_w2.weight")
        z = hidden @ self.target.head.T + e @ w2.T
        return z, torch.sigmoid(self.network.confidence(hidden, e))
