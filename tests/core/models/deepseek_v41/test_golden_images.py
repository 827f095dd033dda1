"""Configuration c: prompts with images, from pictures to merged embeddings, logits and tokens.

Steps are laid out by hand (``v41_harness``), images by the worker's :class:`SlotImages`.
"""

from __future__ import annotations

import dataclasses
import io

import numpy as np
import pytest
import torch
from deepinfer.api.plan import Admit, RowParams
from deepinfer.models.deepseek_v41.images import PictureReader
from deepinfer.worker.images import SlotImages
from v41_harness import CPU, Play, bits, relative, same_sets

Image = pytest.importorskip("PIL.Image")

PROMPTS = {
    "img_a": ("w100_h80",),
    "img_b": ("w42_h42", "w300_h90"),
    "img_c": ("w300_h300",),
    "img_d": ("w60_h400", "w100_h80"),
}
SOURCES = (2, 4, 6)


@pytest.fixture(scope="module")
def c(goldens):
    return goldens("c")


def pictures(golden, prompt):
    """The prompt's images, read from files and placed."""
    reader = PictureReader(golden.config.vision, golden.config.image_token)
    types, start = golden[f"{prompt}/token_types"], 0
    for name in PROMPTS[prompt]:
        file = io.BytesIO()
        Image.fromarray(golden[f"image/{name}/rgb"].numpy()).save(file, "png")
        image = reader.read(file.getvalue(), name)
        start += int((types[start:] == 0).nonzero()[0, 0])  # where a span begins
        yield dataclasses.replace(image, start=start)
        start += image.tokens


class Seeing(Play):
    """A play whose only text has images, seen by ``see``."""

    def __init__(self, rig, ids, images, see, **more):
        super().__init__(rig, [ids], **more)
        self.images = SlotImages(see, CPU)
        self.admit(images)

    def admit(self, images):
        ids = np.zeros(1, np.int32)
        self.images.admit([Admit(0, ids, 2, 0, RowParams(1), images=tuple(images))])

    def batch(self, rows, padding=0, dead=()):
        batch = super().batch(rows, padding, dead)
        plan = np.array([(t, self.done[t], n, 1, 0) for t, n in rows], np.int32)
        with torch.inference_mode():
            found = self.images.of_step(plan, batch.requests.cu_q)
        return dataclasses.replace(batch, images=found)


def played(golden, mode, prompt, more=(), *, native=False, recorded=False, **options):
    """A prompt of images, followed by ``more``; ``recorded``: rows of images as recorded."""
    ids = torch.cat((golden[f"{prompt}/ids"], torch.tensor(more, dtype=torch.int32)))
    rig, images = golden.rig(mode, native=native), list(pictures(golden, prompt))
    embed = golden[f"{prompt}/{mode}/embed"]
    spans = iter([embed[image.start : image.stop] for image in images])
    see = (lambda _: next(spans)) if recorded else rig.model.see
    return Seeing(rig, ids, images, see, **options)


def test_images_stand_where_they_were_recorded(c):
    for prompt in PROMPTS:
        covered = torch.full_like(c[f"{prompt}/token_types"], -1)
        for image in pictures(c, prompt):
            covered[image.start : image.stop] = 0
        assert torch.equal(covered >= 0, c[f"{prompt}/token_types"] >= 0)
        assert torch.equal(covered >= 0, c[f"{prompt}/ids"] == c.config.image_token)


