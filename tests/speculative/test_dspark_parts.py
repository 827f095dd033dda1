"""Configuration and weights refused by name; the heads by hand."""

import json
from types import SimpleNamespace

import pytest
import torch
from deepinfer import LLM, SamplingParams
from deepinfer.errors import ConfigError, ModelLoadError, UnsupportedError
from deepinfer.ops.table import OpSet
from deepinfer.testing.tiny import write_tiny_checkpoint
from deepinfer_speculative.dspark.backbone import merge
from deepinfer_speculative.dspark.base import _Heads
from deepinfer_speculative.dspark.config import check_target, read_config
from deepinfer_speculative.dspark.drafter import _Steps
from deepinfer_speculative.dspark.heads import confidence_logits, draft_steps
from deepinfer_speculative.dspark.save import save_draft
from deepinfer_speculative.dspark.weights import weight_rules
from draft_rig import Watched, prompts
from dspark_rig import pair
from hypothesis import given
from hypothesis import strategies as st

RELEASED = {  # the fields of deepseek-ai/dspark_qwen3_4b_block7, spec 1.4
    "architectures": ["Qwen3DSparkModel"],
    "attention_bias": False,
    "block_size": 7,
    "confidence_head_with_markov": True,
    "enable_confidence_head": True,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "layer_types": ["full_attention"] * 5,
    "markov_head_type": "vanilla",
    "markov_rank": 256,
    "mask_token_id": 151669,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_anchors": 512,
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
TARGET = SimpleNamespace(vocab_size=151936, hidden_size=2560, layers=36)


def test_the_released_checkpoint_of_qwen3_4b():
    config = read_config(RELEASED)
    assert (config.block, config.rank, config.mask_token) == (7, 256, 151669)
    assert config.taps == (1, 9, 17, 25, 33) and config.shape.qk_norm
    assert config.confidence_width == 2816
    check_target(config, RELEASED, TARGET)
    shapes = {
        name: shape
        for rule in weight_rules(config)
        for name, shape in zip(rule.sources, rule.shapes, strict=True)
    }
    assert shapes["fc.weight"] == (2560, 5 * 2560)
    assert shapes["markov_head.markov_w2.weight"] == (151936, 256)
    assert shapes["confidence_head.proj.weight"] == (1, 2816)
    assert len(shapes) == 2 + 3 + 5 * 11 + 2 + 2
    count = sum(torch.Size(shape).numel() for shape in shapes.values())
    assert count == pytest.approx(1.39e9, rel=0.01)


@pytest.mark.parametrize("nest", ["dflash_config", "dspark_config"])
def test_nested_fields_mean_the_same(nest):
    inner = ("block_size", "mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type")
    nested = {k: v for k, v in RELEASED.items() if k not in inner}
    nested[nest] = {k: RELEASED[k] for k in inner}
    assert read_config(nested) == read_config(RELEASED)
    nested[nest]["tree_width"] = 4
    with pytest.raises(UnsupportedError, match="tree_width"):
        read_config(nested)


@pytest.mark.parametrize(
    "field, value",
    [
        ("draft_vocab_size", 32000),
        ("logit_scale", 0.5),
        ("is_neox_style", False),
        ("sample_from_anchor", False),
        ("markov_head_type", "gated"),
        ("markov_head_type", "rnn"),
        ("use_sliding_window", True),
        ("final_logit_softcapping", 30.0),
        ("attention_bias", True),
        ("markov_depth", 2),
        ("dflash_version", 9),
        ("layer_types", ["sliding_attention"] * 5),
    ],
)
def test_what_is_not_built_is_refused_by_name(field, value):
    name = "sliding_attention" if field == "layer_types" else field
    with pytest.raises(UnsupportedError, match=name):
        read_config({**RELEASED, field: value})


@pytest.mark.parametrize("field", ["mask_token_id", "target_layer_ids", "block_size"])
def test_what_is_missing_is_named(field):
    with pytest.raises(ModelLoadError, match=field):
        read_config({k: v for k, v in RELEASED.items() if k != field})
    with pytest.raises(ModelLoadError, match=field):
        read_config({**RELEASED, field: -2})


def test_a_draft_of_another_target():
    other = SimpleNamespace(vocab_size=320, hidden_size=64, layers=3)
    with pytest.raises(ConfigError, match=r"vocab_size is 151936.*hidden_size.*33"):
        check_target(read_config(RELEASED), RELEASED, other)


def opened(target, draft, **more):
    options = {"model": str(draft), "mode": "static", **more}
    return LLM(str(target), max_model_len=64, num_threads=1, speculative=options)


def test_a_checkpoint_loads_by_name_and_its_faults_are_named(tmp_path):
    target, draft = pair(tmp_path, "qwen3", outer=True)
    with opened(target, draft) as llm:
        out = llm.generate([[5, 6]], SamplingParams(max_tokens=4, temperature=0))[0]
    assert out.metrics.drafted > 0
    config = json.loads((draft / "config.json").read_text())
    from safetensors.torch import load_file

    whole = load_file(str(draft / "model.safetensors"))
    save_draft(draft, config, {**whole, "d2t": torch.zeros(4)})
    with pytest.raises(ModelLoadError, match="d2t"):
        opened(target, draft)
    save_draft(draft, config, {k: v for k, v in whole.items() if k != "fc.weight"})
    with pytest.raises(ModelLoadError, match=r"fc\.weight"):
        opened(target, draft)
    save_draft(draft, config, whole, shard=1 << 14)
    assert len(list(draft.glob("model-*.safetensors"))) > 1
    (draft / "model.safetensors").unlink()
    opened(target, draft).close()
    with pytest.raises(ConfigError, match=r"9.*at most 5"):
        opened(target, draft, num_speculative_tokens=9)
    with pytest.raises(ConfigError, match="draft_sampling='hot'"):
        opened(target, draft, draft_sampling="hot")
    (draft / "calibration.json").write_text('{"exact": {"greedy": [0, 1, 1, 1, 1]}}')
    with pytest.raises(ModelLoadError, match="each from 1e-06"):
        opened(target, draft)


def test_a_head_of_eight_bits_drafts_nearly_the_same(tmp_path, monkeypatch):
    """On backend cpu it is usual; elsewhere it is refused by name, and auto is the head itself."""
    target, draft = pair(tmp_path, "llama")
    found = {}
    for kind in ("same", "int8", "auto"):
        watched = Watched(monkeypatch)
        with opened(target, draft, draft_weights=kind, num_speculative_tokens=1) as llm:
            out = llm.generate(prompts(4), SamplingParams(max_tokens=12, temperature=0))
        found[kind] = [drafts for _, drafts, _ in watched.rounds]
        monkeypatch.undo()
        found[kind, "texts"] = [o.outputs[0].token_ids for o in out]
    assert found["int8"] == found["auto"]
    assert found["same", "texts"] == found["int8", "texts"] == found["auto", "texts"]
    same = sum(a == b for a, b in zip(found["same"], found["int8"], strict=True))
    assert 0.8 * len(found["same"]) < same
    speculative = {"model": str(draft), "draft_weights": "int8"}
    with pytest.raises(ConfigError, match="draft_weights='int8'"):
        LLM(str(target), max_model_len=64, backend="reference", speculative=speculative)


def test_the_method_needs_a_model(tmp_path):
    target = write_tiny_checkpoint(tmp_path / "t")
    with pytest.raises(ConfigError, match="needs a draft checkpoint"):
        LLM(str(target), speculative="dspark")


# The heads.


def heads(rank=2, bias=None):
    """A model of 4 ids, rank 2: W1[x] = (x, 1), W2 rows as below."""
    ops = OpSet({}, "reference")
    part = lambda w: SimpleNamespace(weight=w, bias=None)  # noqa: E731
    w1 = torch.tensor([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0], [3.0, 1.0]])
    w2 = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0], [-1.0, 0.5]])
    sure = part(torch.tensor([[1.0, 2.0, 0.5, -1.0]]))
    sure.bias = bias
    config = SimpleNamespace(rank=rank, confident=True, confident_markov=rank > 0)
    return SimpleNamespace(ops=ops, config=config, dtype=None, w1=part(w1), w2=part(w2), sure=sure)


