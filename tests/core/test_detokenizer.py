"""The detokenizer against ``decode``: arbitrary ids, arbitrary text, arbitrary chunks."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time

import pytest
from deepinfer.engine.detokenizer import IncrementalDetokenizer, LateDetokenizer
from deepinfer.tokenizer import Tokenizer, TokenizerParts
from hypothesis import example, given, settings
from hypothesis import strategies as st

tk = pytest.importorskip("tokenizers")

SPACE = "\u2581"


def byte_level():
    """256 bytes, a few merges, an end token, an added word."""
    alphabet = sorted(tk.pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("ð", "Ł"), ("Ð", "¿"), ("ä", "½")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    inner = tk.Tokenizer(tk.models.BPE(vocab, merges))
    inner.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tk.decoders.ByteLevel()
    inner.add_special_tokens(["<|end|>", "<｜end▁of▁sentence｜>"])
    inner.add_tokens(["<tool>", "мир"])
    return Tokenizer(inner, TokenizerParts("bytes"))


def byte_fallback(strip=True):
    """SentencePiece's way: words with a leading space, single bytes for the rest."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    words += [SPACE, SPACE * 2, SPACE + "hello", "world", SPACE + "при", "вет", "你", "a", "b"]
    vocab = {word: i for i, word in enumerate(words)}
    inner = tk.Tokenizer(tk.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    decoders = [tk.decoders.Replace(SPACE, " "), tk.decoders.ByteFallback(), tk.decoders.Fuse()]
    if strip:
        decoders.append(tk.decoders.Strip(content=" ", left=1, right=0))
    inner.decoder = tk.decoders.Sequence(decoders)
    inner.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(inner, TokenizerParts("pieces"))


def metaspace():
    """A vocabulary whose text is no byte stream: the window is used."""
    words = ["<unk>", SPACE + "hello", SPACE + "world", "s", SPACE, "привет", "!"]
    vocab = {word: i for i, word in enumerate(words)}
    inner = tk.Tokenizer(tk.models.WordLevel(vocab, unk_token="<unk>"))
    inner.decoder = tk.decoders.Metaspace()
    inner.add_special_tokens(["<unk>"])
    return Tokenizer(inner, TokenizerParts("words"))


BYTES, PIECES, PLAIN_PIECES, WORDS = (
    byte_level(),
    byte_fallback(),
    byte_fallback(False),
    metaspace(),
)


def streamed(tokenizer, prompt, chunks, skip=True):
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    pushed = [detokenizer.push(chunk) for chunk in chunks]
    return pushed, "".join(pushed) + detokenizer.finish()


@st.composite
def chunked(draw, items):
    """A list of ids and the same list cut into chunks, some of them empty."""
    ids = draw(items)
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    bounds = [0, *cuts, len(ids)]
    return ids, [ids[a:b] for a, b in itertools.pairwise(bounds)]


def any_ids(tokenizer, extra=5):
    return st.lists(st.integers(0, tokenizer.vocab_size + extra), max_size=40)


texts = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from("приветмир你好世界👩\u200d👩🏽é\u0301 \n\u2581�"),
    ),
    max_size=30,
)


@given(chunked(any_ids(BYTES)), st.booleans())
def test_any_ids_of_a_byte_level_vocabulary(case, skip):
    ids, chunks = case
    assert streamed(BYTES, [], chunks, skip)[1] == BYTES.decode(ids, skip)


@given(texts, texts, st.data())
def test_any_text_of_a_byte_level_vocabulary(before, text, data):
    prompt, ids = BYTES.encode(before), BYTES.encode(text)
    _, chunks = data.draw(chunked(st.just(ids)))
    assert streamed(BYTES, prompt, chunks)[1] == BYTES.decode(ids)


@given(any_ids(BYTES), chunked(any_ids(BYTES)), st.booleans())
@example([BYTES.token_to_id("ð")], ([BYTES.token_to_id("Ł")], [[BYTES.token_to_id("Ł")]]), True)
def test_the_output_continues_the_prompt(prompt, case, skip):
    """What the prompt leaves open belongs to the prompt, unless the output completes it."""
    ids, chunks = case
    before, whole = BYTES.decode(prompt, skip), BYTES.decode([*prompt, *ids], skip)
    found = streamed(BYTES, prompt, chunks, skip)[1]
    stem = before.rstrip("\ufffd")
    assert whole.startswith(stem) and whole.endswith(found)
    rest = whole[len(stem) :].removesuffix(found)
    assert set(rest) <= {"\ufffd"} and len(rest) <= len(before) - len(stem)
    if not rest and before != stem:
        assert len(found) >= 1  # the output completed the prompt's last character


@given(chunked(any_ids(BYTES)))
def test_nothing_is_taken_back(case):
    ids, chunks = case
    pushed, _ = streamed(BYTES, [], chunks)
    whole = BYTES.decode(ids)
    assert whole.startswith("".join(pushed))


