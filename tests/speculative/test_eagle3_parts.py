"""EAGLE-3 heads: configuration and weights refused by name; attention and confidence by hand."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from deepinfer import LLM, SamplingParams
from deepinfer.errors import ConfigError, ModelLoadError, UnsupportedError
from deepinfer.testing.tiny import write_tiny_checkpoint
from deepinfer_speculative.dspark.save import save_draft
from deepinfer_speculative.eagle3.config import read_config
from deepinfer_speculative.eagle3.convert import main as convert_main
from deepinfer_speculative.eagle3.drafter import log_odds
from deepinfer_speculative.eagle3.head import join
from deepinfer_speculative.eagle3.weights import weight_rules
from eagle3_rig import pair
from hypothesis import given
from hypothesis import strategies as st

FLAT = {  # as the authors publish heads for Llama-3.1-8B
    "architectures": ["LlamaForCausalLMEagle3"],
    "bos_token_id": 128000,
    "draft_vocab_size": 32000,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 1,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 128256,
}
LLAMA_8B = SimpleNamespace(vocab_size=128256, hidden_size=4096, layers=32)
SPECULATORS = {  # as that library publishes heads for Qwen3-8B
    "architectures": ["Eagle3Speculator"],
    "draft_vocab_size": 32000,
    "eagle_aux_hidden_state_layer_ids": [2, 18, 33],
    "norm_before_residual": True,
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "Qwen/Qwen3-8B"}},
    "speculators_model_type": "eagle3",
    "target_hidden_size": None,
    "transformer_layer_config": {
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 1,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "vocab_size": 151936,
    },
}
QWEN_8B = SimpleNamespace(vocab_size=151936, hidden_size=4096, layers=36)


def shapes(config, layer):
    rules = list(weight_rules(config, layer))
    return {n: s for r in rules for n, s in zip(r.sources, r.shapes, strict=True)}


def test_a_head_of_llama_8b():
    config = read_config(FLAT, LLAMA_8B)
    assert (config.vocab, config.taps) == (32000, (1, 15, 28))  # inputs of 2, 16 and 29
    assert not (config.norm_before_residual or config.norm_before_fc or config.norm_output)
    found = shapes(config, "midlayer")
    assert found["fc.weight"] == (4096, 12288) and found["lm_head.weight"] == (32000, 4096)
    assert found["midlayer.self_attn.q_proj.weight"] == (4096, 8192)
    assert found["midlayer.self_attn.k_proj.weight"] == (1024, 8192)
    assert {n.split(".")[1] for n in found if n.startswith("midlayer.")} == {
        "hidden_norm", "input_layernorm", "self_attn", "post_attention_layernorm", "mlp",
    }  # fmt: skip


def test_its_size_is_that_of_the_published_file():
    """EAGLE3-LLaMA3.1-Instruct-8B: 849,765,096 bytes of float16, tables and a header."""
    sizes = shapes(read_config(FLAT, LLAMA_8B), "midlayer")
    del sizes["embed_tokens.weight"]  # the target's
    count = sum(math.prod(size) for size in sizes.values())
    assert 0 < 849_765_096 - (2 * count + 8 * 32000 + 128256) < 4096


def test_a_head_in_the_layout_of_speculators():
    config = read_config(SPECULATORS, QWEN_8B)
    assert config.taps == (1, 17, 32) and config.norm_before_residual
    assert not config.shape.qk_norm and config.shape.rope.theta == 1e6
    assert "layers.0.hidden_norm.weight" in shapes(config, "layers.0")
    layer = {**SPECULATORS["transformer_layer_config"], "model_type": "qwen3"}
    config = read_config({**SPECULATORS, "transformer_layer_config": layer}, QWEN_8B)
    assert shapes(config, "layers.0")["layers.0.self_attn.q_norm.weight"] == (128,)


@pytest.mark.parametrize(
    "ids, taps",
    [
        ([1, 15, 28], (1, 15, 28)),  # outputs, as SpecForge and ModelOpt write them
        ([2, 16, 29], (1, 15, 28)),  # inputs, as vLLM reads them
        ([0, 16, 32], (-1, 15, 31)),
        ([29, 2, 16], (1, 15, 28)),
        ([2, 8, 14, 20], (1, 7, 13, 19)),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_both_ways_of_counting_layers(ids, taps, nested):
    said = {"eagle_aux_hidden_state_layer_ids": ids}
    fields = {"eagle_config": {"use_aux_hidden_state": True, **said}} if nested else said
    config = read_config({**FLAT, **fields}, LLAMA_8B)
    assert config.taps == taps
    assert shapes(config, "midlayer")["fc.weight"] == (4096, 4096 * len(ids))


@pytest.mark.parametrize(
    "field, value",
    [
        ("num_hidden_layers", 2),
        ("sliding_window", 512),
        ("attention_bias", True),
        ("bias", True),
        ("fc_bias", True),
        ("hidden_act", "gelu"),
        ("model_type", "deepseek_v3"),
        ("parallel_drafting", True),
        ("mask_token_id", 7),
        ("truncated_vocab_size", 32000),
        ("eagle_tree", 4),
        ("layer_types", ["sliding_attention"]),
    ],
)
def test_what_is_not_built_is_refused_by_name(field, value):
    name = "sliding_attention" if field == "layer_types" else field
    with pytest.raises(UnsupportedError, match=name):
        read_config({**FLAT, field: value}, LLAMA_8B)


@pytest.mark.parametrize(
    "nested, said",
    [
        ({"use_aux_hidden_state": False}, "use_aux_hidden_state"),
        ({"use_last_layernorm": False}, "use_last_layernorm"),
        ({"tree_width": 4}, "tree_width"),
    ],
)
def test_options_of_the_nested_mapping_are_checked(nested, said):
    with pytest.raises(UnsupportedError, match=said):
        read_config({**FLAT, "eagle_config": nested}, LLAMA_8B)


def test_speculators_of_another_kind():
    with pytest.raises(UnsupportedError, match="fc_norm and norm_before_fc"):
        read_config({**SPECULATORS, "fc_norm": True, "norm_before_fc": True}, QWEN_8B)
    with pytest.raises(UnsupportedError, match="algorithm='mtp'"):
        read_config({**SPECULATORS, "speculators_config": {"algorithm": "mtp"}}, QWEN_8B)
    unsure = {k: v for k, v in SPECULATORS.items() if k != "norm_before_residual"}
    with pytest.raises(ModelLoadError, match="norm_before_residual"):
        read_config(unsure, QWEN_8B)
    with pytest.raises(ModelLoadError, match="eagle_config is no mapping"):
        read_config({**FLAT, "eagle_config": 3}, LLAMA_8B)


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"draft_vocab_size": None}, "draft_vocab_size"),
        ({"draft_vocab_size": 200000}, "above its vocab_size"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 2, 3]}, "no different layers"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 9, 40]}, "target of 32"),
        ({"eagle_aux_hidden_state_layer_ids": "2,3"}, "no different layers"),
    ],
)
def test_odd_values_are_refused(fields, said):
    with pytest.raises(ModelLoadError, match=said):
        read_config({**FLAT, **fields}, LLAMA_8B)


def test_a_head_of_another_target():
    with pytest.raises(ConfigError, match=r"vocab_size is 128256.*target_hidden_size is 4096"):
        read_config(FLAT, SimpleNamespace(vocab_size=320, hidden_size=64, layers=32))
    with pytest.raises(ModelLoadError, match="no low, middle and high"):
        read_config(FLAT, SimpleNamespace(vocab_size=128256, hidden_size=4096, layers=5))
    last = {**FLAT, "eagle_aux_hidden_state_layer_ids": [1, 15, 32]}
    with pytest.raises(ConfigError, match="follows the target's 32 layers"):
        read_config(last, LLAMA_8B)


def opened(target, draft, **more):
    options = {"model": str(draft), "mode": "static", **more}
    return LLM(str(target), max_model_len=64, num_threads=1, speculative=options)


def test_a_checkpoint_is_known_by_its_architecture_or_by_the_method(tmp_path):
    target, head = pair(tmp_path)
    raw = json.loads((head / "config.json").read_text())
    for architecture in ("LlamaForCausalLMEagle3", "Eagle3Speculator", "LlamaForCausalLM"):
        (head / "config.json").write_text(json.dumps({**raw, "architectures": [architecture]}))
        if architecture == "LlamaForCausalLM":
            with pytest.raises(ConfigError, match="No plugin here reads a draft"):
                opened(target, head)
        method = {"method": "eagle3"} if architecture == "LlamaForCausalLM" else {}
        with opened(target, head, **method) as llm:
            out = llm.generate([[5, 6]], SamplingParams(max_tokens=8, temperature=0))[0]
            assert llm.assembly.facts.draft_len == 3
        assert out.metrics.drafted > 0


def test_faults_of_weights_are_named(tmp_path):
    from safetensors.torch import load_file

    target, head = pair(tmp_path)
    config = json.loads((head / "config.json").read_text())
    whole = load_file(str(head / "model.safetensors"))
    wrong = [
        ("fc.weight", None, r"fc\.weight"),
        ("lm_head.weight", None, r"lm_head\.weight"),
        ("midlayer.self_attn.q_proj.weight", torch.zeros(64, 64), "q_proj"),
        ("mask_hidden", torch.zeros(4), "mask_hidden"),
        ("d2t", None, "no tensor 'd2t'"),
        ("d2t", torch.zeros(199, dtype=torch.int64), r"I64 \(199,\)"),
        ("d2t", torch.zeros(200), "F32"),
        ("d2t", torch.full((200,), 300), "different ids below 320"),
        ("d2t", -torch.arange(200), "different ids below 320"),
    ]
    for name, tensor, said in wrong:
        rest = {k: v for k, v in whole.items() if k != name}
        save_draft(head, config, rest if tensor is None else {**rest, name: tensor})
        with pytest.raises(ModelLoadError, match=said):
            opened(target, head)
    save_draft(head, config, whole)
    with pytest.raises(ConfigError, match="draft_candidates"):
        opened(target, head, draft_candidates=4)
    with pytest.raises(ConfigError, match="draft_sampling='hot'"):
        opened(target, head, draft_sampling="hot")
    opened(target, head).close()


def test_a_head_may_have_its_own_embedding_and_share_the_targets_vocabulary(tmp_path):
    """A head of another width must have one; a whole vocabulary may be the target's."""
    from safetensors.torch import load_file

    target, head = pair(tmp_path, vocab=320)
    config = json.loads((head / "config.json").read_text())
    whole = load_file(str(head / "model.safetensors"))
    del whole["lm_head.weight"]
    save_draft(head, config, {**whole, "embed_tokens.weight": torch.randn(320, 64)})
    opened(target, head).close()
    save_draft(head, {**config, "tie_word_embeddings": True}, whole)
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight"):
        opened(target, head)
    narrow = {"hidden_size": 32, "target_hidden_size": 64}
    target, head = pair(tmp_path / "narrow", **narrow)
    with opened(target, head) as llm:
        out = llm.generate([[5, 6]], SamplingParams(max_tokens=8, temperature=0))[0]
    assert out.metrics.drafted > 0


