"""Vocabularies of every kind as xgrammar is told them."""

from __future__ import annotations

import numpy as np
import pytest
import tokenizers
from deepinfer.tokenizer import Tokenizer, TokenizerParts
from deepinfer_structured.vocabulary import Vocabulary
from grammar_rig import allowed, backend_for, spec
from tokenizers import decoders, models


def masks(backend, tokenizer, rule, ids):
    """The mask behind some ids."""
    matcher = backend.compile(spec("regex", rule), frozenset())
    assert matcher.accept(ids) == len(ids)
    row = np.zeros((1, -(-tokenizer.vocab_size // 32)), np.int32)
    matcher.fill(row, [])
    return allowed(row, tokenizer.vocab_size)


@pytest.fixture(scope="module")
def byte_fallback():
    """As in the Llama 2 family: bytes have tokens, and a space is ``▁``."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {word: i for i, word in enumerate([*words, "▁a", "a", "▁", "é", "ab"])}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence(parts)
    return Tokenizer(inner, TokenizerParts("bytes", bos=1, eos=2, unk=0))


def test_byte_fallback_spells_characters_in_bytes_and_spaces_in_marks(byte_fallback):
    backend = backend_for(byte_fallback)
    of = byte_fallback.token_to_id
    assert masks(backend, byte_fallback, "é a", []) == sorted([of("<0xC3>"), of("é")])
    assert masks(backend, byte_fallback, "é a", [of("<0xC3>")]) == [of("<0xA9>")]
    behind = [of("<0x20>"), of("▁a"), of("▁")]
    for ids in ([of("é")], [of("<0xC3>"), of("<0xA9>")]):
        assert masks(backend, byte_fallback, "é a", ids) == sorted(behind)


def test_byte_level_characters_may_be_cut_between_tokens(demo_tokenizer):
    backend = backend_for(demo_tokenizer)
    text = "東京"
    ids = demo_tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > 2  # cut inside a character
    for done in range(len(ids)):
        assert ids[done] in masks(backend, demo_tokenizer, text, ids[:done])


def test_no_special_token_has_a_text(byte_fallback, demo_tokenizer):
    for tokenizer in (byte_fallback, demo_tokenizer):
        backend = backend_for(tokenizer, size=tokenizer.vocab_size + 40)
        matcher = backend.compile(spec("regex", "[^z]*z"), frozenset())
        row = np.zeros((1, -(-(tokenizer.vocab_size + 40) // 32)), np.int32)
        matcher.fill(row, [])
        found = set(allowed(row, tokenizer.vocab_size + 40))
        assert found and not found & tokenizer.special_ids
        assert max(found) < tokenizer.vocab_size  # padding


def test_fingerprints_tell_vocabularies_apart(byte_fallback, demo_tokenizer):
    one = Vocabulary(demo_tokenizer, demo_tokenizer.vocab_size).fingerprint
    assert one == Vocabulary(demo_tokenizer, demo_tokenizer.vocab_size).fingerprint
    others = [Vocabulary(demo_tokenizer, 50_000), Vocabulary(byte_fallback, 300)]
    assert len({one, *(other.fingerprint for other in others)}) == 3


def test_a_decoder_that_nobody_knows_leaves_broken_characters_out():
    class Odd:
        vocab_size, special_ids, text_kind, name = 3, frozenset(), "other", "odd"

        def token_bytes(self, token):
            return [b"a", "�".encode(), b"b"][token]

    assert Vocabulary(Odd(), 4).tokens == [b"a", b"", b"b", b""]
