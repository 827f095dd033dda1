"""Tiny targets with EAGLE-3 heads, and what the drafter is compared with: plain torch, no cache.

``Plain`` follows the paper and the authors' numbering: pair t is the state of token t with token
t + 1, at position t.
"""

import json

import torch
import torch.nn.functional as F
from deepinfer.layers import rotary_table
from deepinfer.models.checkpoint import open_checkpoint
from deepinfer.models.source import resolve
from deepinfer.testing.tiny import write_tiny_checkpoint
from deepinfer_speculative.dspark.save import save_draft
from deepinfer_speculative.eagle3.config import read_config
from deepinfer_speculative.eagle3.save import head_config, vocabulary, write_random_head
from deepinfer_speculative.train.target import Target, rms_norm, rotate
from draft_rig import answered

LAYERS = (0, 1, 2)
"""Inputs of a tiny target's three layers."""


def pair(folder, family="llama", vocab=200, layers=LAYERS, seed=0, target=None, **more):
    """(target folder, head folder): random weights, the target's unless it is given."""
    target = target or write_tiny_checkpoint(folder / family, family)
    raw = json.loads((target / "config.json").read_text())
    config = head_config(raw, vocab=vocab, layers=layers, **more)
    return target, write_random_head(folder / f"{family}-head", config, raw, seed)


class Plain:
    """A head by itself: everything computed anew from the text alone."""

    def __init__(self, target, head):
        self.target = Target(open_checkpoint(resolve(str(target))), torch.device("cpu"))
        checkpoint = open_checkpoint(resolve(str(head)))
        self.config = read_config(checkpoint.config, self.target.config)
        self.weights = {}
        for name in checkpoint.names():
            if name == "d2t":
                table = torch.empty(checkpoint.shape(name), dtype=torch.int64)
                checkpoint.bytes_into(name, table.view(torch.uint8))
                self.weights[name] = table
            elif name != "t2d":
                short = name.replace("midlayer.", "").replace("layers.0.", "")
                self.weights[short] = checkpoint.tensor(name, torch.float32)
        self.ids = torch.arange(self.config.vocab) + self.weights.get("d2t", 0)
        self.cos_sin = rotary_table(self.config.shape.rope, 512)

    def w(self, name):
        return self.weights[f"{name}.weight"]

    def states(self, joined):
        if self.config.norm_before_fc:
            joined = rms_norm(joined, self.w("input_norm"), self.config.shape.eps)
        if self.config.fc_norm:
            parts = joined.chunk(len(self.config.taps), -1)
            eps = self.config.shape.eps
            normed = [rms_norm(x, self.w(f"fc_norm.{i}"), eps) for i, x in enumerate(parts)]
            joined = torch.cat(normed, -1)
        return joined @ self.w("fc").T

    def layer(self, tokens, states):
        """tokens int64[B, S], states [B, S, H] to the layer's output [B, S, H]; causal."""
        shape, eps = self.config.shape, self.config.shape.eps
        embed = self.weights.get("embed_tokens.weight", self.target.embed)
        hidden = rms_norm(states, self.w("hidden_norm"), eps)
        both = torch.cat((rms_norm(embed[tokens], self.w("input_layernorm"), eps), hidden), -1)
        q, k, v = (
            (both @ self.w(f"self_attn.{n}_proj").T).unflatten(-1, (-1, shape.head_dim))
            for n in ("q", "k", "v")
        )
        if shape.qk_norm:
            q = rms_norm(q, self.w("self_attn.q_norm"), eps)
            k = rms_norm(k, self.w("self_attn.k_norm"), eps)
        cos, sin = self.cos_sin[: tokens.shape[1]].chunk(2, -1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        groups = shape.heads // shape.kv_heads
        k, v = (t.repeat_interleave(groups, 2).transpose(1, 2) for t in (k, v))
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True)
        x = o.transpose(1, 2).flatten(2) @ self.w("self_attn.o_proj").T
        x = x + (hidden if self.config.norm_before_residual else states)
        y = rms_norm(x, self.w("post_attention_layernorm"), eps)
        gate, up = (y @ self.w(f"mlp.{n}_proj").T for n in ("gate", "up"))
        return x + (F.silu(gate) * up) @ self.w("mlp.down_proj").T

    def logits(self, rows):
        """Rows of the layer's output to float32[..., vocab], of draft ids."""
        head = self.weights.get("lm_head.weight", self.target.head)
        return rms_norm(rows, self.w("norm"), self.config.shape.eps) @ head.T

    @torch.no_grad()
    def chain(self, text, drafts):
        """float32[γ, vocab]: logits of each draft behind a text, given the drafts before it."""
        joined, _ = self.target.states(torch.tensor([text]), self.config.taps)
        states, tokens = self.states(joined)[:, :-1], [*text[1:]]
        found = []
        for draft in drafts:
            out = self.layer(torch.tensor([tokens]), states)[:, -1:]
            found.append(self.logits(out)[0, 0])
            if self.config.norm_output:
                out = rms_norm(out, self.w("norm"), self.config.shape.eps)
            states, tokens = torch.cat((states, out), 1), [*tokens, draft]
        return torch.stack(found)