@given(st.sampled_from([BYTES, PIECES, PLAIN_PIECES]), st.data(), st.booleans())
def test_text_that_comes_with_the_end_is_the_same(tokenizer, data, skip):
    """In one piece, or up to where it was asked for."""
    prompt, (_, chunks) = data.draw(any_ids(tokenizer, 0)), data.draw(chunked(any_ids(tokenizer)))
    pushed, whole = streamed(tokenizer, prompt, chunks, skip)
    late = LateDetokenizer(tokenizer, prompt, skip)
    asked = data.draw(st.integers(0, len(chunks)))
    assert [late.push(chunk) for chunk in chunks[:asked]] == [""] * asked
    early = late.overdue()
    assert early == "".join(pushed[:asked]) and not late.overdue()
    assert [late.push(chunk) for chunk in chunks[asked:]] == [""] * (len(chunks) - asked)
    assert early + late.finish() == whole


@given(texts, st.data(), st.sampled_from([PIECES, PLAIN_PIECES]), st.booleans())
def test_any_text_of_a_byte_fallback_vocabulary(text, data, tokenizer, after_prompt):
    ids = tokenizer.encode(text.replace(" ", SPACE))
    _, chunks = data.draw(chunked(st.just(ids)))
    prompt = [tokenizer.token_to_id("a")] if after_prompt else []
    expected = tokenizer.decode([*prompt, *ids])[len(prompt) :]
    assert streamed(tokenizer, prompt, chunks)[1] == expected


@given(chunked(st.lists(st.integers(0, 270), max_size=20)), st.booleans())
def test_broken_runs_keep_their_length(case, skip):
    """Runs that are broken throughout equal decode; runs in part good keep their good part."""
    ids, chunks = case
    found, expected = streamed(PIECES, [], chunks, skip)[1], PIECES.decode(ids, skip)
    if "\ufffd" not in expected:
        assert found == expected
    else:
        assert len(found) <= len(expected)


def test_a_leading_space_goes_only_at_the_very_beginning():
    hello, end, bos = (PIECES.token_to_id(t) for t in (SPACE + "hello", "</s>", "<s>"))
    for prompt, expected in (
        ([], "hello hello"),
        ([bos], "hello hello"),
        ([hello], " hello hello"),
    ):
        assert streamed(PIECES, prompt, [[hello], [end], [hello]])[1] == expected
    assert streamed(PIECES, [bos], [[hello]], skip=False)[1] == " hello"


@given(chunked(st.lists(st.integers(0, 6), max_size=20)), st.booleans())
def test_a_vocabulary_that_is_no_byte_stream(case, skip):
    ids, chunks = case
    assert WORDS.text_kind == "other"
    prompt = [1]
    expected = WORDS.decode([*prompt, *ids], skip)[len(WORDS.decode(prompt, skip)) :]
    assert streamed(WORDS, prompt, chunks, skip)[1] == expected


def test_incomplete_bytes_are_held_and_then_given_up():
    first, second = BYTES.token_to_id("ð"), BYTES.token_to_id("Ł")
    detokenizer = IncrementalDetokenizer(BYTES, [])
    assert detokenizer.push([first]) == detokenizer.push([second]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_special_tokens_show_only_if_wanted():
    end = BYTES.token_to_id("<|end|>")
    tool = BYTES.token_to_id("<tool>")
    assert streamed(BYTES, [], [[end, tool, end]])[1] == "<tool>"
    assert streamed(BYTES, [], [[end, tool]], skip=False)[1] == "<|end|><tool>"


@pytest.mark.parametrize("broken", [False, True])
def test_the_cost_is_linear(broken):
    """Twenty times the tokens may not take a hundred times as long."""
    one = BYTES.token_to_id("ð") if broken else BYTES.token_to_id("a")

    def seconds(count):
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            _, text = streamed(BYTES, [], [[one] * count])
            best = min(best, time.perf_counter() - start)
            assert len(text) == count
        return best

    assert seconds(40_000) < 100 * max(seconds(2_000), 1e-4)


def test_it_is_standard_library_only():
    code = (
        "import sys; import deepinfer.engine.detokenizer;"
        "assert not {'torch', 'numpy', 'tokenizers', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@settings(max_examples=50)
@given(before=texts, text=texts, data=st.data())
@pytest.mark.model
def test_any_text_of_the_demo_model(demo_tokenizer, before, text, data):
    prompt, ids = demo_tokenizer.encode(before), demo_tokenizer.encode(text)
    _, chunks = data.draw(chunked(st.just(ids)))
    assert streamed(demo_tokenizer, prompt, chunks)[1] == demo_tokenizer.decode(ids)


@settings(max_examples=100)
@given(case=chunked(st.lists(st.integers(0, 49151), max_size=60)), skip=st.booleans())
@pytest.mark.model
def test_any_ids_of_the_demo_model(demo_tokenizer, case, skip):
    ids, chunks = case
    assert streamed(demo_tokenizer, [], chunks, skip)[1] == demo_tokenizer.decode(ids, skip)


@pytest.mark.model
def test_the_recorded_outputs(demo_tokenizer, smollm2_golden):
    for case in smollm2_golden["cases"]:
        chunks = [[token] for token in case["output_ids"]]
        found = streamed(demo_tokenizer, case["input_ids"], chunks, skip=False)[1]
        assert found == case["output_text"]
