"""GGUF: every type against the gguf package, every family's names, every way to be damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from deepinfer.errors import ModelLoadError
from deepinfer.models.checkpoint import GGUFCheckpoint
from deepinfer.models.gguf import GGUFFile
from deepinfer.models.gguf_arch import ARCHITECTURES, _llama3_factors
from deepinfer.models.gguf_quants import KNOWN, dequantize_into
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

gguf = pytest.importorskip("gguf")

HIDDEN, FFN, HEADS, KV_HEADS, HEAD, VOCAB, EXPERTS = 64, 96, 4, 2, 16, 40, 3

METADATA = {
    ".block_count": 1,
    ".context_length": 128,
    ".embedding_length": HIDDEN,
    ".feed_forward_length": FFN,
    ".attention.head_count": HEADS,
    ".attention.head_count_kv": KV_HEADS,
    ".attention.layer_norm_rms_epsilon": 1e-6,
    ".rope.freq_base": 1e6,
}


def metadata(arch, **extra):
    found = dict(METADATA)
    if arch.startswith("qwen3"):
        found[".attention.key_length"] = 2 * HEAD
    if arch == "qwen3moe":
        found |= {".expert_count": EXPERTS, ".expert_used_count": 2}
        found |= {".expert_feed_forward_length": FFN}
    return found | extra


def hf_weights(arch, seed=0):
    """Random weights of a one-layer model under Hugging Face names."""
    head = 2 * HEAD if arch.startswith("qwen3") else HEAD
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        layer + "input_layernorm.weight": (HIDDEN,),
        layer + "post_attention_layernorm.weight": (HIDDEN,),
        layer + "self_attn.q_proj.weight": (HEADS * head, HIDDEN),
        layer + "self_attn.k_proj.weight": (KV_HEADS * head, HIDDEN),
        layer + "self_attn.v_proj.weight": (KV_HEADS * head, HIDDEN),
        layer + "self_attn.o_proj.weight": (HIDDEN, HEADS * head),
    }
    if arch == "qwen2":
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            shapes[f"{layer}self_attn.{part}_proj.bias"] = (heads * head,)
    if arch.startswith("qwen3"):
        shapes[layer + "self_attn.q_norm.weight"] = (head,)
        shapes[layer + "self_attn.k_norm.weight"] = (head,)
    blocks = [layer + "mlp."]
    if arch == "qwen3moe":
        shapes[layer + "mlp.gate.weight"] = (EXPERTS, HIDDEN)
        blocks = [f"{layer}mlp.experts.{e}." for e in range(EXPERTS)]
    for block in blocks:
        shapes[block + "gate_proj.weight"] = (FFN, HIDDEN)
        shapes[block + "up_proj.weight"] = (FFN, HIDDEN)
        shapes[block + "down_proj.weight"] = (HIDDEN, FFN)
    rng = np.random.default_rng(seed)
    return {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}


def permuted(weight, heads):
    """Rows as the converter of llama files orders them."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def stored(arch, weights):
    """The same weights under GGUF names, as a converter would write them."""
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k"}
    names |= {"self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output"}
    names |= {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
    names |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    names |= {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
    names |= {"mlp.gate": "ffn_gate_inp"}
    top = {"model.embed_tokens.weight": "token_embd.weight"}
    top |= {"model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
    out = {}
    for name, weight in weights.items():
        if name in top:
            out[top[name]] = weight
        elif ".experts." not in name:
            part, kind = name.removeprefix("model.layers.0.").rsplit(".", 1)
            heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}.get(part)
            moved = permuted(weight, heads) if arch == "llama" and heads else weight
            out[f"blk.0.{names[part]}.{kind}"] = moved
    for part in ("gate", "up", "down"):
        experts = [w for n, w in weights.items() if ".experts." in n and f".{part}_proj" in n]
        if experts:
            out[f"blk.0.ffn_{part}_exps.weight"] = np.stack(experts)
    return out


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_family_comes_back_under_hugging_face_names(write_gguf, arch):
    weights = hf_weights(arch)
    checkpoint = GGUFCheckpoint(write_gguf(arch, metadata(arch), stored(arch, weights)))
    assert set(checkpoint.names()) == set(weights)
    for name, expected in weights.items():
        found = checkpoint.tensor(name, torch.float32)
        assert checkpoint.shape(name) == expected.shape == tuple(found.shape)
        assert np.array_equal(found.numpy(), expected), name
        assert found.is_contiguous()
    assert checkpoint.tied


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_config_says_what_the_metadata_says(write_gguf, arch):
    path = write_gguf(arch, metadata(arch), stored(arch, hf_weights(arch)))
    config = GGUFCheckpoint(path).config
    assert config["architectures"] == [ARCHITECTURES[arch][0]]
    assert config["hidden_size"] == HIDDEN and config["intermediate_size"] == FFN
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, KV_HEADS)
    assert config["head_dim"] == (2 * HEAD if arch.startswith("qwen3") else HEAD)
    assert config["rms_norm_eps"] == 1e-6 and config["rope_theta"] == 1e6
    assert config["vocab_size"] == VOCAB and config["max_position_embeddings"] == 128
    assert config["attention_bias"] is (arch == "qwen2")
    assert ("num_experts" in config) is (arch == "qwen3moe")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_transformers_reads_the_same_weights(write_gguf, arch):
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    meta = metadata(arch) | {".vocab_size": VOCAB, "tokenizer.ggml.tokens": ["a"] * VOCAB}
    path = write_gguf(arch, meta, stored(arch, hf_weights(arch)))
    checkpoint = GGUFCheckpoint(path)
    # Our config, because transformers reads a few keys not at all (expert width).
    config = transformers.AutoConfig.for_model(**checkpoint.config)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, config=config, dtype=torch.float32
    ).state_dict()
    for name in checkpoint.names():
        if name in oracle:
            assert torch.equal(checkpoint.tensor(name, torch.float32), oracle[name]), name
    for part in ("gate_up_proj", "down_proj"):  # transformers keeps experts stacked
        stacked = oracle.get(f"model.layers.0.mlp.experts.{part}")
        for expert in range(0 if stacked is None else EXPERTS):
            names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
            prefix = f"model.layers.0.mlp.experts.{expert}."
            ours = [checkpoint.tensor(f"{prefix}{n}.weight", torch.float32) for n in names]
            assert torch.equal(torch.cat(ours), stacked[expert])


