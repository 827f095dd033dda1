"""Pictures to patches: how large an image becomes, how many positions it takes, and its pixels.

Where you are: the front half of vision, on the host. Specification 7.1 (preprocessing) and 7.2
(the span). ``vision`` is the other half. Pillow is imported on first use. What crosses to the
device are the pixels of the sized picture, a byte each; plan and patches follow from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from io import BytesIO
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.api.plan import Image
from deepinfer.errors import ConfigError, InvalidRequestError, ModelLoadError, shown
from deepinfer.models.deepseek_v41.fields import Fields

START, IMAGE, NEWLINE, END = 0, 1, 2, 3
TEXT: Final = -1
"""What a position is: of text, or which part of an image's span."""

LEAST: Final = 4
"""Positions of the smallest image: start, one token and its newline, end."""

MAX_PIXELS: Final = 1 << 27
_GREY: Final = (127, 127, 127)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """Sizes of the vision tower and of what it takes.

    ``patch``: pixels along an edge; ``shrink``: patches along an edge of the square that becomes
    one token. ``max_tokens``: of one image, delimiters included. Smaller images are enlarged to
    ``min_pixels``.
    """

    layers: int
    hidden_size: int
    heads: int
    inner: int
    patch: int
    theta: float
    shrink: int
    max_tokens: int
    min_pixels: int

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> VisionConfig | None:
        """From config.json; None for a checkpoint that does not see."""
        if raw.get("vision_config") is None:
            return None
        fields = Fields(Fields(raw, "config.json").section("vision_config"), "vision_config")
        fields.only({"max_wh_ratio": None})
        if fields.value("num_hidden_layers") == 0:
            return None
        config = cls(
            layers=fields.size("num_hidden_layers"),
            hidden_size=fields.size("hidden_size"),
            heads=fields.size("num_attention_heads"),
            inner=fields.size("intermediate_size"),
            patch=fields.size("patch_size"),
            theta=fields.real("rope_theta"),
            shrink=fields.size("downsample_ratio"),
            max_tokens=fields.size("max_image_tokens"),
            min_pixels=fields.size("min_pixels"),
        )
        fields.refuse_rest(frozenset({"model_type", "dtype", "torch_dtype"}))
        if config.hidden_size % (4 * config.heads):
            raise ModelLoadError(
                f"The model's config.json has vision_config.num_attention_heads={config.heads}: "
                f"hidden_size={config.hidden_size} does not give each a multiple of 4 values.",
                setting="num_attention_heads",
            )
        if config.max_tokens < LEAST:
            raise ModelLoadError(
                f"The model's config.json has vision_config.max_image_tokens={config.max_tokens}; "
                f"the smallest image takes {LEAST}.",
                setting="max_image_tokens",
            )
        return config


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """How an image is taken: its size in pixels when sized, patches and tokens each way."""

    width: int
    height: int
    patches: tuple[int, int]
    """Rows and columns."""
    grid: tuple[int, int]
    """Rows and columns of tokens."""

    @property
    def tokens(self) -> int:
        """Positions of the span: start, each row with its newline, end."""
        rows, columns = self.grid
        return rows * (columns + 1) + 2

    def types(self) -> list[int]:
        """What each position of the span is."""
        rows, columns = self.grid
        return [START, *([IMAGE] * columns + [NEWLINE]) * rows, END]


