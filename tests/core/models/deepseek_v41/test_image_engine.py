"""Images through the front door, on golden checkpoint a: chats, chunks, caches, refusals."""

from __future__ import annotations

import base64
import io
import struct
from pathlib import Path

import numpy as np
import pytest
from deepinfer import SamplingParams
from deepinfer.config import EngineConfig
from deepinfer.errors import InvalidRequestError
from deepinfer.testing.lab import Condition, Lab

Image = pytest.importorskip("PIL.Image")

MODEL = Path(__file__).parents[3] / "data" / "deepseek-v41" / "a"
TOKEN, PAGE = 10, 16
GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=3)
DRAWN = SamplingParams(temperature=1, seed=5, max_tokens=2, ignore_eos=True, logprobs=3)
CACHED = {"enable_prefix_caching": True}


@pytest.fixture(scope="module")
def lab():
    config = EngineConfig(
        model=str(MODEL), batch_invariant=True, max_model_len=300, kv_cache_memory="64MB"
    )
    with Lab(config) as found:
        yield found


def picture(seed, width=300, height=90):
    """A noisy picture as a file; 300×90 takes 29 positions, 100×80 takes 10."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def text(seed, count):
    return np.random.default_rng(seed).integers(20, 400, count).tolist()


def prompt(*parts):
    """Ids and pictures in order."""
    ids = [i for part in parts for i in ([TOKEN] if isinstance(part, bytes) else part)]
    images = [part for part in parts if isinstance(part, bytes)]
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": images}}


def answer(output):
    """What came out, logprobs bit by bit, and how much of the prompt was cached."""
    assert output.error is None, output.error
    out = output.outputs[0]
    words = [
        struct.pack("<if", token, candidate.logprob)
        for candidates in out.logprobs
        for token, candidate in sorted(candidates.items())
    ]
    return tuple(out.token_ids), b"".join(words)


CASES = {
    "span over pages": prompt(text(1, 9), picture(1), text(2, 20)),
    "two": prompt(text(3, 2), picture(2, 100, 80), text(4, 1), picture(3), text(5, 12)),
    "first and side by side": prompt(picture(4, 100, 80), picture(5, 100, 80), text(6, 3)),
    "last": prompt(text(7, 7), picture(6, 60, 400)),
}


@pytest.fixture(scope="module")
def alone(lab):
    """Each case by itself, whole, nothing cached."""
    with lab.brain(Condition(name="alone")) as llm:
        return {name: answer(llm.generate(asked, DRAWN)[0]) for name, asked in CASES.items()}


@pytest.mark.parametrize(
    "config",
    [
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 23, "overlap": False},
        {**CACHED, "max_num_batched_tokens": 40},
    ],
    ids=str,
)
def test_chunks_and_company_do_not_show(lab, alone, config):
    with lab.brain(Condition(name="x", config=config)) as llm:
        outputs = llm.generate([*CASES.values(), text(8, 20)], DRAWN)
        for name, output in zip(CASES, outputs, strict=False):
            assert answer(output) == alone[name], name


def test_prefix_hits_do_not_show(lab, alone):
    """Chunks of 7 leave state at page boundaries inside spans; later requests go on from there."""
    config = {**CACHED, "max_num_batched_tokens": 7}
    with lab.brain(Condition(name="x", config=config)) as llm:
        for asked in (CASES, CASES):
            outputs = llm.generate(list(asked.values()), DRAWN)
            assert [answer(output) for output in outputs] == list(alone.values())
        assert llm.get_metrics()["counters"].cached_tokens > 0


def cached(llm, asked):
    """Prompt tokens that a request finds in the cache, and its answer."""
    before = llm.get_metrics()["counters"].cached_tokens
    found = answer(llm.generate(asked, GREEDY)[0])
    return llm.get_metrics()["counters"].cached_tokens - before, found


def test_a_hit_that_ends_inside_a_span(lab):
    """Positions 9 … 37 are the image's; texts part behind it, so two of its pages are common."""
    one, two = (prompt(text(1, 9), picture(1), text(seed, 20)) for seed in (21, 22))
    with lab.brain(Condition(name="alone")) as llm:
        want = answer(llm.generate(two, GREEDY)[0])
    config = {**CACHED, "max_num_batched_tokens": 16}
    with lab.brain(Condition(name="x", config=config)) as llm:
        assert cached(llm, one)[0] == 0
        assert cached(llm, two) == (2 * PAGE, want)


def test_other_pixels_share_nothing(lab):
    """The same ids, pictures of one size: only the page of text before them is common."""
    one, two = (prompt(text(1, PAGE + 4), picture(seed), text(2, 20)) for seed in (1, 2))
    dot = bytearray(Image.open(io.BytesIO(picture(1))).tobytes())
    dot[-1] ^= 1
    file = io.BytesIO()
    Image.frombytes("RGB", (300, 90), bytes(dot)).save(file, "png")
    three = prompt(text(1, PAGE + 4), file.getvalue(), text(2, 20))
    with lab.brain(Condition(name="alone")) as llm:
        want = [answer(llm.generate(asked, GREEDY)[0]) for asked in (one, two, three)]
    assert want[0][1] != want[1][1]
    config = {**CACHED, "max_num_batched_tokens": 16}
    with lab.brain(Condition(name="x", config=config)) as llm:
        assert cached(llm, one) == (0, want[0])
        assert cached(llm, two) == (PAGE, want[1])
        assert cached(llm, three) == (PAGE, want[2])
        again, found = cached(llm, one)
        assert again == 4 * PAGE and found == want[0]