def best(k, logits):
    return logits.argmax(1)


def test_markov_steps_by_hand():
    """Anchor 3: U_1 + (0, 3, 2, −2.5) = (5, 3, 2, −2.5) → 0; then + (0, 0, 2, 0.5) ties 2 and 3."""
    base = torch.tensor([[[5.0, 0, 0, 0], [0.0, 0, 0, 1.5]]])
    ids, e = draft_steps(heads(), base, torch.tensor([3]), best)
    assert ids.tolist() == [[0, 2]]  # 2.0 and 2.0: the lower id
    assert e.tolist() == [[[3.0, 1.0], [0.0, 1.0]]]


def test_candidates_are_the_best_of_the_head_alone():
    base = torch.tensor([[[5.0, 4.9, 0, 0]]])
    assert draft_steps(heads(), base, torch.tensor([3]), best)[0].tolist() == [[1]]
    assert draft_steps(heads(), base, torch.tensor([3]), best, 1)[0].tolist() == [[0]]
    assert draft_steps(heads(), base, torch.tensor([3]), best, 2)[0].tolist() == [[1]]


def test_confidence_by_hand():
    """1·0.5 + 2·0.25 + 0.5·3 − 1·1 = 1.5, and a bias."""
    hidden, e = torch.tensor([[[0.5, 0.25]]]), torch.tensor([[[3.0, 1.0]]])
    assert confidence_logits(heads(), hidden, e).tolist() == [[1.5]]
    assert confidence_logits(heads(bias=torch.tensor([0.5])), hidden, e).tolist() == [[2.0]]


