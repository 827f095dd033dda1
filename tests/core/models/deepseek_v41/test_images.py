"""Pictures to patches, against recorded plans, patches and the recipe's token counts."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from deepinfer.errors import ConfigError, InvalidRequestError, ModelLoadError, UnsupportedError
from deepinfer.models.deepseek_v41 import images
from deepinfer.models.deepseek_v41.images import (
    PictureReader,
    VisionConfig,
    open_image,
    patches_of,
    plan_image,
    plan_sized,
)
from hypothesis import assume, given
from hypothesis import strategies as st

DATA = Path(__file__).parents[3] / "data" / "deepseek-v41"
RELEASED = VisionConfig(
    layers=32,
    hidden_size=1024,
    heads=16,
    inner=2816,
    patch=14,
    theta=10000.0,
    shrink=3,
    max_tokens=1024,
    min_pixels=295936,
)
PLANS = json.loads((DATA / "ops" / "ops.json").read_text())["image_plan_released"]
NAMES = ("w100_h80", "w42_h42", "w300_h90", "w60_h400")


@pytest.mark.parametrize("size", PLANS, ids=lambda s: f"{s['width']}x{s['height']}")
def test_recorded_plans(size):
    plan = plan_image(size["width"], size["height"], RELEASED)
    assert (plan.width, plan.height) == (size["resized_w"], size["resized_h"])
    assert plan.grid == (size["grid_h"], size["grid_w"])
    assert plan.tokens == size["tokens"] == len(plan.types())


@given(st.integers(1, 8000), st.integers(1, 8000))
def test_the_recipe_counts_the_same(width, height):
    """Shapes up to 1:14; beyond, the recipe rounds an enlarged image's edges in another way than
    the reference code, whose recorded plans are above."""
    recipe = pytest.importorskip("deepseek_recipe")
    assume(max(width, height) <= 14 * min(width, height))
    image = recipe.MultiModalData([recipe.ImageInfo(b"", width, height)])
    tokens = image.image_token_adjustment() + 1  # beyond the one placeholder
    assert plan_image(width, height, RELEASED).tokens == tokens


@given(st.integers(1, 100_000), st.integers(1, 100_000))
def test_no_shape_takes_more_than_the_limit(width, height):
    plan = plan_image(width, height, RELEASED)
    assert plan.tokens <= RELEASED.max_tokens
    rows, columns = plan.patches
    assert (rows * 14, columns * 14) == (plan.height, plan.width) and min(plan.grid) >= 1


def test_an_image_without_pixels():
    with pytest.raises(InvalidRequestError, match="0×5 has no pixels"):
        plan_image(0, 5, RELEASED)


@pytest.mark.parametrize("name", ["img_a", "img_b", "img_d"])
def test_recorded_spans(pictures, vision_config, name):
    sizes = {"img_a": [(100, 80)], "img_b": [(42, 42), (300, 90)], "img_d": [(60, 400), (100, 80)]}
    types = pictures.get_tensor(f"{name}/token_types")
    spans = [t for size in sizes[name] for t in plan_image(*size, vision_config).types()]
    assert types[types != images.TEXT].tolist() == spans


def encoded(rgb, kind="png"):
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(rgb.numpy()).save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("name", NAMES)
def test_recorded_patches_bit_by_bit(pictures, vision_config, name):
    pytest.importorskip("PIL")
    image = PictureReader(vision_config, 10).read(
        encoded(pictures.get_tensor(f"image/{name}/rgb")), "here"
    )
    pixels = torch.from_numpy(image.pixels)
    plan = plan_sized(pixels.shape[1], pixels.shape[0], vision_config)
    assert plan.tokens == image.tokens
    found = patches_of(pixels, plan, vision_config.patch, torch.bfloat16)
    want = pictures.get_tensor(f"image/{name}/patches")
    assert found.shape == want.shape
    assert torch.equal(found.view(torch.int16), want.view(torch.int16))


def test_what_is_no_picture(monkeypatch):
    pytest.importorskip("PIL")
    for data in (b"", b"not a picture", encoded(torch.zeros(9, 9, 3, dtype=torch.uint8))[:-40]):
        with pytest.raises(InvalidRequestError, match=r"messages\[0\] is no image") as why:
            open_image(data, "messages[0]")
        assert " at 0x" not in str(why.value)  # an object of ours says nothing to the caller
    monkeypatch.setattr(images, "MAX_PIXELS", 80)
    with pytest.raises(InvalidRequestError, match="9×9 pixels; at most 80 are read"):
        open_image(encoded(torch.zeros(9, 9, 3, dtype=torch.uint8)), "messages[0]")


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"deepinfer-core\[vision\]"):
        open_image(b"", "here")


def test_configurations_that_do_not_see():
    assert VisionConfig.read({}) is None
    assert VisionConfig.read({"vision_config": {"num_hidden_layers": 0}}) is None
    with pytest.raises(UnsupportedError, match="max_wh_ratio=7"):
        VisionConfig.read({"vision_config": {"max_wh_ratio": 7, "num_hidden_layers": 1}})


def test_digests_are_of_pixels_and_shape(vision_config):
    pytest.importorskip("PIL")
    reader = PictureReader(vision_config, 10)
    wide = torch.full((90, 120, 3), 7, dtype=torch.uint8)
    dot = wide.clone()
    dot[50, 60, 2] = 8
    files = [encoded(wide), encoded(wide, "bmp"), encoded(dot), encoded(wide.transpose(0, 1))]
    one, again, other, tall = (reader.read(data, "here") for data in files)
    assert one.digest == again.digest and len(one.digest) == 16
    assert len({one.digest, other.digest, tall.digest}) == 3


@pytest.mark.parametrize("heads", [3, 5, 16])
def test_heads_that_two_directions_cannot_share(pictures, heads):
    raw = {**json.loads(pictures.metadata()["vision_config"]), "hidden_size": 32}
    with pytest.raises(ModelLoadError, match=f"num_attention_heads={heads}") as why:
        VisionConfig.read({"vision_config": {**raw, "num_attention_heads": heads}})
    assert why.value.setting == "num_attention_heads"


def test_a_limit_that_no_image_meets(pictures):
    raw = {**json.loads(pictures.metadata()["vision_config"]), "max_image_tokens": 3}
    with pytest.raises(ModelLoadError, match="max_image_tokens=3; the smallest image takes 4"):
        VisionConfig.read({"vision_config": raw})
    found = VisionConfig.read({"vision_config": {**raw, "max_image_tokens": 4}})
    assert {plan_image(*size, found).tokens for size in ((9, 9), (300, 9), (9, 300))} == {4}