@pytest.mark.parametrize("caching", [False, True])
def test_preemption_does_not_show(lab, caching):
    """Both enter with four pages; the younger takes the last one and has to give way for it."""
    asked = [CASES["two"], CASES["span over pages"]]
    params = GREEDY.model_copy(update={"max_tokens": 18})
    with lab.brain(Condition(name="together")) as llm:
        want = [answer(output) for output in llm.generate(asked, params)]
    config = {"enable_prefix_caching": caching, "max_num_batched_tokens": 24}
    with lab.brain(Condition(name="x", config=config), pages=9) as llm:
        assert [answer(output) for output in llm.generate(asked, params)] == want
        assert llm.get_metrics()["counters"].preemptions > 0


def test_spans_may_be_written_out(lab, alone):
    """Ids of an output, with the images again, are the same prompt."""
    asked = CASES["two"]
    with lab.brain(Condition(name="x")) as llm:
        output = llm.generate(asked, DRAWN)[0]
        assert output.prompt_token_ids.count(TOKEN) == 10 + 29
        whole = {**asked, "prompt_token_ids": output.prompt_token_ids}
        assert answer(llm.generate(whole, DRAWN)[0]) == alone["two"]


def test_a_text_with_the_token_spelled(lab):
    image = picture(1)
    with lab.brain(Condition(name="x")) as llm:
        spelled = "a<｜deepseek_image｜>b"
        ids = llm.get_tokenizer().encode(spelled)
        asked = [
            {"prompt": spelled, "multi_modal_data": {"image": image}},
            {"prompt_token_ids": ids, "multi_modal_data": {"image": [image]}},
        ]
        one, two = (answer(output) for output in llm.generate(asked, GREEDY))
        assert one == two and ids.count(TOKEN) == 1
        with pytest.raises(InvalidRequestError, match="has id 10, which stands for an image"):
            llm.generate(spelled, GREEDY)


@pytest.mark.parametrize(
    "asked, params, said",
    [
        ([5, TOKEN, 6], {}, r"position 1 has id 10, which stands for an image"),
        (prompt([5], picture(1)) | {"prompt_token_ids": [5, 6]}, {}, "0 times, and 1 images"),
        (prompt([TOKEN], picture(1)), {}, "2 times, and 1 images"),
        (prompt([5], b"?"), {}, r"multi_modal_data\['image'\]\[0\] is no image that can be read"),
        ({"prompt_token_ids": [5], "multi_modal_data": {"video": b""}}, {}, "keys 'video'"),
        ({"prompt_token_ids": [5], "multi_modal_data": {"image": 3}}, {}, "holds int; an image is"),
        ({"prompt_token_ids": [5], "images": [3]}, {}, "come from a rendered conversation"),
        (prompt(text(1, 280), picture(1)), {}, "309 tokens, 29 of them of 1 images, and max_model"),
        ([5], {"allowed_token_ids": [TOKEN]}, "allowed_token_ids names id 10"),
        ([5], {"logit_bias": {TOKEN: 5.0}}, "logit_bias names id 10"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_is_refused_by_name(lab, asked, params, said):
    with (
        lab.brain(Condition(name="x")) as llm,
        pytest.raises(InvalidRequestError, match=said),
    ):
        llm.generate(asked, SamplingParams(**params))


def test_the_image_token_is_never_drawn(lab):
    """Under many seeds, nearly even odds; the raw distribution still has it."""
    params = [
        SamplingParams(temperature=1000, seed=seed, max_tokens=1, logprobs=-1) for seed in range(60)
    ]
    asked = [text(1, 5)] * len(params)
    with lab.brain(Condition(name="x")) as llm:
        outputs = [output.outputs[0] for output in llm.generate(asked, params)]
    drawn = [i for out in outputs for i in out.token_ids]
    assert TOKEN not in drawn and len(set(drawn)) > 40
    chances = [candidate.logprob for candidate in outputs[0].logprobs[0].values()]
    assert TOKEN in outputs[0].logprobs[0]
    assert np.exp(chances).sum() == pytest.approx(1, abs=1e-4)


def test_a_conversation_with_images(lab, tmp_path):
    """A path, bytes, a data URL, an address as OpenAI spells it, an image of Pillow: all one."""
    pytest.importorskip("deepseek_recipe")
    data = picture(1)
    (tmp_path / "picture.png").write_bytes(data)
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    parts = [
        {"type": "image", "image": str(tmp_path / "picture.png")},
        {"type": "image", "image": tmp_path / "picture.png"},
        {"type": "image", "image": data},
        {"type": "image", "image": Image.open(io.BytesIO(data))},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    words = {"type": "text", "text": "What is this?"}
    talks = [[{"role": "user", "content": [part, words]}] for part in parts]
    with lab.brain(Condition(name="x")) as llm:
        outputs = llm.chat(talks, GREEDY)
        assert len({answer(output) for output in outputs}) == 1
        assert all(o.prompt_token_ids.count(TOKEN) == 29 for o in outputs)
        other = [{"role": "user", "content": [{"type": "image", "image": picture(2)}, words]}]
        assert answer(llm.chat(other, GREEDY)[0]) != answer(outputs[0])
        with pytest.raises(InvalidRequestError, match=r"messages\[0\].content\[0\] is no image"):
            llm.chat([{"role": "user", "content": [{"type": "image", "image": b"x"}]}], GREEDY)
