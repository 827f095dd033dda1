"""What DeepSeek-V4.1 has in common with V4, against transformers' ``DeepseekV4``, in float32.

Random weights, no quantisers. V4's hyper-connections mix a sublayer with its own ``pre`` and V4
normalises queries by head; the first is a matter of which ``pre`` is handed over, the second is
taken out of the other implementation.
"""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

ROWS, PAGE = 45, 16
CLOSE = 1e-5


@pytest.fixture(scope="module")
def theirs():
    """A layer with a window, of a config in which limits, sinks and YaRN all bite."""
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    config = DeepseekV4Config(
        vocab_size=64,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        head_dim=32,
        partial_rotary_factor=0.5,
        q_lora_rank=24,
        o_groups=2,
        o_lora_rank=16,
        sliding_window=8,
        n_routed_experts=8,
        num_experts_per_tok=3,
        swiglu_limit=0.5,
        layer_types=["sliding_attention"],
        mlp_layer_types=["moe"],
        max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 256,
        },
        attn_implementation="eager",
    )
    layer = v4.DeepseekV4DecoderLayer(config, 0).eval()
    layer.self_attn.q_b_norm = torch.nn.Identity()
    generator = torch.Generator().manual_seed(41)
    with torch.no_grad():
        for name, value in [*layer.named_parameters(), *layer.named_buffers()]:
            drawn = torch.randn(value.shape, generator=generator)
            wide = value.shape[-1] ** -0.5 if value.dim() > 1 else 1.0
            value.copy_(1 + 0.2 * drawn if "norm" in name else drawn * wide)
    return v4, config, layer


@pytest.fixture(scope="module")
def ops():
    from deepinfer.api.backend import Impl
    from deepinfer.ops.invariant import invariant_ops
    from deepinfer.ops.table import OpSet

    return OpSet({**invariant_ops(), "quantize": Impl(lambda x, kind: x)}, "oracle")


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(4)
    return lambda *shape: torch.randn(shape, generator=generator)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def check(report, part, *pairs, close=CLOSE):
    error = max(float((one - other).abs().max()) for one, other in pairs)
    report("transformers DeepseekV4,", f"{part}:", error)
    assert error <= close


def our_mix(ops, config, hyper, x):
    return ops.hyper_mix(
        x, hyper.fn, hyper.scale, hyper.base,
        config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps,
    )  # fmt: skip


