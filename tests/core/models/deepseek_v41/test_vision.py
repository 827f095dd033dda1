"""The tower and the aligner against the recorded ones, from recorded patches."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from deepinfer.models.deepseek_v41.images import plan_image
from deepinfer.models.deepseek_v41.vision import Vision, vision_rules
from deepinfer.ops.invariant import invariant_ops
from deepinfer.ops.table import OpSet

DATA = Path(__file__).parents[3] / "data" / "deepseek-v41"
SIZES = {"w100_h80": (100, 80), "w42_h42": (42, 42), "w300_h90": (300, 90), "w60_h400": (60, 400)}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(scope="module")
def vision(pictures, vision_config):
    """``vision(mode, overrides)``: the recorded weights in the mode's dtype."""

    def build(mode, overrides=()):
        found = Vision(vision_config, OpSet(dict(overrides), "reference"))
        for rule in vision_rules(vision_config, int(pictures.metadata()["hidden_size"])):
            parts = [pictures.get_tensor(f"model/{name}") for name in rule.sources]
            assert [tuple(part.shape) for part in parts] == list(rule.shapes)
            whole = torch.stack(parts) if rule.stack else parts[0]
            found.load(rule.parameter, whole.to(DTYPES[mode]))
        return found

    return build


def test_every_recorded_tensor_is_read(pictures, vision_config):
    rules = list(vision_rules(vision_config, 128))
    stored = {key.removeprefix("model/") for key in pictures.keys() if key.startswith("model/")}
    assert {name for rule in rules for name in rule.sources} == stored


def error(found, want):
    """Relative to the size of what was wanted."""
    return float((found.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("name", SIZES)
def test_float32(pictures, vision_config, vision, name):
    plan = plan_image(*SIZES[name], vision_config)
    patches = pictures.get_tensor(f"image/{name}/patches").float()
    model = vision("f32")
    tower = model.tower(patches, plan)
    want = pictures.get_tensor(f"image/{name}/f32/tower")
    assert error(tower, want) < 2e-6  # measured 6e-7
    assert error(model.align(want, plan), pictures.get_tensor(f"image/{name}/f32/aligner")) < 2e-6


@pytest.mark.parametrize("name", SIZES)
def test_bfloat16(pictures, vision_config, vision, name):
    """No farther from the float32 record than the reference's own bfloat16, by more than half."""
    plan = plan_image(*SIZES[name], vision_config)
    model = vision("bf16")
    tower = model.tower(pictures.get_tensor(f"image/{name}/patches"), plan)
    for found, part in ((tower, "tower"), (model.align(tower, plan), "aligner")):
        exact = pictures.get_tensor(f"image/{name}/f32/{part}")
        theirs = pictures.get_tensor(f"image/{name}/bf16/{part}")
        assert found.dtype == torch.bfloat16
        assert error(found, theirs) < 2e-2  # measured 9e-3
        assert error(found, exact) < 1.5 * error(theirs, exact)


@pytest.mark.parametrize("mode", DTYPES)
def test_the_span_as_it_is_merged(pictures, vision_config, vision, mode):
    plan = plan_image(100, 80, vision_config)
    patches = pictures.get_tensor("image/w100_h80/patches").to(DTYPES[mode])
    rows = pictures.get_tensor("img_a/token_types") >= 0
    want = pictures.get_tensor(f"img_a/{mode}/embed")[rows]
    found = vision(mode).span(patches, plan)
    assert found.dtype == want.dtype and found.shape == want.shape
    assert error(found, want) < (2e-6 if mode == "f32" else 2e-2)


@pytest.mark.parametrize("mode", DTYPES)
def test_an_image_has_the_same_bits_with_any_number_of_threads(
    pictures, vision_config, vision, mode
):
    """With the ops that an invariant engine takes."""
    plan = plan_image(100, 80, vision_config)
    patches = pictures.get_tensor("image/w100_h80/patches").to(DTYPES[mode])
    before = torch.get_num_threads()
    model = vision(mode, invariant_ops())
    try:
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(model.span(patches, plan).float().view(torch.int32))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def test_a_picture_from_bytes_to_embeddings(pictures, vision_config, vision):
    image = pytest.importorskip("PIL.Image")
    from deepinfer.models.deepseek_v41.images import open_image, patches_of, sized

    file = io.BytesIO()
    image.fromarray(pictures.get_tensor("image/w100_h80/rgb").numpy()).save(file, "png")
    picture = open_image(file.getvalue(), "here")
    plan = plan_image(picture.width, picture.height, vision_config)
    pixels = torch.from_numpy(sized(picture, plan))
    found = vision("f32").span(patches_of(pixels, plan, vision_config.patch, torch.float32), plan)
    rows = pictures.get_tensor("img_a/token_types") >= 0
    assert error(found, pictures.get_tensor("img_a/f32/embed")[rows]) < 2e-6
