"""What the drafts in ``tests/data/eagle3`` are of: tiny targets and heads, by their seeds."""

from eagle3_rig import pair

VOCAB = 64
KINDS = {
    "flat": ("llama", {}),
    "residual": ("llama3", {"norm_before_residual": True, "speculators": True}),
    "qwen3": ("qwen3", {"norms": True, "speculators": True}),
    "3.1": ("llama", {"norm_before_fc": True, "norm_output": True, "speculators": True}),
    "3.1 parts": ("llama", {"fc_norm": True, "norm_output": True}),
}
TEXTS = ([7, 300, 21, 5], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28])


def written(folder, kind):
    """(target folder, head folder)."""
    family, more = KINDS[kind]
    return pair(folder, family, vocab=VOCAB, seed=len(kind), **more)