@given(st.integers(0, 6), st.integers(1, 5), st.integers(0, 1 << 30))
def test_attention_in_two_parts_is_attention(context, block, seed):
    source = torch.Generator().manual_seed(seed)
    q = torch.randn((block, 2, 4), generator=source)
    k, v = torch.randn((2, context + block, 2, 4), generator=source)

    def attend(k, v):
        scores = torch.einsum("thd,shd->ths", q, k)
        weights = scores.softmax(-1) if len(k) else scores
        return torch.einsum("ths,shd->thd", weights, v), scores.logsumexp(-1)

    parts = [attend(k[s], v[s]) for s in (slice(0, context), slice(context, None))]
    assert torch.allclose(merge(*parts[0], *parts[1]), attend(k, v)[0], atol=1e-5)


def test_heads_run_as_far_as_drafts_are_verified():
    """Four requests, whose first drafts are all verified and whose deeper ones hardly ever."""
    heads = _Heads(5)
    assert [heads.next() for _ in range(40)] == [5] * 40, "nothing is known where nobody looks"
    made = []
    for _ in range(200):
        made.append(heads.next())
        heads.verified([min(count, made[-1]) for count in (5, 2, 2, 1)])
    assert made[0] == 5 and set(made[64:]) == {2, 3} and made[64:].count(3) * 12 < 136
    for _ in range(600):
        heads.verified([heads.next()] * 4)
    assert heads.next() == 5, "deeper ones are tried now and then"
    for _ in range(100):
        heads.next()
        heads.verified([0])
    assert heads.next() == 1


@given(
    st.lists(
        st.lists(st.tuples(st.integers(-1, 5), st.integers(0, 3)), min_size=1, max_size=5),
        min_size=1,
        max_size=8,
    )
)
def test_rows_that_wait_leave_as_text_once_each_with_who_was_alone(steps):
    """Whatever their number: rows of a step are (slot, −1 for no text; request)."""
    waiting, want = _Steps(), {}
    for number, step in enumerate(steps):
        step = sorted(step, key=lambda row: row[1])  # rows of a request lie side by side
        slots = [slot for slot, _ in step]
        step = [(slot if slots.index(slot) == i else -1, r) for i, (slot, r) in enumerate(step)]
        hidden = torch.arange(len(step)).float()[:, None] + 100 * number
        slot, request = (torch.tensor([row[k] for row in step], dtype=torch.int64) for k in (0, 1))
        waiting.add([hidden, -hidden], request + 7, slot, request)
        hidden.fill_(-1)  # a model may use its memory again
        text = [r for s, r in step if s >= 0]
        for i, (s, r) in enumerate(step):
            if s >= 0:
                want[s] = (100.0 * number + i, r + 7, text.count(r) == 1)
    found = waiting.take()
    rows = zip(found.rows.tolist(), found.positions.tolist(), found.alone.tolist(), strict=True)
    assert waiting.count == 0
    assert dict(zip(found.slots.tolist(), rows, strict=True)) == {
        slot: ([row, -row], position, alone) for slot, (row, position, alone) in want.items()
    }


def test_the_oldest_steps_leave_first_and_whole():
    waiting = _Steps()
    for number in range(4):
        some = torch.arange(3) + 3 * number
        waiting.add([some.float()[:, None]], some, some, some)
    assert waiting.take(7).slots.tolist() == [0, 1, 2, 3, 4, 5] and waiting.count == 6
    assert waiting.take().slots.tolist() == [6, 7, 8, 9, 10, 11]