def test_a_pickled_head_is_rewritten(tmp_path, capsys):
    from safetensors.torch import load_file

    target, head = pair(tmp_path)
    whole = load_file(str(head / "model.safetensors"))
    (head / "model.safetensors").unlink()
    parts = [dict(list(whole.items())[:5]), dict(list(whole.items())[5:])]
    for i, part in enumerate(parts):
        torch.save(part, head / f"pytorch_model-0000{i}-of-00002.bin")
    with pytest.raises(ModelLoadError, match="pytorch_model"):
        opened(target, head)
    assert convert_main([str(head), str(tmp_path / "out")]) == 0
    back = load_file(str(tmp_path / "out" / "model.safetensors"))
    assert back.keys() == whole.keys()
    assert all(torch.equal(back[name], whole[name]) for name in whole)
    opened(target, tmp_path / "out").close()
    for bad in ({"a": 1}, [torch.zeros(1)], {"a": SimpleNamespace()}):
        torch.save(bad, head / "pytorch_model-00000-of-00002.bin")
        with pytest.raises(SystemExit) as left:
            convert_main([str(head), str(tmp_path / "bad")])
        assert left.value.code == 1 and "pytorch_model-00000" in capsys.readouterr().err
    assert not (tmp_path / "bad").exists()


def test_the_method_needs_a_model(tmp_path):
    target = write_tiny_checkpoint(tmp_path / "t")
    with pytest.raises(ConfigError, match="needs a draft checkpoint"):
        LLM(str(target), speculative="eagle3")


