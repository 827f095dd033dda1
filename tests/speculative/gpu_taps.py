"""On a GPU: drafts change no id, and tapped rows are the same from graphs and from plain launches.

``python tests/speculative/gpu_taps.py`` where ``device="cuda"`` works; ``… cpu`` tries the script.
"""

import sys
import tempfile
from pathlib import Path

from deepinfer import LLM, SamplingParams
from deepinfer.testing.tiny import write_tiny_checkpoint
from deepinfer_speculative.ngram import NgramDrafter

ROWS = {}
DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cuda"


class Tapping(NgramDrafter):
    """Prompt lookup that also compares tapped rows by text and place."""

    taps = (-1, 0, 2)
    compared = graphs = 0

    @classmethod
    def needs(cls, context):
        from dataclasses import replace

        return replace(super().needs(context), taps=cls.taps)

    def commit(self, taps, kept):
        assert set(taps.hidden) == set(self.taps)
        rows = kept.nonzero()[:, 0].tolist()
        hidden = [taps.hidden[layer].float().cpu() for layer in self.taps]
        slots, places = taps.slot_of_token.tolist(), taps.batch.positions.tolist()
        for row in rows:
            seed = int(self._slots.seed[slots[row]])
            mine = [h[row] for h in hidden]
            known = ROWS.setdefault((seed, places[row]), mine)
            Tapping.compared += known is not mine
            assert all((a == b).all() for a, b in zip(known, mine, strict=True)), places[row]


def main():
    import deepinfer_speculative.ngram as module

    path = str(write_tiny_checkpoint(Path(tempfile.mkdtemp())))
    prompts = [[5, 6, 7, 8] * 3, [9, 10, 11] * 4, list(range(20, 40)), [7] * 9]
    params = [
        SamplingParams(max_tokens=60, temperature=float(i % 2), seed=i, ignore_eos=True)
        for i in range(4)
    ]
    texts = {}
    for dtype in ("float32", "bfloat16"):
        ROWS.clear()
        for given, drafter in (
            (None, NgramDrafter),
            ("ngram,mode=static", NgramDrafter),
            ("ngram,mode=static", Tapping),
            ("ngram,mode=adaptive,profile_seconds=2", Tapping),
            ("ngram,mode=cap,profile_seconds=2", Tapping),
        ):
            module.NgramDrafter = drafter
            with LLM(
                path, device=DEVICE, dtype=dtype, speculative=given, max_num_seqs=4,
                kv_cache_memory="64MiB",
            ) as llm:  # fmt: skip
                outs = llm.generate(prompts, params)
                ids = [o.outputs[0].token_ids for o in outs]
                texts.setdefault(dtype, ids)
                same = ids == texts[dtype]
                counts = [(o.metrics.drafted, o.metrics.verified, o.metrics.accepted) for o in outs]
                print(dtype, given, drafter.__name__, "equal" if same else "DIFFERS", counts)
                planner = llm.assembly.engine.scheduler.planner
                if planner is not None:
                    print("  ", planner.report())
                assert same
    print("rows compared", Tapping.compared)
    assert Tapping.compared > 100


if __name__ == "__main__":
    main()