@pytest.mark.parametrize("mode", ["f32", "bf16"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_merged_embeddings(c, mode, prompt):
    heard = []
    play = played(c, mode, prompt)
    with play.rig.listen("engram_block", heard, lambda args, _: args[0]):  # of layer 0
        play.step([(0, len(play.texts[0]))])
    assert relative(heard[0][:, 0], c[f"{prompt}/{mode}/embed"]) < (2e-6 if mode == "f32" else 2e-2)


@pytest.mark.parametrize("sizes", [(500,), (7,), (1,), (9, 2, 30, 5)], ids=str)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_from_recorded_embeddings(c, prompt, sizes):
    """On the native linears, whose sums flip nothing here."""
    found = played(c, "f32", prompt, native=True, recorded=True).chunks(*sizes)
    error = float((found - c[f"{prompt}/f32/logits"]).abs().max())
    print(prompt, sizes, f"max abs logit error {error:.1e}")
    assert error < 1e-3  # measured 2.9e-6 … 1.5e-4, as the README's independent one


@pytest.mark.parametrize("mode", ["f32", "bf16"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_from_pictures(c, mode, prompt):
    """The tower's sums differ in their last bits, so some rows flip; chunks show in none."""
    found, want = played(c, mode, prompt).chunks(500), c[f"{prompt}/{mode}/logits"]
    off, top = (found - want).abs(), (found.argmax(1) == want.argmax(1)).float().mean()
    exact = float((off.amax(1) < 1e-3).float().mean())
    print(prompt, mode, f"mean {float(off.mean()):.1e}, top-1 {float(top):.2f}, exact {exact:.2f}")
    assert off.mean() <= (0.1 if mode == "f32" else 0.25)
    assert top >= 0.75
    assert exact >= (0.3 if mode == "f32" else 0)
    assert torch.equal(bits(found), bits(played(c, mode, prompt).chunks(7))), "chunks show"
    assert torch.equal(bits(found), bits(played(c, mode, prompt).chunks(9, 2, 30, 1)))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_choices(c, prompt):
    """Entries and experts, as sets; image rows go by the router's second bias."""
    routed, selected = [], []
    play = played(c, "f32", prompt, native=True, recorded=True)
    with (
        play.rig.listen("route", routed, lambda _, y: y[0]),
        play.rig.listen("select_sparse", selected, lambda _, y: y.entries),
    ):
        play.step([(0, len(play.texts[0]))])
    assert len(routed) == c.config.layers
    for layer, found in enumerate(routed):
        assert same_sets(found, c[f"{prompt}/f32/L{layer:02d}/router_ids"]).all()
    for layer, found in zip(SOURCES, selected, strict=True):
        assert same_sets(found, c[f"{prompt}/f32/L{layer:02d}/selected"]).all()


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "seen"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_decode(c, prompt, recorded):
    tokens = c[f"{prompt}/f32/decode/tokens"]
    play = played(c, "f32", prompt, tokens.tolist(), native=True, recorded=recorded)
    out = [play.logits([(0, len(c[f"{prompt}/ids"]))])[-1:]]
    out += [play.logits([(0, 1)]) for _ in range(len(tokens) - 1)]
    logits, want = torch.cat(out), c[f"{prompt}/f32/decode/logits"]
    off, best = (logits - want).abs(), want.topk(2, 1).values
    sure = best[:, 0] - best[:, 1] > 2 * off.amax(1)  # flips move logits by more than some gaps
    assert torch.equal(logits.argmax(1)[sure], tokens.long()[sure])
    print(prompt, "recorded" if recorded else "seen", f"{float(off.max()):.1e}", int(sure.sum()))
    assert off.mean() <= 0.1
    assert sure.float().mean() >= 0.5


@pytest.mark.parametrize("mode", ["f32", "bf16"])
def test_a_prefix_that_ends_inside_a_span(c, mode):
    """Admitted anew behind a prefix, as after a hit or a preemption: the same bits."""
    want = played(c, mode, "img_d").chunks(500)
    for cut in (3, 5, 6, 20, 37, 38, 60):
        play = played(c, mode, "img_d")
        first = play.logits([(0, cut)])
        play.admit([image for image in pictures(c, "img_d") if image.stop > cut])
        rest = play.logits([(0, len(want) - cut)])
        assert torch.equal(bits(torch.cat((first, rest))), bits(want)), f"cut at {cut}"


@pytest.mark.parametrize("floor", [10, 30, 50])
def test_truncation_of_a_prompt_with_images(c, floor):
    """Late layers on the rows above a floor inside a span: compact and masked agree."""
    wide = c.rig("f32").config.last_source + 1
    assert wide < c.config.layers
    found = [
        played(c, "f32", "img_d", floors=[floor], compact=compact).chunks(*sizes)[floor:]
        for compact in (True, False)
        for sizes in ((500,), (7,))
    ]
    for other in found[1:]:
        assert torch.equal(bits(found[0]), bits(other))


def test_greedy_tokens_through_the_front_door(c):
    """From pictures to tokens, as far as the recorded gaps say more than a flip can."""
    from deepinfer import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    asked = []
    for prompt, names in PROMPTS.items():
        images = [Image.fromarray(c[f"image/{name}/rgb"].numpy()) for name in names]
        ids = c[f"{prompt}/ids"].tolist()
        asked.append({"prompt_token_ids": ids, "multi_modal_data": {"image": images}})
    with LLM(str(c.folder), max_model_len=200, max_num_seqs=4, kv_cache_memory="64MB") as llm:
        outputs = llm.generate(asked, params)
    compared = 0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        best = c[f"{prompt}/f32/decode/logits"].topk(2, 1).values
        sure = (best[:, 0] - best[:, 1] > 0.1).long().cumprod(0)
        found = torch.tensor(output.outputs[0].token_ids)[: int(sure.sum())]
        assert torch.equal(found, c[f"{prompt}/f32/decode/tokens"].long()[: len(found)]), prompt
        compared += len(found)
    print(f"{compared} of 36 tokens compared")
    assert compared >= 10