@given(st.integers(0, 6), st.integers(1, 4), st.floats(0.1, 8), st.integers(0, 1 << 30))
def test_the_key_of_zeros_leaves_no_trace(context, chain, spread, seed):
    """Attention over [0, context] and chain, joined, is attention over context and chain."""
    source = torch.Generator().manual_seed(seed)
    q = spread * torch.randn((1, 2, 4), generator=source)
    k, v = torch.randn((2, context + chain, 2, 4), generator=source)

    def attend(k, v):
        scores = torch.einsum("thd,shd->ths", q, k)
        weights = scores.softmax(-1) if len(k) else scores
        return torch.einsum("ths,shd->thd", weights, v), scores.logsumexp(-1)

    zero = torch.zeros(1, 2, 4)
    far = attend(torch.cat((zero, k[:context])), torch.cat((zero, v[:context])))
    near = attend(k[context:], v[context:])
    right, lse = attend(k, v)
    # Where all scores are far below 0, what the zeros weigh drowns float32's last digits of them.
    # But both are averages of values, however little is left.
    lost = (1e-6 * torch.exp(-lse)).clamp(1e-6, 2.5)[..., None] * v.abs().max()
    assert bool(((join(*far, *near) - right).abs() < 1e-5 + lost).all())
    empty = torch.zeros(1, 2, 4), torch.full((1, 2), -torch.inf)
    assert torch.allclose(join(*empty, *near), near[0], atol=1e-6)


@pytest.mark.parametrize("context, chain", [(-20.0, -60.0), (-60.0, -20.0), (-60.0, -60.0)])
def test_scores_far_below_zero_leave_an_average(context, chain):
    """The context weighs less than float32 has beside the zeros' 1, the chain still less."""
    far_lse = torch.tensor([[math.log1p(math.exp(context))]])
    far = torch.full((1, 1, 4), 3.0 * math.exp(context))
    near, near_lse = torch.ones(1, 1, 4), torch.tensor([[chain]])
    found = join(far, far_lse, near, near_lse)
    assert bool(((found >= 1) & (found <= 3)).all()), found


def test_log_odds_by_hand():
    p = torch.tensor([0.5, 0.9, 1e-9, 1.0])
    found = log_odds(p.log())
    assert found[0] == 0 and found[1] == pytest.approx(math.log(9), rel=1e-5)
    assert found[2] == pytest.approx(math.log(1e-9), rel=1e-5)
    assert 13 < found[3] < 15 and torch.isfinite(found).all()
