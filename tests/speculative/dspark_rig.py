"""Tiny targets with drafts for them, and what a drafter is compared with: plain torch, no cache."""

import json
import random

import numpy as np
import torch
from deepinfer.api.speculative import DraftChoice
from deepinfer.models.checkpoint import open_checkpoint
from deepinfer.models.source import resolve
from deepinfer.testing.tiny import write_tiny_checkpoint
from deepinfer_speculative.dspark.save import draft_config, save_draft, write_random_draft
from deepinfer_speculative.train.answers import Texts
from deepinfer_speculative.train.data import Pool
from deepinfer_speculative.train.loop import TrainPlan, train
from deepinfer_speculative.train.network import Network
from deepinfer_speculative.train.target import Target
from draft_rig import answered

BLOCK = 5


def pair(folder, family, layers=2, taps=(0, 1), rank=8, block=BLOCK, target=None, **more):
    """(target folder, draft folder): random weights, the target's unless it is given."""
    target = target or write_tiny_checkpoint(folder / family, family)
    raw = json.loads((target / "config.json").read_text())
    config = draft_config(
        raw, layers=layers, block=block, taps=taps, mask_token=3, rank=rank,
        norms=family == "qwen3",
    )  # fmt: skip
    return target, write_random_draft(folder / f"{family}-draft", config, **more)


def trained(folder, steps=150, target=None, answers=None):
    """A tiny Llama, or the ``target`` that said these ``answers``, and a draft that has learnt some
    of what it says.
    """
    target, draft = pair(folder, "llama", rank=16, target=target)
    asked, rows = answers or answered(target)
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


class Moody:
    """Chooses at random: rows, and pauses of a few steps, some of them not asked about."""

    def __init__(self):
        self.rng, self.pause, self.proposed, self.pauses = random.Random(3), 0, True, 0

    def choose(self, facts):
        if self.pause:
            self.pause -= 1
            hold = self.rng.choice([0, 2]) if self.pause else 0
            choice = DraftChoice(0, propose=not self.pause, hold=hold)
        else:
            self.pause = self.rng.choice([0, 0, 0, 0, self.rng.randint(1, 5)])
            self.pauses += self.pause > 0
            choice = DraftChoice(self.rng.randint(0, min(facts.room, 12)))
        if not self.proposed:
            choice = choice._replace(rows=0)
        self.proposed = choice.propose
        return choice

    def observe(self, landed):
        pass


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


def agree(rounds, plain):
    """Every greedy draft is the best id of plain torch's logits, up to rounding."""
    assert rounds
    for text, drafts, sure in rounds:
        z, expected = plain.logits(text, [text[-1], *drafts[:-1]])
        mine = z.gather(1, torch.tensor(drafts)[:, None])[:, 0]
        assert (z.amax(1) - mine).max() < 1e-3
        assert torch.allclose(sure, expected, atol=1e-4)
