"""Images of prompts: read, counted, and given their places among the ids.

Where you are: beside ``inputs``. Pictures are decoded and sized here, on the caller's thread; what
goes on are pixels (:class:`deepinfer.api.plan.Image`), which the model sees on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from deepinfer.api.plan import Image
from deepinfer.chat.images import image_of
from deepinfer.errors import InvalidRequestError

if TYPE_CHECKING:
    from deepinfer.api.model import ImageReader
    from deepinfer.chat import ChatImage


class PromptImages:
    """What one model makes of images.

    Args:
        reader: the host's half of its vision; None for a model that takes no images.
        name: the model's, for errors.
    """

    def __init__(self, reader: ImageReader | None, name: str) -> None:
        self._reader = reader
        self._name = name

    def read(self, given: Sequence[ChatImage]) -> tuple[Image, ...]:
        """Pictures as the model takes them, not placed yet.

        Raises:
            InvalidRequestError: the model takes none, or one of them is none or too large.
        """
        if given and self._reader is None:
            where = given[0].where
            raise InvalidRequestError(
                f"{where} is an image, and {self._name} takes no images.", setting=where
            )
        reader = self._reader
        return tuple(reader.read(one.read(), one.where) for one in given) if reader else ()

    def place(self, ids: Sequence[int], images: Sequence[Image]) -> tuple[Image, ...]:
        """The same images at their spans, which ``ids`` holds in their order."""
        return tuple(self._placed(ids, images))

    def of_prompt(
        self, prompt: Any, ids: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[Image, ...]]:
        """(ids with a whole span for each image, the images placed) of a prompt that has ``ids``.

        A rendered conversation has them already. ``multi_modal_data={"image": …}`` has one image
        or a list; the ids hold one image token for each, or its whole span.
        """
        if not isinstance(prompt, Mapping):
            return ids, ()
        if (placed := prompt.get("images")) is not None:
            return ids, _checked(placed)
        if (data := prompt.get("multi_modal_data")) is None:
            return ids, ()
        images = self.read(_given(data))
        if not images:
            return ids, ()
        ids = self._spread(ids, images)
        return ids, self.place(ids, images)

    def _placed(self, ids: Sequence[int], images: Sequence[Image]) -> Iterator[Image]:
        done = 0
        for image in images:
            assert self._reader is not None
            try:
                start = ids.index(self._reader.token, done)
            except ValueError:
                raise self._misfit(ids, images) from None
            yield replace(image, start=start)
            done = start + image.tokens

    def _spread(self, ids: tuple[int, ...], images: Sequence[Image]) -> tuple[int, ...]:
        assert self._reader is not None
        token = self._reader.token
        places = ids.count(token)
        if places == sum(image.tokens for image in images):
            return ids
        if places != len(images):
            raise self._misfit(ids, images)
        counts = iter(images)
        return tuple(
            i for id in ids for i in ((id,) if id != token else (id,) * next(counts).tokens)
        )

    def _misfit(self, ids: Sequence[int], images: Sequence[Image]) -> InvalidRequestError:
        assert self._reader is not None
        token = self._reader.token
        return InvalidRequestError(
            f"The prompt has id {token}, which stands for an image, {ids.count(token)} times, and "
            f"{len(images)} images are given.",
            setting="multi_modal_data",
            next_step="Write it once for each image.",
        )


def _checked(placed: Any) -> tuple[Image, ...]:
    if not isinstance(placed, tuple) or not all(isinstance(image, Image) for image in placed):
        raise InvalidRequestError(
            "A prompt's 'images' come from a rendered conversation; give others as "
            "multi_modal_data={'image': …}.",
            setting="images",
        )
    return placed


def _given(data: Any) -> list[ChatImage]:
    """As vLLM spells it."""
    if not isinstance(data, Mapping) or set(data) != {"image"}:
        shown = f"keys {', '.join(map(repr, data))}" if isinstance(data, Mapping) else repr(data)
        raise InvalidRequestError(
            f"multi_modal_data is {{'image': …}}, one image or a list, not {shown}.",
            setting="multi_modal_data",
        )
    given = data["image"]
    several = list(given) if isinstance(given, list | tuple) else [given]
    return [image_of(f"multi_modal_data['image'][{i}]", one) for i, one in enumerate(several)]