def test_bias_of_q_and_k_is_unpermuted_too(write_gguf):
    weights = hf_weights("llama")
    name = "model.layers.0.self_attn.q_proj.bias"
    weights[name] = np.arange(HEADS * HEAD, dtype=np.float32)
    checkpoint = GGUFCheckpoint(write_gguf("llama", metadata("llama"), stored("llama", weights)))
    assert np.array_equal(checkpoint.tensor(name, torch.float32).numpy(), weights[name])
    assert checkpoint.config["attention_bias"] is True


def test_an_output_matrix_of_its_own_is_not_tied(write_gguf):
    weights = hf_weights("qwen2") | {"lm_head.weight": np.ones((VOCAB, HIDDEN), np.float32)}
    checkpoint = GGUFCheckpoint(write_gguf("qwen2", metadata("qwen2"), stored("qwen2", weights)))
    assert not checkpoint.tied and not checkpoint.config["tie_word_embeddings"]
    assert checkpoint.tensor("lm_head.weight", torch.float32).eq(1).all()


def test_end_of_turn_joins_the_end_of_text(write_gguf):
    ids = {"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eot_token_id": 9}
    path = write_gguf("llama", metadata("llama") | ids, stored("llama", hf_weights("llama")))
    assert GGUFCheckpoint(path).generation_config == {"eos_token_id": [7, 9]}


def rope(write_gguf, extra=(), tensors=()):
    meta = metadata("llama") | dict(extra)
    path = write_gguf("llama", meta, stored("llama", hf_weights("llama")) | dict(tensors))
    return GGUFCheckpoint(path).config.get("rope_scaling")


