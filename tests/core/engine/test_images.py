"""Images in the brain: what pages are known by, what is refused, what an admission carries."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from deepinfer.api.plan import Image
from deepinfer.engine.pages import pack, pack_images
from deepinfer.engine.request import check_images
from deepinfer.errors import InvalidRequestError
from deepinfer.testing.fake import FakeExecutor, FakeScript
from hypothesis import given
from hypothesis import strategies as st

TOKEN = 9


def image(name, start, tokens):
    pixels = np.full((1, 1, 3), name, np.uint8)
    return Image(pixels=pixels, tokens=tokens, digest=bytes([name]) * 16, start=start)


def facts():
    return dataclasses.replace(FakeExecutor(FakeScript()).start(), image_token=TOKEN)


LAYOUT = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 5)), max_size=3)


def laid(layout):
    """(ids, images, what stands at each position)."""
    ids, images, content = [], [], []
    for name, gap, tokens in layout:
        ids += [1] * gap
        content += [("text", 1)] * gap
        images.append(image(name, len(ids), tokens))
        ids += [TOKEN] * tokens
        content += [(name, j) for j in range(tokens)]
    return ids, images, content


@given(LAYOUT, LAYOUT, st.integers(1, 4))
def test_pages_are_equal_where_their_contents_are(one, two, size):
    """Page by page from the beginning, as prefixes are compared: never equal wrongly, and never
    different where nothing is.
    """
    keys, contents = [], []
    for layout in (one, two):
        ids, images, content = laid(layout)
        starts = range(0, len(ids) - size + 1, size)
        keys.append([pack(ids[s : s + size]) + pack_images(images, s, s + size) for s in starts])
        contents.append([content[s : s + size] for s in starts])
    for n in range(1, 1 + min(map(len, keys))):
        assert (keys[0][:n] == keys[1][:n]) == (contents[0][:n] == contents[1][:n])


def test_no_text_passes_for_an_image():
    images = [image(1, 0, 4)]
    key = pack([TOKEN] * 4) + pack_images(images, 0, 4)
    assert len(key) > len(pack([TOKEN] * 4)) and not pack_images(images, 4, 8)


@pytest.mark.parametrize(
    "ids, images, said",
    [
        ([1, TOKEN], (), "position 1 has id 9"),
        ([TOKEN, TOKEN, 1, TOKEN], [image(0, 0, 2)], "position 3 has id 9"),
        ([TOKEN, 1, TOKEN, TOKEN], [image(0, 2, 2)], "position 0 has id 9"),
        ([TOKEN, TOKEN, 1], [image(0, 0, 3)], "3 positions is said to begin at 0"),
        ([TOKEN] * 4, [image(0, 0, 3), image(1, 2, 2)], "is said to begin at 2"),
        ([1], [image(0, 5, 2)], "is said to begin at 5"),
    ],
)
def test_images_and_ids_must_agree(ids, images, said):
    with pytest.raises(InvalidRequestError, match=said):
        check_images(tuple(ids), images, facts(), "Request r: ")


def test_what_agrees():
    check_images((1, TOKEN, TOKEN, TOKEN, 2), [image(0, 1, 1), image(1, 2, 2)], facts())
    check_images((TOKEN, 2), (), dataclasses.replace(facts(), image_token=-1))


def test_a_model_without_images_refuses_them(lab):
    request = dataclasses.replace(lab.request(prompt=(1, 2, 3)), images=(image(0, 1, 1),))
    with pytest.raises(InvalidRequestError, match="takes no images"):
        lab.engine().add(request)


def test_an_admission_carries_the_images_that_will_run(lab):
    """All of them at first; behind a prefix hit, those that end behind it."""

    class Watching(FakeExecutor):
        admits = ()

        def start(self, *args):
            return dataclasses.replace(super().start(*args), image_token=TOKEN)

        def forward(self, plan):
            self.admits += plan.admits
            super().forward(plan)

    device = Watching(FakeScript())
    size = device.start().page_size
    engine = lab.engine(executor=device)
    ids = [1] * size + [TOKEN] * size + [2] * 3 + [TOKEN] * 2 + [3]
    images = (image(0, size, size), image(1, 2 * size + 3, 2))
    for name, marks in (("a", (0, 1)), ("b", (1,))):
        request = dataclasses.replace(lab.request(name, prompt=ids, max_tokens=2), images=images)
        engine.add(request)
        lab.run(engine)
        assert [i.digest[0] for i in device.admits[-1].images] == list(marks)
