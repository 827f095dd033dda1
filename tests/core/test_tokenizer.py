"""Tokenizers from tokenizer.json and from GGUF vocabularies."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from deepinfer.errors import InvalidRequestError, TokenizerError
from deepinfer.models.gguf_tokenizer import _SPLITS
from deepinfer.models.source import ModelSource, resolve
from deepinfer.tokenizer import Tokenizer, TokenizerParts, load_tokenizer
from hypothesis import given
from hypothesis import strategies as st

tk = pytest.importorskip("tokenizers")

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def alphabet():
    return sorted(tk.pre_tokenizers.ByteLevel.alphabet())


def plain():
    """One token for each byte."""
    inner = tk.Tokenizer(tk.models.BPE({char: i for i, char in enumerate(alphabet())}, []))
    inner.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tk.decoders.ByteLevel()
    return inner


PLAIN = Tokenizer(plain(), TokenizerParts("bytes"))


def byte_level_meta(pre="gpt-2", tokens=(), types=(), merges=(), **ids):
    """The alphabet, then further tokens with their types."""
    base = alphabet()
    meta = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*base, *tokens],
        "tokenizer.ggml.token_type": [NORMAL] * len(base) + list(types or [NORMAL] * len(tokens)),
    }
    if merges:
        meta["tokenizer.ggml.merges"] = list(merges)
    if pre is not None:
        meta["tokenizer.ggml.pre"] = pre
    return meta | {f"tokenizer.ggml.{key}": value for key, value in ids.items()}


@pytest.fixture
def from_gguf(write_gguf):
    def load(meta):
        path = write_gguf("llama", meta)
        return load_tokenizer(ModelSource("gguf", path, path, "tiny"))

    return load


def pieces(tokenizer, text):
    return [tokenizer.decode([i], skip_special_tokens=False) for i in tokenizer.encode(text, False)]


def cut(from_gguf, pre, text):
    """How a pre-tokenizer cuts: a vocabulary in which each cut part would merge to one token."""
    inner = from_gguf(byte_level_meta(pre))._inner
    return [text[a:b] for _, (a, b) in inner.pre_tokenizer.pre_tokenize_str(text)]


def test_smollm_takes_digits_one_by_one_before_the_words(from_gguf):
    found = cut(from_gguf, "smollm", "list:\n  12 items")
    assert found == ["list", ":", "\n  ", "1", "2", " items"]
    assert cut(from_gguf, "gpt-2", "  12 items") == [" ", " 12", " items"]


@pytest.mark.parametrize(
    "pre, text, expected",
    [
        ("llama-bpe", "It's 12345\n\n x", ["It", "'s", " ", "123", "45", "\n\n", " x"]),
        ("qwen2", "It'S 123", ["It", "'S", " ", "1", "2", "3"]),
        ("tekken", "fooBar 12", ["foo", "Bar", " ", "1", "2"]),
        ("deepseek-v3", "x=1234 你好ab", ["x", "=", "123", "4", " ", "你好", "ab"]),
        ("deepseek-coder", "def f1(\n", ["def", " f", "1", "(", "\n"]),
        ("default", "a 12", ["a", " 12"]),
    ],
)
def test_each_pre_tokenizer_cuts_its_own_way(from_gguf, pre, text, expected):
    assert cut(from_gguf, pre, text) == expected


@pytest.mark.parametrize("pre", _SPLITS)
def test_every_pre_tokenizer_keeps_every_character(from_gguf, pre):
    text = "Hello  wörld\t12345 你好, мир! 👩‍👩 e\u0301 can't \r\n  x_y==z\u3000 "
    tokenizer = from_gguf(byte_level_meta(pre))
    expected = text if not _SPLITS[pre].nfc else __import__("unicodedata").normalize("NFC", text)
    assert tokenizer.decode(tokenizer.encode(text, False)) == expected


def test_an_unknown_pre_tokenizer_is_named(from_gguf):
    with pytest.raises(TokenizerError, match=r"pre-tokenizer 'klingon'; known are default, gpt-2"):
        from_gguf(byte_level_meta("klingon"))


@pytest.mark.parametrize("merges", [["h e"], ["he"], ["h e x"]])
def test_a_damaged_vocabulary_is_named(from_gguf, merges):
    with pytest.raises(TokenizerError, match=r"tiny\.gguf holds a damaged vocabulary"):
        from_gguf(byte_level_meta("gpt-2", merges=merges))


def test_a_missing_pre_tokenizer_is_said(from_gguf, caplog):
    assert cut(from_gguf, None, "a 12") == ["a", " 12"]
    assert "does not name its pre-tokenizer" in caplog.text


def test_other_kinds_are_named(from_gguf):
    with pytest.raises(TokenizerError, match="of the kind 'bert'; known kinds are gpt2, llama"):
        from_gguf({"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": ["a"]})
    with pytest.raises(TokenizerError, match="holds no tokenizer"):
        from_gguf({})


def test_added_tokens_keep_their_ids_and_kinds(from_gguf):
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "<|fim|>", "<|last|>"]
    types = [CONTROL, CONTROL, CONTROL, USER, USER, CONTROL]
    tokenizer = from_gguf(byte_level_meta("qwen2", tokens, types, eos_token_id=258))
    ids = [tokenizer.token_to_id(t) for t in tokens]
    assert ids == list(range(256, 262)) and tokenizer.vocab_size == 262
    assert tokenizer.special_ids == {256, 257, 258, 261}
    assert tokenizer.encode("".join(tokens), False) == ids
    assert tokenizer.decode(ids) == "<tool_call><|fim|>"
    assert tokenizer.stop_token_ids == {256, 258}


def test_user_defined_end_tokens_do_not_stop(from_gguf):
    tokenizer = from_gguf(byte_level_meta("gpt-2", ["<|im_end|>"], [USER]))
    assert tokenizer.stop_token_ids == frozenset()
    assert tokenizer.eos_token_id is None and tokenizer.bos_token_id is None


@pytest.mark.parametrize(
    "pre, said, expected", [("gpt-2", None, 0), ("gpt-2", True, 1), ("llama-bpe", None, 1)]
)
def test_bos_as_the_file_says_or_as_the_family_does(from_gguf, pre, said, expected):
    meta = byte_level_meta(pre, ["<s>", "</s>"], [CONTROL] * 2, bos_token_id=256, eos_token_id=257)
    if said is not None:
        meta["tokenizer.ggml.add_bos_token"] = said
    tokenizer = from_gguf(meta)
    assert tokenizer.encode("x").count(256) == expected
    assert 256 not in tokenizer.encode("x", add_special_tokens=False)
    meta["tokenizer.ggml.add_eos_token"] = True
    assert from_gguf(meta).encode("x")[-1] == 257


def test_end_of_turn_ids_of_the_file_stop(from_gguf):
    meta = byte_level_meta("gpt-2", ["<x>", "<y>"], [CONTROL] * 2, eos_token_id=256)
    assert from_gguf(meta | {"tokenizer.ggml.eot_token_id": 257}).stop_token_ids == {256, 257}


def test_llama3_takes_whole_words_before_merging(from_gguf):
    meta = byte_level_meta("llama-bpe", ["hxe"])
    assert len(from_gguf(meta).encode("hxe", False)) == 1
    assert len(from_gguf(meta | {"tokenizer.ggml.pre": "gpt-2"}).encode("hxe", False)) == 3


def sentencepiece_meta(prefix=None):
    words = {"<unk>": (UNKNOWN, 0.0), "<s>": (CONTROL, 0.0), "</s>": (CONTROL, 0.0)}
    words |= {f"<0x{b:02X}>": (BYTE, 0.0) for b in range(256)}
    words |= {"ab": (NORMAL, -1.0), "bc": (NORMAL, -0.5), SPACE + "a": (NORMAL, -3.0)}
    words |= {SPACE: (NORMAL, -9.0), "a": (NORMAL, -9.0), "b": (NORMAL, -9.0), "c": (NORMAL, -9.0)}
    meta = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": list(words),
        "tokenizer.ggml.token_type": [kind for kind, _ in words.values()],
        "tokenizer.ggml.scores": [score for _, score in words.values()],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return meta if prefix is None else meta | {"tokenizer.ggml.add_space_prefix": prefix}


def tokens_of(tokenizer, text):
    return [tokenizer.id_to_token(i) for i in tokenizer.encode(text)]


def test_sentencepiece_merges_by_score(from_gguf):
    tokenizer = from_gguf(sentencepiece_meta())
    assert tokenizer.text_kind == "byte_fallback"
    assert tokens_of(tokenizer, "abc") == ["<s>", SPACE + "a", "bc"]
    assert tokens_of(tokenizer, "ab") == ["<s>", SPACE, "ab"]
    assert tokens_of(tokenizer, "é") == ["<s>", SPACE, "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("abc é\n👩")) == "abc é\n👩"


def test_sentencepiece_without_the_space_in_front(from_gguf):
    tokenizer = from_gguf(sentencepiece_meta(prefix=False))
    assert tokens_of(tokenizer, "abc") == ["<s>", "a", "bc"]
    assert tokenizer.decode(tokenizer.encode(" abc")) == " abc"


def test_sentencepiece_needs_scores(from_gguf):
    meta = {k: v for k, v in sentencepiece_meta().items() if not k.endswith("scores")}
    with pytest.raises(TokenizerError, match="one score for each of its 266 tokens"):
        from_gguf(meta)


@pytest.fixture
def trained(tmp_path):
    """A small SentencePiece model, its file and the lines it was trained on."""
    spm = pytest.importorskip("sentencepiece")
    corpus = tmp_path / "corpus.txt"
    sources = [Path(json.__file__), Path(subprocess.__file__)]
    corpus.write_text("\n".join(path.read_text() for path in sources))
    spm.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=700,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    file = tmp_path / "tokenizer.model"
    return spm.SentencePieceProcessor(model_file=str(file)), file, corpus.read_text().splitlines()


def test_sentencepiece_itself_gives_the_same_ids(from_gguf, trained):
    model, _, lines = trained
    count = model.get_piece_size()

    def kind(i):
        if model.is_unknown(i) or model.is_control(i):
            return UNKNOWN if model.is_unknown(i) else CONTROL
        return BYTE if model.is_byte(i) else NORMAL

    tokenizer = from_gguf(
        sentencepiece_meta()
        | {
            "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in range(count)],
            "tokenizer.ggml.token_type": [kind(i) for i in range(count)],
            "tokenizer.ggml.scores": [float(model.get_score(i)) for i in range(count)],
        }
    )
    for line in [*lines[:400], "привет  мир 👩", " x", "", "a  b"]:
        ids = model.encode(line)
        assert tokenizer.encode(line, add_special_tokens=False) == ids, line
        assert tokenizer.decode(ids) == model.decode(ids)


def test_a_slow_tokenizer_goes_through_transformers(trained):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("google.protobuf")
    _, file, lines = trained
    (file.parent / "config.json").write_text('{"model_type": "llama"}')
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "add_bos_token": True}
    tokenizer = configured(file.parent, **config)
    theirs = transformers.AutoTokenizer.from_pretrained(str(file.parent))
    for line in [*lines[:100], "привет мир 👩"]:
        plain = theirs(line, add_special_tokens=False).input_ids
        assert tokenizer.encode(line, add_special_tokens=False) == plain
        assert tokenizer.encode(line) == [1, *plain]


@pytest.fixture
def directory(tmp_path):
    """A Hugging Face directory with a byte-level vocabulary."""
    inner = plain()
    inner.add_special_tokens(["<s>", "</s>", "<|im_end|>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def configured(directory, generation=None, **config):
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return load_tokenizer(resolve(str(directory)))


def test_a_directory(directory):
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None}
    tokenizer = configured(directory, **config, chat_template="hello")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)
    assert tokenizer.pad_token_id is None and tokenizer.chat_template == "hello"
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.stop_token_ids == {257, 258}
    assert tokenizer.name == directory.name


@pytest.mark.parametrize("eos, expected", [([1, 2], {1, 2, 258}), (3, {3, 258}), (None, {258})])
def test_the_generation_config_adds_stops(directory, eos, expected):
    assert configured(directory, {"eos_token_id": eos}).stop_token_ids == expected


@pytest.mark.parametrize("bos, eos", [(True, False), (False, False), (True, True), (None, True)])
def test_an_explicit_bos_or_eos_wins_over_the_file(directory, bos, eos):
    flags = {"add_bos_token": bos, "add_eos_token": eos}
    tokenizer = configured(directory, bos_token="<s>", eos_token="</s>", **flags)
    plain = tokenizer.encode("x", add_special_tokens=False)
    assert tokenizer.encode("x") == [256] * bool(bos) + plain + [257] * eos


def test_the_post_processor_of_the_file_counts_where_nothing_is_said(directory):
    inner = tk.Tokenizer.from_file(str(directory / "tokenizer.json"))
    inner.post_processor = tk.processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 256)]
    )
    inner.save(str(directory / "tokenizer.json"))
    assert configured(directory, bos_token="<s>").encode("x")[0] == 256
    assert 256 not in configured(directory, bos_token="<s>", add_bos_token=False).encode("x")


def test_templates_from_every_place(directory):
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    assert configured(directory, chat_template=named).chat_templates == {
        "default": "d",
        "tool_use": "t",
    }
    (directory / "chat_template.json").write_text('{"chat_template": "j"}')
    assert configured(directory).chat_template == "j"
    (directory / "chat_template.jinja").write_text("file")
    assert configured(directory, chat_template="config").chat_template == "file"


def test_what_is_missing_or_broken_is_named(directory, monkeypatch):
    (directory / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json cannot be read"):
        load_tokenizer(resolve(str(directory)))
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(resolve(str(directory)))
    (directory / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        load_tokenizer(resolve(str(directory)))
    (directory / "tokenizer.model").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TokenizerError, match="needs 'transformers', which is not installed"):
        load_tokenizer(resolve(str(directory)))


def test_ids_outside_the_vocabulary(directory):
    tokenizer = configured(directory)
    assert tokenizer.id_to_token(9999) is None and tokenizer.id_to_token(-1) is None
    assert tokenizer.token_bytes(9999) == b"" and tokenizer.token_to_id("nope") is None
    assert tokenizer.decode([9999]) == ""
    with pytest.raises(TokenizerError, match="cannot be decoded"):
        tokenizer.decode([-1])


@pytest.mark.parametrize("text", ["a\ud800b", None, 3])
def test_what_is_no_text_fails_its_own_request(text):
    with pytest.raises(InvalidRequestError, match="cannot be encoded"):
        PLAIN.encode(text)


@given(st.text(max_size=20))
def test_bytes_of_tokens_join_to_the_text(text):
    assert b"".join(map(PLAIN.token_bytes, PLAIN.encode(text))) == text.encode()


def test_bytes_of_a_byte_fallback_vocabulary(from_gguf):
    tokenizer = from_gguf(sentencepiece_meta())
    found = [
        tokenizer.token_bytes(tokenizer.token_to_id(t)) for t in ("<0xC3>", SPACE + "a", "<s>")
    ]
    assert found == [b"\xc3", b" a", b"<s>"]


def test_many_threads(from_gguf):
    tokenizer = from_gguf(byte_level_meta("smollm"))
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: tuple(tokenizer.encode("a text, 12 times")), range(200)))
    assert len(found) == 1


def test_importing_loads_nothing():
    heavy = {"torch", "numpy", "tokenizers", "transformers", "jinja2"}
    code = f"import sys, deepinfer.tokenizer, deepinfer.chat; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_gguf_vocabulary_loads_without_torch(write_gguf):
    path = write_gguf("llama", byte_level_meta("smollm"))
    code = (
        "import sys; from pathlib import Path; from deepinfer.models.source import resolve;"
        "from deepinfer.tokenizer import load_tokenizer;"
        "load_tokenizer(resolve(sys.argv[1])); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


def test_transformers_gives_the_same_ids(directory):
    transformers = pytest.importorskip("transformers")
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    ours = configured(directory, **config)
    theirs = transformers.AutoTokenizer.from_pretrained(str(directory))
    for text in ("Hello  123", "привет 👩 <s>x</s>", ""):
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.special_ids == set(theirs.all_special_ids) | {258}


@pytest.mark.model
def test_the_demo_model_gives_the_recorded_ids(demo_tokenizer, smollm2_golden):
    assert demo_tokenizer.vocab_size == 49152
    assert demo_tokenizer.stop_token_ids == {0, 2}
    assert (demo_tokenizer.bos_token_id, demo_tokenizer.pad_token_id) == (1, 2)
    for case in smollm2_golden["cases"]:
        assert demo_tokenizer.encode(case["templated_text"]) == case["input_ids"]
        assert demo_tokenizer.decode(case["output_ids"], False) == case["output_text"]
        until = case["output_ids"][: case["first_eos_index"]]
        assert demo_tokenizer.decode(until) == case["text_until_eos"]


@pytest.mark.model
def test_spaces_before_digits_stay_together_in_the_demo_model(demo_tokenizer):
    """Where transformers' own conversion goes wrong: two or more spaces before a digit."""
    assert demo_tokenizer.encode("hello  123 x") == [28120, 256, 33, 34, 35, 1792]
