"""Two layers of a decoder with random weights, and requests whose texts are in its cache."""

import torch
from deepinfer.api.model import DeviceBatch
from deepinfer.ops.reference.blocks import AttentionParams, LayerParams, MLPParams
from deepinfer_backend_cuda.attention import plan_attention
from deepinfer_backend_cuda.layers import all_layers

H, INNER, HQ, HKV, D, PAGE, LONGEST = 512, 1024, 8, 2, 64, 16, 400
BF = torch.bfloat16


class World:
    """``requests`` texts of different lengths, written to the cache by one prefill.

    ``weight`` makes what the layers multiply by of each matrix; ``blocks`` are theirs.
    """

    def __init__(self, device, requests, weight=lambda w: w, blocks=None):
        self.blocks = blocks
        self.device = device
        source = torch.Generator().manual_seed(requests)

        def made(*shape, scale=0.05):
            return (torch.randn(shape, generator=source) * scale).to(device, BF)

        def matrix(*shape):
            return weight(made(*shape))

        norm = torch.ones(H, dtype=BF, device=device)
        self.layers = tuple(
            LayerParams(
                AttentionParams(
                    norm, 1e-5, matrix((HQ + 2 * HKV) * D, H), matrix(H, HQ * D), HQ, HKV, D
                ),
                MLPParams(norm, 1e-5, matrix(2 * INNER, H), matrix(H, INNER)),
            )
            for _ in range(2)
        )
        lengths = torch.randint(1, LONGEST, (requests,), generator=source)
        lengths[0] = LONGEST
        self.lengths = lengths.to(device)
        width = -(-LONGEST // PAGE)
        pages = requests * width
        order = torch.randperm(pages, generator=source)
        self.table = order.int().view(requests, width).to(device)
        shape = (pages, PAGE, HKV, D)
        self.pairs = [
            tuple(torch.zeros(shape, dtype=BF, device=device) for _ in "kv") for _ in range(2)
        ]
        self.angles = (torch.rand(LONGEST, D, generator=source) * 2 - 1).to(device)
        self.x = made(int(lengths.sum()), H, scale=1.0)
        self.last = self.lengths.cumsum(0) - 1

    def layer(self, index):
        return self.pairs[index]

    def batch(self, counts):
        """The last ``counts`` tokens of each request."""
        cu_q = torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()
        owner = torch.repeat_interleave(torch.arange(len(counts), device=self.device), counts)
        within = torch.arange(len(owner), device=self.device) - cu_q[owner].long()
        at = (self.lengths - counts)[owner] + within
        page = self.table[owner, at // PAGE].long()
        return DeviceBatch(
            ids=at,
            positions=at,
            row_of_token=owner,
            kv_slots=page * PAGE + at % PAGE,
            attn=plan_attention(self.table, self.lengths, cu_q, PAGE),
            logit_rows=owner,
        )

    def prefill(self):
        """Hidden rows of every text's last token, all texts in one step."""
        return self.whole()[self.last]

    def whole(self):
        """Hidden rows of all tokens, all texts in one step."""
        batch = self.batch(self.lengths)
        return all_layers(self.x, self.layers, batch, self, self.angles, None, self.blocks)

    def decode(self, run):
        """The same rows as a decode step, by a ``Layers``; the cache holds what a prefill wrote."""
        step = self.batch(torch.ones_like(self.lengths))
        return run(self.x[self.last], self.layers, step, self, self.angles).clone()

    def tails(self, run, most):
        """The last rows of each text, up to ``most`` int64[n] of them, by a ``Layers``; and which
        rows of all they are.
        """
        counts = torch.minimum(most, self.lengths)
        step = self.batch(counts)
        at = (self.last + 1 - self.lengths)[step.row_of_token] + step.positions
        return run(self.x[at], self.layers, step, self, self.angles).clone(), at