def plan_image(width: int, height: int, config: VisionConfig) -> ImagePlan:
    """How an image of this size is taken.

    Raises:
        InvalidRequestError: it has no pixels, or its shape cannot be fitted.
    """
    if width < 1 or height < 1:
        raise InvalidRequestError(f"An image of {width}×{height} has no pixels.", setting="image")
    if width * height < config.min_pixels:
        factor = math.sqrt(config.min_pixels / (width * height))
        width, height = int(width * factor), int(height * factor)
    patch = config.patch
    whole = -(-width // patch) * patch, -(-height // patch) * patch
    plan = plan_sized(*whole, config)
    if plan.tokens > config.max_tokens:
        plan = plan_sized(*_fitted(width, height, config), config)
    if plan.tokens > config.max_tokens:
        raise InvalidRequestError(
            f"An image of {width}×{height} takes {plan.tokens} positions; "
            f"max_image_tokens is {config.max_tokens}.",
            setting="max_image_tokens",
        )
    return plan


def plan_sized(width: int, height: int, config: VisionConfig) -> ImagePlan:
    """The plan of a picture that has been sized: whole patches each way."""
    rows, columns = height // config.patch, width // config.patch
    grid = -(-rows // config.shrink), -(-columns // config.shrink)
    return ImagePlan(width, height, (rows, columns), grid)


def _fitted(width: int, height: int, config: VisionConfig) -> tuple[int, int]:
    """The size that fills ``max_tokens``; the aspect is kept unless one edge is under a token."""
    cell, most = config.patch * config.shrink, config.max_tokens
    aspect = height / width
    columns = math.sqrt((most - 2) / aspect + 0.25) - 0.5
    rows = columns * aspect
    if columns < 1:
        return cell, ((most - 2) // 2) * cell
    if rows < 1:
        return (most - 3) * cell, cell
    factor = min(int(columns) * cell / width, int(rows) * cell / height)
    patch = config.patch
    return int(width * factor / patch) * patch, int(height * factor / patch) * patch


def open_image(data: bytes, where: str) -> Any:
    """Decode a picture (the first, of several) to RGB; transparency is dropped.

    Raises:
        ConfigError: Pillow is not installed.
        InvalidRequestError: it is no picture that Pillow reads, or larger than ``MAX_PIXELS``.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as why:
        raise ConfigError(
            "Images need the package 'pillow', which is not installed.",
            setting="messages",
            next_step="pip install 'deepinfer-core[vision]'",
        ) from why
    try:
        image = Image.open(BytesIO(data))
        if image.width * image.height > MAX_PIXELS:
            raise InvalidRequestError(
                f"{where} is an image of {image.width}×{image.height} pixels; "
                f"at most {MAX_PIXELS} are read.",
                setting=where,
            )
        return image.convert("RGB")
    except InvalidRequestError:
        raise
    except UnidentifiedImageError as why:  # its own message names an object in memory
        begins = f"{len(data)} bytes that begin with {shown(data[:8])}" if data else "0 bytes"
        raise InvalidRequestError(
            f"{where} is no image that can be read: {begins} are of no known format.", setting=where
        ) from why
    except Exception as why:  # decoders of many formats, each with its own ways to fail
        raise InvalidRequestError(
            f"{where} is no image that can be read: {why}.", setting=where
        ) from why


def sized(image: Any, plan: ImagePlan) -> NDArray[np.uint8]:
    """An RGB picture at its plan's size: uint8[height, width, 3].

    It is resized with its aspect kept and centred on grey (``ImageOps.pad``, bicubic).
    """
    from PIL import ImageOps

    return np.array(ImageOps.pad(image, (plan.width, plan.height), color=_GREY), np.uint8)


def patches_of(pixels: Tensor, plan: ImagePlan, patch: int, dtype: torch.dtype) -> Tensor:
    """A sized picture's patches in reading order: [rows · columns, 3, patch, patch].

    pixels uint8[height, width, 3]; 0 … 255 become −1 … 1, rounded to bfloat16 in any ``dtype``. By
    table, which is made in float32 on the host: devices may divide in another way.
    """
    levels = ((torch.arange(256).float() / 255 - 0.5) / 0.5).to(torch.bfloat16).to(dtype)
    values = levels.to(pixels.device)[pixels.int()]
    rows, columns = plan.patches
    cut = values.view(rows, patch, columns, patch, 3).permute(0, 2, 4, 1, 3)
    return cut.reshape(rows * columns, 3, patch, patch)


class PictureReader:
    """Encoded pictures to what the tower takes; an :class:`~deepinfer.api.model.ImageReader`.

    Args:
        config: the tower's sizes.
        token: the id of every position of an image.
    """

    def __init__(self, config: VisionConfig, token: int) -> None:
        self.config = config
        self.token = token
        self.most_tokens = config.max_tokens

    def read(self, data: bytes, where: str) -> Image:
        picture = open_image(data, where)
        try:
            plan = plan_image(picture.width, picture.height, self.config)
        except InvalidRequestError as why:
            raise InvalidRequestError(f"{where}: {why.message}", setting=where) from why
        pixels = sized(picture, plan)
        shape = np.array(pixels.shape, "<i8").tobytes()
        digest = blake2b(shape + pixels.tobytes(), digest_size=16).digest()
        return Image(pixels=pixels, tokens=plan.tokens, digest=digest)
