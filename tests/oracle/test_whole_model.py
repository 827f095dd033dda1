"""The text model against ``nemo-automodel`` on the golden checkpoints, in float32.

Without quantisers two right implementations differ by sums' last bits: every part of every layer
is compared, and all choices are equal. With quantisers a last bit may turn into another code, a
flip, that moves its row and the rows that read it: layers are then judged one by one, both
implementations on the same inputs, by the share of rows with a flip and the error of the others.
"""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

LOGITS, PARTS = 2e-5, 2e-5  # largest absolute difference without quantisers
EXACT = 1e-3  # a row of logits within this has no flip
FLIP = 1e-6  # relative error of a layer's row from which on it has one
VALUES = ("stream", "engram", "attention", "experts", "compressed", "index_keys")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def texts(golden, lengths=(5, 33, 200)):
    """Recorded prompts, and one with image rows where the model knows them."""
    found = {p: golden[f"{p}/ids"].long() for p in golden.prompts("f32")}
    found = {p: ids for p, ids in found.items() if len(ids) in lengths}
    if golden.config.image_token >= 0:
        ids = found["p200"].clone()
        for begin, end in ((20, 45), (90, 91), (100, 108)):
            ids[begin:end] = golden.config.image_token
        found["images"] = ids
    return found


def difference(got, want):
    return float((got - want).abs().max()) if got.numel() else 0.0


def compare(got, want):
    """Largest difference by part of a layer; choices that differ as sets, in rows."""
    errors, choices = {}, {}
    for name in VALUES:
        one, other = getattr(got, name), getattr(want, name)
        assert (one is None) == (other is None), name
        if one is not None:
            errors[name] = difference(one, other)
    for mix, other in zip(got.mixes, want.mixes, strict=True):
        for name, one, two in zip(("pre", "post", "comb"), mix, other, strict=True):
            errors[name] = max(errors.get(name, 0.0), difference(one, two))
    order, wanted = (ids.long().sort(1) for ids, _ in (got.router, want.router))
    same = (order.values == wanted.values).all(1)
    choices["router"] = int((~same).sum())
    ours, theirs = (
        weights.gather(1, by.indices)[same]
        for (_, weights), by in ((got.router, order), (want.router, wanted))
    )
    errors["router"] = difference(ours, theirs)
    if got.selected is not None:
        from v41_harness import same_sets

        choices["selected"] = int((~same_sets(got.selected, want.selected)).sum())
    if got.candidates is not None:
        choices["candidates"] = int((got.candidates != want.candidates).any(1).sum())
    return errors, choices


def test_without_quantisers(pair, report):
    from oracle_rigs import logits, rig

    golden, peer = pair
    ours = rig(golden, "off")
    for name, ids in texts(golden, (5, 33, 200, 700)).items():
        got, steps = logits(ours, ids, "off")
        want, theirs = peer.logits(ids, "off")
        worst, differ = {"logits": difference(got, want)}, 0
        for one, other in zip(steps, theirs, strict=True):
            errors, choices = compare(one, other)
            differ += sum(choices.values())
            for part, error in errors.items():
                worst[part] = max(worst.get(part, 0.0), error)
        table = " ".join(f"{k} {v:.1e}" for k, v in worst.items())
        report(golden.folder.name, name, "no quantisers:", table, f"choices that differ: {differ}")
        assert differ == 0
        assert worst.pop("logits") <= LOGITS
        assert max(worst.values()) <= PARTS, worst


@pytest.mark.parametrize("sizes", [(7,), (3, 1, 20, 2, 5, 64)], ids=str)
def test_chunks_without_quantisers(pair, report, sizes):
    """Rings, open groups and entries of earlier steps, against a model that has no caches.

    Values that no quantiser has put on a grid also show best whether chunks change a row's bits.
    """
    from oracle_rigs import play, rig
    from v41_harness import bits

    golden, peer = pair
    ours, ids = rig(golden, "off"), golden["p200/ids"].long()
    want, _ = peer.logits(ids, "off")
    got = play(ours, ids, "off").chunks(*sizes)
    error = difference(got, want)
    report(golden.folder.name, "p200", f"no quantisers, chunks of {sizes}: logits", error)
    assert error <= LOGITS
    assert torch.equal(bits(got), bits(play(ours, ids, "off").chunks(len(ids))))


@pytest.mark.parametrize("which", ["caches", "all"])
def test_layers_with_quantisers(pair, report, which):
    from oracle_rigs import inputs, logits, rig

    golden, peer = pair
    ours = rig(golden, which)
    for name, ids in texts(golden).items():
        got, steps = logits(ours, ids, which)
        theirs = peer.from_inputs(ids, which, inputs(ours, ids, steps))
        worst, whole, share = 0.0, 0.0, 0.0
        for one, other in zip(steps, theirs, strict=True):
            rows = relative_rows(one.stream, other.stream)
            worst = max(worst, float(rows[rows <= FLIP].max()))
            whole = max(whole, float((one.stream - other.stream).norm() / other.stream.norm()))
            share = max(share, float((rows > FLIP).float().mean()))
        exact = ((got - peer.logits(ids, which)[0]).abs().amax(1) <= EXACT).float().mean()
        report(
            *(
                golden.folder.name,
                name,
                f"quantisers: {which}; a layer from the same inputs, worst:",
            ),
            *("relative error", whole, "of rows without a flip", worst, f"flips {share:.3f};"),
            f"end to end, rows of logits within 1e-3: {float(exact):.3f}",
        )
        assert share <= 0.06
        assert whole <= 1e-2
        assert exact >= 0.2


def relative_rows(got, want):
    """float[T]: ‖got − want‖ / ‖want‖ of each row."""
    off, size = (x.double().flatten(1).norm(dim=1) for x in (got - want, want))
    return off / size


def test_quantisers_alone(report):
    """The other implementation's quantisers and ours give the same bits."""
    from automodel_peer import attention
    from deepinfer.ops.table import OpSet

    ops = OpSet({}, "reference")
    generator = torch.Generator().manual_seed(7)
    for kind, size in (("fp8", 32), ("mxfp4", 32), ("nvfp4", 16)):
        for dtype in (torch.float32, torch.bfloat16):
            for scale in (0.0, 1e-6, 1e-3, 1.0, 50.0):
                x = (torch.randn(64, 512, generator=generator) * scale).to(dtype)
                want = attention.quantize_cache(x, format=kind, block_size=size)
                assert torch.equal(ops.quantize(x, kind), want), (kind, dtype, scale)
    report("quantisers fp8, mxfp4, nvfp4: equal bits")
