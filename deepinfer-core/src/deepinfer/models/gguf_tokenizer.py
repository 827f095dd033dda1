"""A tokenizer from the vocabulary inside a GGUF file.

Where you are: called by ``tokenizer.load_tokenizer``. A GGUF file names its pre-tokenizer
(``tokenizer.ggml.pre``) and leaves the rules to the reader; the table below holds them. An unknown
name is refused: the wrong split gives ids that look right and are not.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from deepinfer.errors import TokenizerError
from deepinfer.models.gguf import GGUFFile

if TYPE_CHECKING:
    from deepinfer.tokenizer import Tokenizer, TokenizerParts

_SPACE: Final = "\u2581"
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _TAIL
_QWEN2: Final = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _TAIL
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_V3: Final = (
    r"\p{N}{1,3}",
    r"[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER: Final = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    r"[一-龥ࠀ-一가-퟿]+",
    r"\p{N}",
)


@dataclass(frozen=True, slots=True)
class _Split:
    """How a text is cut before BPE: expressions in order, then the byte alphabet.

    ``gpt2`` lets the byte-level step cut with its own expression as well. ``bos`` is the default
    where the file does not say.
    """

    patterns: tuple[str, ...] = ()
    gpt2: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    bos: bool = False


_GPT2: Final = _Split(gpt2=True)
_DIGITS: Final = _Split((r"\p{N}",), gpt2=True)
_LLAMA_BPE: Final = _Split((_LLAMA3,), ignore_merges=True, bos=True)
_SPLITS: Final[Mapping[str, _Split]] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "codeshell": _DIGITS,
    "exaone": _DIGITS,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "falcon3": _LLAMA_BPE,
    "smaug-bpe": _Split((_LLAMA3,)),
    "dbrx": _Split((_LLAMA3,)),
    "qwen2": _Split((_QWEN2,), nfc=True),
    "deepseek-r1-qwen": _Split((_QWEN2,)),
    "tekken": _Split((_TEKKEN,), ignore_merges=True, bos=True),
    "deepseek-v3": _Split(_DEEPSEEK_V3),
    "deepseek-coder": _Split(_DEEPSEEK_CODER),
}


def from_gguf(path: Path, name: str) -> Tokenizer:
    """Build the tokenizer that a GGUF file describes.

    Raises:
        TokenizerError: the file holds none, or one of a kind that is not known.
    """
    from deepinfer.tokenizer import Tokenizer

    file = GGUFFile(path)
    meta = file.metadata
    kind = meta.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders or "tokenizer.ggml.tokens" not in meta:
        what = "holds no tokenizer" if kind is None else f"holds a tokenizer of the kind {kind!r}"
        raise TokenizerError(
            f"{path} {what}; known kinds are {', '.join(builders)}.",
            setting="tokenizer",
            next_step="Pass tokenizer= with the model's directory or hub id.",
        )
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    try:
        inner, bos_default = builders[kind](path, meta, tokens)
        _add_tokens(inner, tokens, meta.get("tokenizer.ggml.token_type", ()))
    except TokenizerError:
        raise
    except Exception as why:  # the library raises bare Exception
        raise TokenizerError(
            f"{path} holds a damaged vocabulary: {why}.", setting="tokenizer"
        ) from why
    return Tokenizer(inner, _parts(file, name, bos_default))


def _tokenizers() -> Any:
    from deepinfer.tokenizer import tokenizers_package

    return tokenizers_package()


def _parts(file: GGUFFile, name: str, bos_default: bool) -> TokenizerParts:
    from deepinfer.tokenizer import TokenizerParts

    meta, bos, eos = file.metadata, file.token_id("bos"), file.token_id("eos")
    wants_bos = meta.get("tokenizer.ggml.add_bos_token", bos_default)
    wants_eos = meta.get("tokenizer.ggml.add_eos_token", False)
    stops = (file.token_id(key) for key in ("eos", "eot", "eom"))
    return TokenizerParts(
        name=name,
        bos=bos,
        eos=eos,
        pad=file.token_id("padding"),
        unk=file.token_id("unknown"),
        prefix=(bos,) if wants_bos and bos is not None else (),
        suffix=(eos,) if wants_eos and eos is not None else (),
        stops=tuple(i for i in stops if i is not None),
        templates=_templates(meta),
    )


def _templates(meta: Mapping[str, Any]) -> dict[str, str]:
    first = "tokenizer.chat_template"
    found = {"default": str(meta[first])} if first in meta else {}
    named = {k: v for k, v in meta.items() if k.startswith(first + ".")}
    return found | {key.removeprefix(first + "."): str(text) for key, text in named.items()}


def _add_tokens(inner: Any, tokens: list[str], types: Iterable[int]) -> None:
    """Mark control and user-defined tokens, in id order; the vocabulary already has their ids."""
    added_token = _tokenizers().AddedToken
    marked = [(int(t), i) for i, t in enumerate(types) if t in (_CONTROL, _USER_DEFINED)]
    for kind, group in groupby(marked, key=lambda pair: pair[0]):
        special = kind == _CONTROL
        run = [added_token(tokens[i], special=special, normalized=False) for _, i in group]
        (inner.add_special_tokens if special else inner.add_tokens)(run)


def _byte_level(path: Path, meta: Mapping[str, Any], tokens: list[str]) -> tuple[Any, bool]:
    tk = _tokenizers()
    split = _split(path, meta)
    merges = [tuple(m.split(" ", 1)) for m in meta.get("tokenizer.ggml.merges", ())]
    model = tk.models.BPE(
        {token: i for i, token in enumerate(tokens)}, merges, ignore_merges=split.ignore_merges
    )
    inner = tk.Tokenizer(model)
    steps = [tk.pre_tokenizers.Split(tk.Regex(pattern), "isolated") for pattern in split.patterns]
    steps.append(tk.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.gpt2))
    inner.pre_tokenizer = tk.pre_tokenizers.Sequence(steps)
    inner.decoder = tk.decoders.ByteLevel()
    if split.nfc:
        inner.normalizer = tk.normalizers.NFC()
    return inner, split.bos


def _split(path: Path, meta: Mapping[str, Any]) -> _Split:
    pre = meta.get("tokenizer.ggml.pre")
    if pre is None:
        logging.getLogger("deepinfer").warning(
            "%s does not name its pre-tokenizer; taking that of GPT-2.", path
        )
        pre = "default"
    if pre not in _SPLITS:
        raise TokenizerError(
            f"{path} asks for the pre-tokenizer {pre!r}; known are {', '.join(_SPLITS)}.",
            setting="tokenizer",
            next_step="Pass tokenizer= with the model's directory or hub id.",
        )
    return _SPLITS[pre]


def _sentencepiece(path: Path, meta: Mapping[str, Any], tokens: list[str]) -> tuple[Any, bool]:
    """SentencePiece BPE: merges are not stored, they follow from the scores of the pieces."""
    tk = _tokenizers()
    vocab = {token: i for i, token in enumerate(tokens)}
    scores = meta.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise TokenizerError(
            f"{path}: a vocabulary of the kind 'llama' needs one score for each of its "
            f"{len(tokens)} tokens.",
            setting="tokenizer",
        )
    types = meta.get("tokenizer.ggml.token_type", ())
    unknown = next((tokens[i] for i, t in enumerate(types) if t == _UNKNOWN), None)
    model = tk.models.BPE(
        vocab, _merges(vocab, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    inner = tk.Tokenizer(model)
    prefix = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
    to_piece = [tk.normalizers.Replace(" ", _SPACE)]
    inner.normalizer = tk.normalizers.Sequence(
        [tk.normalizers.Prepend(_SPACE), *to_piece] if prefix else to_piece
    )
    to_text = [tk.decoders.Replace(_SPACE, " "), tk.decoders.ByteFallback(), tk.decoders.Fuse()]
    inner.decoder = tk.decoders.Sequence(
        [*to_text, tk.decoders.Strip(content=" ", left=1, right=0)] if prefix else to_text
    )
    return inner, True


def _merges(vocab: Mapping[str, int], scores: Any) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece; the best score merges first, then the lower id."""
    found = []
    for token, index in vocab.items():
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                found.append((-float(scores[index]), index, left, right, token, cut))
    found.sort(key=lambda pair: pair[:4])
    return [(token[:cut], token[cut:]) for *_, token, cut in found]