def our_attention(ops, config, module, rows):
    """Our whole attention block, window alone, on V4's weights."""
    from deepinfer.api.model import DeviceBatch, StepRequests
    from deepinfer.ops.reference.latent import LatentCaches, LatentParams, LatentRows

    count = len(rows)
    params = LatentParams(
        q_kv=torch.cat((module.q_a_proj.weight, module.kv_proj.weight)),
        q_norm=module.q_a_norm.weight,
        kv_norm=module.kv_norm.weight,
        q=module.q_b_proj.weight,
        out_a=module.o_a_proj.weight.view(config.o_groups, config.o_lora_rank, -1),
        out_b=module.o_b_proj.weight,
        sink=module.sinks,
        heads=config.num_attention_heads,
        groups=config.o_groups,
        eps=config.rms_norm_eps,
        window=config.sliding_window,
        ratio=0,
        floored=False,
    )
    batch = DeviceBatch(
        ids=torch.zeros(count, dtype=torch.long),
        positions=torch.arange(count),
        row_of_token=torch.zeros(count, dtype=torch.long),
        kv_slots=torch.arange(count),
        attn=None,
        logit_rows=torch.arange(count),
        requests=StepRequests(
            cu_q=torch.tensor([0, count], dtype=torch.int32),
            starts=torch.zeros(1, dtype=torch.long),
            block_table=torch.arange(-(-count // PAGE), dtype=torch.int32)[None],
            blocks=torch.zeros(1, dtype=torch.long),
            floors=torch.zeros(1, dtype=torch.long),
        ),
    )
    ring = torch.full((1, config.sliding_window + PAGE + 1, config.head_dim), torch.nan)
    y, _ = ops.latent_attention_block(
        rows, params, LatentCaches(ring), LatentRows(batch, batch), our_table(config, "main"), None
    )
    return y


def our_table(config, kind, length=4096):
    from deepinfer.models.deepseek_v41.rotary import Yarn, frequencies, table

    if kind == "main":
        return table(frequencies(config.qk_rope_head_dim, config.rope_theta), length)
    yarn = Yarn(factor=16, beta_fast=32, beta_slow=1, original=256)
    stretched = frequencies(config.qk_rope_head_dim, config.compress_rope_theta, yarn)
    return table(stretched, length)


def our_experts(ops, config, module, rows):
    from deepinfer.ops.reference.scaled import ScaledMoEParams

    shared = module.shared_experts
    params = ScaledMoEParams(
        router=module.gate.weight,
        bias=module.gate.e_score_correction_bias,
        image_bias=None,
        gate_up=module.experts.gate_up_proj,
        down=module.experts.down_proj,
        shared_gate_up=torch.cat((shared.gate_proj.weight, shared.up_proj.weight)),
        shared_down=shared.down_proj.weight,
        experts=config.n_routed_experts,
        chosen=config.num_experts_per_tok,
        scale=config.routed_scaling_factor,
        limit=config.swiglu_limit,
    )
    return ops.scaled_moe_block(rows, None, params)


def attention_inputs(v4, config, rows):
    """Rotary tables and the mask, as transformers' own model makes them."""
    position = torch.arange(rows.shape[1])[None]
    rotary = v4.DeepseekV4RotaryEmbedding(config)
    return {
        "position_ids": position,
        "attention_mask": v4.create_sliding_window_causal_mask(
            config=config, inputs_embeds=rows, attention_mask=None, cache=None,
            position_ids=position,
        ),
        "position_embeddings": {
            kind: rotary(rows, position_ids=position, layer_type=kind)
            for kind in ("main", "compress")
        },
    }  # fmt: skip


def test_mix_and_collapse(theirs, ops, draw, report):
    _, config, layer = theirs
    x = draw(ROWS, config.hc_mult, config.hidden_size)
    post, comb, collapsed = layer.attn_hc(x[None])
    mix = our_mix(ops, config, layer.attn_hc, x)
    check(report, "mix", (mix[1], post[0]), (mix[2], comb[0]))
    check(report, "collapse", (ops.hyper_collapse(x, mix[0]), collapsed[0]))


def test_router(theirs, ops, draw, report):
    _, config, layer = theirs
    gate, rows = layer.mlp.gate, draw(ROWS, config.hidden_size)
    _, weights, ids = gate(rows)
    ours = ops.route(
        ops.linear(rows, gate.weight, None, torch.float32), gate.e_score_correction_bias,
        config.num_experts_per_tok, config.scoring_func, True, config.routed_scaling_factor,
    )  # fmt: skip
    order, want = ours[0].long().sort(1), ids.sort(1)
    assert torch.equal(order.values, want.values)
    found = ours[1].gather(1, order.indices), weights.gather(1, want.indices)
    check(report, "router (sqrtsoftplus, bias, scale)", found)


def test_experts_with_a_limit(theirs, ops, draw, report):
    _, config, layer = theirs
    rows = draw(ROWS, config.hidden_size)
    up = rows @ layer.mlp.shared_experts.up_proj.weight.T
    assert (up.abs() > config.swiglu_limit).float().mean() > 0.3
    found = our_experts(ops, config, layer.mlp, rows), layer.mlp(rows[None])[0]
    check(report, "experts, clamped, and the shared one", found)


@pytest.mark.parametrize("kind", ["main", "compress"])
def test_rotation_and_its_inverse(theirs, ops, draw, report, kind):
    from deepinfer.ops.reference.latent import turn

    v4, config, _ = theirs
    position = torch.randint(4096, (ROWS,), generator=torch.Generator().manual_seed(1))
    x = draw(ROWS, config.num_attention_heads, config.head_dim)
    rotary = v4.DeepseekV4RotaryEmbedding(config)
    cos, sin = rotary(x, position_ids=position[None], layer_type=kind)
    table = our_table(config, kind)
    # The tables are float32 cosines of float32 angles up to 4096.
    check(report, f"rotary table, {kind}", (table[position], torch.cat((cos, sin), -1)[0]))
    pairs = [
        (
            turn(ops, x, position, table, backwards),
            v4.apply_rotary_pos_emb(x[None], cos, -sin if backwards else sin, unsqueeze_dim=2)[0],
        )
        for backwards in (False, True)
    ]
    check(report, f"partial interleaved rotation and its inverse, {kind}", *pairs)


def test_attention_with_sinks(theirs, ops, draw, report):
    v4, config, layer = theirs
    rows = draw(1, ROWS, config.hidden_size)
    want, _ = layer.self_attn(rows, **attention_inputs(v4, config, rows))
    ours = our_attention(ops, config, layer.self_attn, rows[0])
    check(report, "window attention, sinks, inverse rotation, grouped output", (ours, want[0]))


def test_a_whole_layer(theirs, ops, draw, report):
    v4, config, layer = theirs
    x = draw(1, ROWS, config.hc_mult, config.hidden_size)
    want = layer(x, **attention_inputs(v4, config, x[:, :, 0]))[0]
    ours = x[0]
    for hyper, norm, run, module in (
        (layer.attn_hc, layer.input_layernorm, our_attention, layer.self_attn),
        (layer.ffn_hc, layer.post_attention_layernorm, our_experts, layer.mlp),
    ):
        pre, post, comb = our_mix(ops, config, hyper, ours)
        rows = ops.rms_norm(ops.hyper_collapse(ours, pre), norm.weight, config.rms_norm_eps)
        ours = ops.hyper_merge(ours, run(ops, config, module, rows), post, comb)
    check(report, "a whole layer with a window", (ours, want))
