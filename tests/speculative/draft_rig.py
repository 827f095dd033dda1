"""What tests of drafts from hidden states share, whichever method made the draft."""

import numpy as np
from deepinfer import LLM, SamplingParams
from deepinfer_speculative.dspark.base import BlockDrafter

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
HOT = SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True)


def prompts(count, seed=0, length=12, vocab=320):
    rng = np.random.default_rng(seed)
    sizes = (int(rng.integers(2, length)) for _ in range(count))
    return [rng.integers(3, vocab, size=size).tolist() for size in sizes]


def answered(target, count=48, vocab=320, hot=False):
    """(prompts, texts): what the target says to ``prompts(count)``; drafts learn these. ``hot``:
    every second text is sampled.
    """
    asked = prompts(count, vocab=vocab)
    how = [
        SamplingParams(temperature=i % 2 * hot, seed=i, max_tokens=40, ignore_eos=True)
        for i in range(count)
    ]
    with LLM(str(target), max_model_len=96, num_threads=1, seed=1) as llm:
        outs = llm.generate(asked, how)
    rows = [[*ids, *out.outputs[0].token_ids] for ids, out in zip(asked, outs, strict=True)]
    return asked, rows


def engine(target, draft, how=(), **more):
    """A tiny engine in invariant mode; ``how``: further options of its speculation."""
    speculative = None if draft is None else {"model": str(draft), "mode": "static", **dict(how)}
    options = {"max_model_len": 128, "page_size": 4, "num_threads": 1, "batch_invariant": True}
    return LLM(str(target), speculative=speculative, **{**options, **more})


def ids(outputs):
    return [out.outputs[0].token_ids for out in outputs]


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
