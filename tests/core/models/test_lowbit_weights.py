"""Low-bit weights: decoded bytes, joins as stored, NaN scales, experts of a rank, sizes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from deepinfer.api.backend import Impl, OpContext
from deepinfer.api.model import WeightRule
from deepinfer.errors import ModelLoadError
from deepinfer.models.weights import LoadPlan, join, load_weights, mapped_bytes, owned, weight_bytes
from deepinfer.ops.backend import ReferenceBackend, build_ops
from deepinfer.ops.lowbit import BlockScaled
from deepinfer.ops.table import OpSet

CTX = OpContext(dtype=torch.float32, device=torch.device("cpu"))
SCALED = ("scaled_linear", "linear")


class Shelf:
    """A checkpoint in memory: low-bit weights are pairs of uint8 tensors under their type."""

    def __init__(self):
        self.entries = {}

    def put(self, name, storage, tensor):
        self.entries[name] = (storage, tensor)

    def names(self):
        return tuple(self.entries)

    def shape(self, name):
        return tuple(self.entries[name][1].shape)

    def storage(self, name):
        return self.entries[name][0]

    def file(self, name):
        return Path("shelf")

    def tensor(self, name, dtype, *, round_to=None):
        return self.entries[name][1].to(round_to or dtype).to(dtype, copy=True)

    def bytes_into(self, name, out, begin=0):
        stored = self.entries[name][1].reshape(-1)
        out.copy_(stored[begin : begin + out.numel()].view_as(out))


def fp8(shelf, name, rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 127, (rows, columns), generator=generator, dtype=torch.uint8)
    grid = (-(-rows // 32), -(-columns // 32))
    scales = torch.randint(110, 135, grid, generator=generator, dtype=torch.uint8)
    shelf.put(f"{name}.weight", "F8_E4M3", codes)
    shelf.put(f"{name}.scale", "F8_E8M0", scales)
    return BlockScaled(codes, scales, "fp8").dequantize()


def fp4(shelf, name, rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 135, (rows, columns // 32), generator=generator, dtype=torch.uint8)
    shelf.put(f"{name}.weight", "I8", codes)
    shelf.put(f"{name}.scale", "F8_E8M0", scales)
    return BlockScaled(codes, scales, "fp4").dequantize()


def rule(names, shapes, stored, uses=SCALED, **more):
    sources = tuple(f"{name}.weight" for name in names)
    return WeightRule(
        parameter="p", sources=sources, shapes=shapes, uses=uses, stored=stored, **more
    )


def test_the_specifications_sample():
    """Section 8.2: eight real bytes of ``layers.0.attn.wkv.weight`` and their scale."""
    codes = torch.tensor([[0xD8, 0x71, 0xF2, 0x79, 0x70, 0x69, 0xF0, 0xE5]], dtype=torch.uint8)
    shelf = Shelf()
    shelf.put("w.weight", "F8_E4M3", codes)
    shelf.put("w.scale", "F8_E8M0", torch.tensor([[0x73]], dtype=torch.uint8))
    expected = [-0.00390625, 0.03515625, -0.0390625, 0.0703125]
    expected += [0.03125, 0.017578125, -0.03125, -0.0126953125]
    for dtype in (torch.float32, torch.bfloat16):
        found = join(rule(["w"], ((1, 8),), "fp8"), shelf, dtype)
        assert found.dtype == dtype and found.tolist() == [expected]


def test_a_packed_byte_holds_the_even_element_low():
    """Section 8.2: sign bit 8, magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6; one scale for 32 columns."""
    shelf = Shelf()
    codes = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2], dtype=torch.uint8)
    shelf.put("w.weight", "I8", codes)
    shelf.put("w.scale", "F8_E8M0", torch.tensor([[128]], dtype=torch.uint8))
    found = join(rule(["w"], ((1, 32),), "fp4"), shelf, torch.float32)
    steps = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert found[0, :16].tolist() == [2 * v for v in steps] + [-2 * v for v in steps]


@pytest.mark.parametrize("dequantize", [True, False])
def test_fused_rows_of_fp8(dequantize):
    shelf = Shelf()
    parts = [fp8(shelf, "a", 64, 72, seed=1), fp8(shelf, "b", 40, 72, seed=2)]
    found = join(
        rule(["a", "b"], ((64, 72), (40, 72)), "fp8"), shelf, torch.float32, None, dequantize
    )
    assert isinstance(found, BlockScaled) is not dequantize
    values = found if dequantize else found.dequantize()
    assert torch.equal(values, torch.cat(parts))


def test_a_large_weight_is_decoded_in_pieces_without_a_seam(monkeypatch):
    monkeypatch.setattr("deepinfer.models.weights._PIECE", 64 * 96)
    shelf = Shelf()
    wide, tall = fp8(shelf, "a", 200, 96, seed=1), fp4(shelf, "b", 200, 96, seed=2)
    assert torch.equal(join(rule(["a"], ((200, 96),), "fp8"), shelf, torch.float32), wide)
    assert torch.equal(join(rule(["b"], ((200, 96),), "fp4"), shelf, torch.float32), tall)


@pytest.mark.parametrize("dequantize", [True, False])
@pytest.mark.parametrize("how", [{"stack": True}, {"view": (3, 32, 64)}])
@pytest.mark.parametrize("kind, make", [("fp8", fp8), ("fp4", fp4)])
def test_experts_are_stacked(kind, make, how, dequantize):
    shelf = Shelf()
    parts = [make(shelf, f"e{i}", 32, 64, seed=i) for i in range(3)]
    found = join(
        rule(["e0", "e1", "e2"], ((32, 64),) * 3, kind, **how),
        shelf,
        torch.bfloat16,
        None,
        dequantize,
    )
    assert found.shape == (3, 32, 64)
    values = found if dequantize else found.dequantize(torch.bfloat16)
    assert torch.equal(values, torch.stack(parts).bfloat16())
    if not dequantize:
        assert torch.equal(found[1].dequantize(), parts[1])


def test_tiles_that_do_not_meet_are_refused_only_as_stored():
    shelf = Shelf()
    parts = [fp8(shelf, "a", 40, 64), fp8(shelf, "b", 64, 64)]
    joined = rule(["a", "b"], ((40, 64), (64, 64)), "fp8")
    assert torch.equal(join(joined, shelf, torch.float32), torch.cat(parts))
    with pytest.raises(ModelLoadError, match=r"a\.weight \(40 rows\).*dequantize_weights=True"):
        join(joined, shelf, torch.float32, dequantize=False)


@pytest.mark.parametrize("dequantize", [True, False])
def test_a_nan_scale_is_named_with_its_place(dequantize):
    shelf = Shelf()
    fp8(shelf, "a", 64, 96)
    shelf.entries["a.scale"][1][1, 2] = 255
    with pytest.raises(ModelLoadError, match=r"'a\.scale' has a NaN scale.* at row 1, column 2\."):
        join(rule(["a"], ((64, 96),), "fp8"), shelf, torch.float32, None, dequantize)


def test_the_smallest_scale_is_no_zero():
    shelf = Shelf()
    shelf.put("w.weight", "F8_E4M3", torch.full((1, 1), 0x38, dtype=torch.uint8))
    shelf.put("w.scale", "F8_E8M0", torch.zeros(1, 1, dtype=torch.uint8))
    assert join(rule(["w"], ((1, 1),), "fp8"), shelf, torch.float32).item() == 2.0**-127


def test_exact_rules_stay_float32():
    shelf = Shelf()
    shelf.put("w", "BF16", torch.tensor([1.0, 2.0]).bfloat16())
    shelf.put("v", "F32", torch.tensor([1.001]))
    for name, size in (("w", 2), ("v", 1)):
        exact = WeightRule(parameter="p", sources=(name,), shapes=((size,),), uses=(), exact=True)
        found = join(exact, shelf, torch.bfloat16, torch.bfloat16)
        assert found.dtype == torch.float32
        assert torch.equal(found, shelf.entries[name][1].float())


def loaded(shelf, rules, ops=None, **plan):
    store = {}
    model = SimpleNamespace(load=store.__setitem__)
    ops = ops or build_ops(ReferenceBackend(), CTX)
    size = load_weights(model, rules, shelf, ops, torch.bfloat16, plan=LoadPlan(**plan))
    return store, size


def test_what_no_scaled_op_reads_is_dequantised_in_any_case():
    shelf = Shelf()
    fp8(shelf, "a", 32, 64)
    read = rule(["a"], ((32, 64),), "fp8", uses=("latent_attention_block", "grouped_linear"))
    store, size = loaded(shelf, [read], dequantize=False)
    assert isinstance(store["p"], torch.Tensor)
    assert size == 32 * 64 * 2 == weight_bytes([read], torch.bfloat16, False)


def test_a_weight_as_stored_is_not_prepared_by_dense_ops():
    shelf = Shelf()
    fp8(shelf, "a", 32, 64)
    asked = []
    noted = Impl(lambda *a: None, lambda weight, uses: asked.append(type(weight)) or weight)
    ops = OpSet({"linear": noted}, "test", CTX)
    read = rule(["a"], ((32, 64),), "fp8")
    store, size = loaded(shelf, [read], ops, dequantize=False)
    assert asked == [] and isinstance(store["p"], BlockScaled)
    assert size == 32 * 64 + 2 == weight_bytes([read], torch.bfloat16, False)
    loaded(shelf, [read], ops, dequantize=True)
    assert asked == [torch.Tensor]


@pytest.mark.parametrize(
    "part, storage, shape, said",
    [
        ("weight", "I8", (32, 64), r"'a\.weight' stored as I8, expected F8_E4M3, in shelf"),
        ("scale", "U8", (1, 2), r"'a\.scale' stored as U8, expected F8_E8M0, in shelf"),
        ("scale", "F8_E8M0", (2, 1), r"'a\.scale' with shape \[2, 1\], expected \[1, 2\]"),
        ("weight", "F8_E4M3", (64, 32), r"'a\.weight' with shape \[64, 32\], expected \[32, 64\]"),
        ("scale", None, None, r"no tensor 'a\.scale' \(expected shape \[1, 2\]\)"),
    ],
)
def test_a_low_bit_weight_that_does_not_fit_is_named(part, storage, shape, said):
    shelf = Shelf()
    fp8(shelf, "a", 32, 64)
    del shelf.entries[f"a.{part}"]
    if storage is not None:
        shelf.put(f"a.{part}", storage, torch.zeros(shape, dtype=torch.uint8))
    with pytest.raises(ModelLoadError, match=said):
        loaded(shelf, [rule(["a"], ((32, 64),), "fp8")])


def test_low_bit_bytes_are_never_taken_for_numbers():
    shelf = Shelf()
    fp8(shelf, "a", 32, 64)
    with pytest.raises(
        ModelLoadError, match="stored as F8_E4M3, expected F64 or F32 or F16 or BF16"
    ):
        loaded(shelf, [rule(["a"], ((32, 64),), None)])


def test_names_that_nobody_knows_are_refused_where_a_family_says_so():
    shelf = Shelf()
    fp8(shelf, "a", 32, 64)
    for index in range(6):
        shelf.put(f"mtp.{index}", "F32", torch.zeros(1))
        shelf.put(f"odd.{index}", "F32", torch.zeros(1))
    mine = [rule(["a"], ((32, 64),), "fp8")]
    loaded(shelf, mine)
    loaded(shelf, mine, known=("mtp.", "odd."))
    with pytest.raises(ModelLoadError, match=r"'odd\.0' \(in shelf\).*'odd\.3'.* and 2 more"):
        loaded(shelf, mine, known=("mtp.",))


def ranks(rank, size):
    return SimpleNamespace(ep=SimpleNamespace(rank=rank, size=size))


def experts(count, **how):
    names = [f"l.experts.{i}.{w}" for i in range(count) for w in ("w1", "w3")]
    return rule(names, ((32, 64),) * len(names), "fp4", view=(count, 64, 64), **how)


def test_experts_of_other_ranks_are_not_read():
    shelf = Shelf()
    values = [
        fp4(shelf, f"l.experts.{i}.{w}", 32, 64, seed=7 * i + (w == "w3"))
        for i in range(5)
        for w in ("w1", "w3")
    ]
    seen = []
    for rank in range(2):
        mine = owned(experts(5), ranks(rank, 2))
        found = join(mine, shelf, torch.float32)
        seen += list(found)
    assert torch.equal(torch.stack(seen).view(10, 32, 64), torch.stack(values))


def test_only_owned_experts_are_loaded_and_the_others_still_count_as_known():
    shelf = Shelf()
    for i in range(4):
        for w in ("w1", "w3"):
            fp4(shelf, f"l.experts.{i}.{w}", 32, 64)
    read = []
    original = shelf.bytes_into
    shelf.bytes_into = lambda name, *how: (read.append(name), original(name, *how))
    store, size = loaded(shelf, [experts(4)], known=(), parallel=ranks(1, 4), dequantize=False)
    assert {name.split(".")[2] for name in read} == {"1"}
    assert store["p"].shape == (1, 64, 64)
    assert size == weight_bytes([experts(4)], torch.bfloat16, False, ranks(1, 4))


def test_a_rank_without_experts_reads_none():
    assert owned(experts(2), ranks(0, 4)) is None
    shared = rule(["l.shared_experts.w1"], ((32, 64),), "fp8")
    assert owned(shared, ranks(0, 4)) is shared


def test_bytes_are_told_before_anything_is_loaded():
    table = rule(["t"], ((100, 64),), "table", uses=())
    weights = [experts(2), rule(["a"], ((40, 72),), "fp8"), table]
    exact = WeightRule(parameter="x", sources=("x",), shapes=((3, 5),), uses=(), exact=True)
    count = 4 * 32 * 64 + 40 * 72
    assert weight_bytes([*weights, exact], torch.bfloat16, True) == 2 * count + 60
    stored = 4 * 32 * (32 + 2) + 40 * 72 + 2 * 3
    assert weight_bytes([*weights, exact], torch.bfloat16, False) == stored + 60
    assert mapped_bytes(weights) == 100 * (64 + 2)