def agree(rounds, plain):
    """Every greedy draft is the best id of plain torch's logits, up to rounding; its confidence is
    the head's own probability of it.
    """
    assert rounds
    place = {int(target): draft for draft, target in enumerate(plain.ids)}
    for text, drafts, sure in rounds:
        z = plain.chain(text, drafts)
        mine = torch.tensor([place[draft] for draft in drafts])
        assert (z.amax(1) - z.gather(1, mine[:, None])[:, 0]).max() < 1e-3
        expected = z.softmax(1).gather(1, mine[:, None])[:, 0]
        assert torch.allclose(sure, expected, atol=1e-4)


def trained(folder, steps=120, vocab=260, target=None, answers=None):
    """A tiny Llama, or the ``target`` that said these ``answers``, and a head that has learnt some
    of what it says: plain torch, test time trained.

    Returns (target, head, accuracy of its first draft before and after).
    """
    target, head = pair(folder, vocab=vocab, target=target)
    _, rows = answers or answered(target)
    texts = torch.tensor([row[:42] for row in rows if len(row) >= 42])
    plain = Plain(target, head)
    size = len(plain.target.embed)
    counts = torch.bincount(texts.flatten(), minlength=size)
    plain.ids = counts.topk(vocab).indices.sort().values
    back = torch.full((size,), -1).scatter(0, plain.ids, torch.arange(vocab))
    with torch.no_grad():
        joined, _ = plain.target.states(texts, plain.config.taps)
    names = [n for n in plain.weights if n != "d2t"]
    params = [plain.weights[n].requires_grad_() for n in names]
    adam, hits = torch.optim.AdamW(params, lr=5e-3), []
    for _ in range(steps):
        states, loss = plain.states(joined)[:, :-1], 0.0
        for k in range(3):  # the next pair begins with the head's own state
            tokens = texts[:, 1 + k :]
            states = plain.layer(tokens, states[:, : tokens.shape[1]])
            z, want = plain.logits(states[:, :-1]), back[tokens[:, 1:]]
            loss = loss + F.cross_entropy(z.flatten(0, 1), want.flatten(), ignore_index=-1)
            if k == 0:
                hits.append(float((z.argmax(-1) == want).float().mean()))
        adam.zero_grad()
        loss.backward()
        adam.step()
    layer = lambda n: n if n.split(".")[0] in ("fc", "norm", "lm_head") else f"midlayer.{n}"  # noqa: E731
    tensors = {layer(n): plain.weights[n].detach() for n in names}
    raw = json.loads((head / "config.json").read_text())
    save_draft(head, raw, tensors | vocabulary(plain.ids, size))
    return target, head, hits