def test_rope_scaling(write_gguf):
    assert rope(write_gguf) is None
    linear = {".rope.scaling.type": "linear", ".rope.scaling.factor": 4.0}
    assert rope(write_gguf, linear) == {"rope_type": "linear", "factor": 4.0}
    yarn = {".rope.scaling.type": "yarn", ".rope.scaling.factor": 4.0}
    yarn |= {".rope.scaling.original_context_length": 32}
    assert rope(write_gguf, yarn) == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    with pytest.raises(ModelLoadError, match="'longrope' is unknown"):
        rope(write_gguf, {".rope.scaling.type": "longrope"})


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_factors_become_parameters(write_gguf, factor):
    """The factors as the converter computes them: one frequency at a time."""
    base, original, factors = 1e6, 8192, []
    for index in range(HEAD // 2):
        wavelength = 2 * np.pi * base ** (2 * index / HEAD)
        if wavelength < original / 4.0:
            factors.append(1.0)
        elif wavelength > original / 1.0:
            factors.append(factor)
        else:
            smooth = (original / wavelength - 1.0) / 3.0
            factors.append(1 / ((1 - smooth) / factor + smooth))
    assert rope(write_gguf, (), {"rope_freqs.weight": np.array(factors, np.float32)}) == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    made = {"head_dim": HEAD, "rope_theta": base}
    assert np.allclose(_llama3_factors(made, factor, original), factors)
    with pytest.raises(ModelLoadError, match="no known llama3 scaling"):
        rope(write_gguf, (), {"rope_freqs.weight": np.full(HEAD // 2, 3.5, np.float32)})


def quantized(quant, rows=5, columns=768, seed=0):
    """Rows of a type: quantised values where the package can, bytes with sane scales if not."""
    rng = np.random.default_rng(seed)
    kind = gguf.GGMLQuantizationType[quant]
    values = rng.standard_normal((rows, columns)).astype(np.float32)
    try:
        return np.ascontiguousarray(gguf.quants.quantize(values, kind)).view(np.uint8)
    except NotImplementedError:
        block, nbytes = gguf.GGML_QUANT_SIZES[kind]
        return rng.integers(0, 256, (rows, columns // block * nbytes), dtype=np.uint8)


@pytest.mark.parametrize("quant", KNOWN)
def test_every_type_equals_the_package_bit_for_bit(write_gguf, quant):
    raw = quantized(quant)
    tensors = stored("llama", hf_weights("llama")) | {"token_embd.weight": (raw, quant)}
    if quant == "F32":
        tensors["token_embd.weight"] = raw.view(np.float32)
    checkpoint = GGUFCheckpoint(write_gguf("llama", metadata("llama"), tensors))
    with np.errstate(all="ignore"):
        kind = gguf.GGMLQuantizationType[quant]
        expected = np.asarray(gguf.quants.dequantize(raw, kind), np.float32)
    found = checkpoint.tensor("model.embed_tokens.weight", torch.float32)
    assert np.array_equal(found.numpy(), expected, equal_nan=True)
    narrow = checkpoint.tensor("model.embed_tokens.weight", torch.bfloat16)
    assert torch.equal(narrow.nan_to_num(), torch.from_numpy(expected).bfloat16().nan_to_num())
    rounded = checkpoint.tensor("model.embed_tokens.weight", torch.float32, round_to=torch.bfloat16)
    assert rounded.dtype == torch.float32
    assert torch.equal(rounded.nan_to_num(), narrow.float().nan_to_num())


def test_chunks_join_without_a_seam():
    rows, columns = 1500, 512
    raw = quantized("Q8_0", rows, columns)
    out = torch.empty(rows, columns)
    dequantize_into(raw, "Q8_0", out, "a test")
    assert np.array_equal(out.numpy(), gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q8_0))


def test_unknown_things_are_named(write_gguf):
    weights = stored("llama", hf_weights("llama"))
    with pytest.raises(ModelLoadError, match="architecture 'mamba'; known are llama, qwen2"):
        GGUFCheckpoint(write_gguf("mamba", metadata("mamba"), weights))
    with pytest.raises(ModelLoadError, match=r"tensor 'blk\.0\.ssm_a\.weight'"):
        extra = {"blk.0.ssm_a.weight": np.ones(4, np.float32)}
        GGUFCheckpoint(write_gguf("llama", metadata("llama"), weights | extra))
    with pytest.raises(ModelLoadError, match="one of 3 parts"):
        GGUFCheckpoint(write_gguf("llama", metadata("llama") | {"split.count": 3}, weights))
    with pytest.raises(ModelLoadError, match="mixture of 8 experts"):
        GGUFCheckpoint(write_gguf("llama", metadata("llama") | {".expert_count": 8}, weights))
    with pytest.raises(ModelLoadError, match=r"lacks the metadata key 'llama\.block_count'"):
        short = {k: v for k, v in metadata("llama").items() if k != ".block_count"}
        GGUFCheckpoint(write_gguf("llama", short, weights))
    with pytest.raises(ModelLoadError, match="differs between layers"):
        uneven = metadata("llama") | {".attention.head_count_kv": [2, 4]}
        GGUFCheckpoint(write_gguf("llama", uneven, weights))
    with pytest.raises(ModelLoadError, match="'eight', expected a whole number"):
        GGUFCheckpoint(write_gguf("llama", metadata("llama") | {".block_count": "eight"}, weights))
    checkpoint = GGUFCheckpoint(write_gguf("llama", metadata("llama"), weights))
    with pytest.raises(ModelLoadError, match=r"no tensor 'lm_head\.weight'"):
        checkpoint.tensor("lm_head.weight", torch.float32)


def test_a_type_that_cannot_be_dequantised_is_named(write_gguf):
    raw = np.zeros((4, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q8_K][1]), np.uint8)
    tensors = stored("llama", hf_weights("llama")) | {"token_embd.weight": (raw, "Q8_K")}
    checkpoint = GGUFCheckpoint(write_gguf("llama", metadata("llama"), tensors))
    with pytest.raises(ModelLoadError, match="stored as Q8_K, which cannot be dequantised"):
        checkpoint.tensor("model.embed_tokens.weight", torch.float32)


@pytest.fixture
def whole(write_gguf):
    vocabulary = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.token_type": [1, 1, 3],
        "general.languages": ["en", "ru"],
    }
    weights = stored("llama", hf_weights("llama"))
    return write_gguf("llama", metadata("llama") | vocabulary, weights)


@pytest.fixture
def whole_bytes(whole):
    return memoryview(whole.read_bytes())  # hypothesis prints arguments, and this one is short


def test_a_file_cut_short_anywhere_is_refused_at_open(whole):
    data = whole.read_bytes()
    data_start = GGUFFile(whole).header_bytes
    lengths = [*range(0, data_start + 64, 7), *range(data_start, len(data), 977), len(data) - 1]
    for length in lengths:
        whole.write_bytes(data[:length])
        with pytest.raises(ModelLoadError, match="cut short"):
            GGUFFile(whole)


def test_other_magic_versions_and_byte_order_are_named(whole):
    data = whole.read_bytes()
    for head, message in (
        (b"GGML" + data[4:], "begins with b'GGML'"),
        (data[:4] + (1).to_bytes(4, "little") + data[8:], "version 1 is not supported"),
        (data[:4] + (3).to_bytes(4, "big") + data[8:], "a big-endian file"),
        (data[:8] + b"\xff" * 8 + data[16:], "declares 18446744073709551615 entries"),
    ):
        whole.write_bytes(head)
        with pytest.raises(ModelLoadError, match=message):
            GGUFFile(whole)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300, deadline=None
)
@given(
    damage=st.lists(st.tuples(st.integers(0, 2600), st.integers(0, 255)), min_size=1, max_size=4)
)
def test_damaged_headers_never_raise_anything_else(whole, whole_bytes, damage):
    damaged = bytearray(whole_bytes)
    for where, byte in damage:
        damaged[where % len(damaged)] = byte
    whole.write_bytes(damaged)
    try:
        checkpoint = GGUFCheckpoint(whole)
        for name in checkpoint.names():
            checkpoint.tensor(name, torch.float32)
    except ModelLoadError as error:
        assert str(whole) in str(error)


def test_the_fingerprint_follows_the_weights_and_nothing_else(write_gguf):
    def made(seed, name):
        weights = stored("llama", hf_weights("llama", seed))
        return GGUFCheckpoint(write_gguf("llama", metadata("llama"), weights, name)).fingerprint()

    assert made(0, "one.gguf") == made(0, "two.gguf") != made(1, "three.gguf")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads the process's mappings")
def test_the_mapping_goes_with_the_checkpoint(write_gguf):
    path = write_gguf("llama", metadata("llama"), stored("llama", hf_weights("llama")))
    checkpoint = GGUFCheckpoint(path)
    kept = checkpoint.tensor("model.norm.weight", torch.float32)
    assert str(path) in Path("/proc/self/maps").read_text()
    del checkpoint
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert kept.isfinite().all()


@pytest.mark.model
def test_the_demo_model_dequantises_as_the_package_does(demo_gguf):
    file = GGUFFile(demo_gguf)
    for name in ("blk.0.attn_q.weight", "blk.29.ffn_down.weight", "output_norm.weight"):
        info, raw = file.tensors[name], file.raw(name)
        out = torch.empty(raw.shape[0], info.shape[-1])
        dequantize_into(raw, info.quant, out, name)
        kind = gguf.GGMLQuantizationType[info.quant]
        expected = np.asarray(gguf.quants.dequantize(raw, kind)).view(np.float32)
        assert np.array_equal(out.numpy(), expected.reshape(out.shape))
