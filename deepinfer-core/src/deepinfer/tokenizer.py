"""Text to ids and back.

Where you are: the front doors turn prompts into ids here before a request reaches the engine; the
detokenizer and the grammar plugins ask for the bytes of single tokens. ``load_tokenizer`` reads a
``tokenizer.json``, or the vocabulary inside a GGUF file (``models/gguf_tokenizer.py``). Importing
this file loads nothing but the standard library; ``tokenizers`` comes on first use, transformers
only for files that nothing else reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from deepinfer.errors import InvalidRequestError, TokenizerError

if TYPE_CHECKING:
    from deepinfer.models.source import ModelSource

# Tokens that end a turn in the families that use them, whatever the config says of them. Not
# "<|end|>": some families end an intermediate message with it.
END_TOKENS: Final = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
)

_SPACE: Final = "\u2581"
TextKind = Literal["byte_level", "byte_fallback", "other"]


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """What a loader found beside the vocabulary.

    ``prefix`` and ``suffix`` are the ids put around a text when special tokens are wanted; ``None``
    leaves that to the tokenizer's own post-processor. ``templates`` are chat templates by name.
    """

    name: str
    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    unk: int | None = None
    prefix: tuple[int, ...] | None = None
    suffix: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()
    templates: Mapping[str, str] = field(default_factory=dict)


class Tokenizer:
    """A vocabulary with its rules. Immutable, and safe to use from several threads."""

    def __init__(self, inner: Any, parts: TokenizerParts) -> None:
        self._inner = inner
        self._plain = _without_added(inner)
        self._parts = parts
        added = inner.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, t in added.items() if t.special)
        self.vocab_size: int = max(inner.get_vocab_size(), max(added, default=-1) + 1)
        self._decoder = _decoder_types(inner)
        self.text_kind: TextKind = _text_kind(self._decoder)
        self.stop_token_ids: frozenset[int] = self._stops()
        self._bytes: dict[int, bytes] = {}

    def _stops(self) -> frozenset[int]:
        ids = set(self._parts.stops)
        if self._parts.eos is not None:
            ids.add(self._parts.eos)
        known = (self._inner.token_to_id(token) for token in END_TOKENS)
        ids.update(i for i in known if i is not None and i in self.special_ids)
        return frozenset(ids)

    @property
    def name(self) -> str:
        """The model that this tokenizer came with."""
        return self._parts.name

    @property
    def bos_token_id(self) -> int | None:
        return self._parts.bos

    @property
    def eos_token_id(self) -> int | None:
        return self._parts.eos

    @property
    def pad_token_id(self) -> int | None:
        return self._parts.pad

    @property
    def chat_template(self) -> str | None:
        """The default chat template, or ``None``."""
        return self._parts.templates.get("default")

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """All chat templates by name; ``default`` is the one for plain conversations."""
        return self._parts.templates

    @property
    def special_tokens(self) -> dict[str, str]:
        """bos_token, eos_token … as text, as chat templates want them."""
        p = self._parts
        ids = {"bos_token": p.bos, "eos_token": p.eos, "pad_token": p.pad, "unk_token": p.unk}
        found = {k: self.id_to_token(i) for k, i in ids.items() if i is not None}
        return {key: token for key, token in found.items() if token is not None}

    @property
    def strips_first_space(self) -> bool:
        """Whether ``decode`` drops one space at the very beginning of a text."""
        return "Strip" in self._decoder

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text; special tokens written out in it are recognised.

        Templated chat text already holds its special tokens: pass ``add_special_tokens=False``.

        Raises:
            InvalidRequestError: this is no text (half of a surrogate pair, say).
        """
        try:
            if not add_special_tokens or self._parts.prefix is None:
                return list(self._inner.encode(text, add_special_tokens=add_special_tokens).ids)
            ids = self._inner.encode(text, add_special_tokens=False).ids
        except (TypeError, ValueError) as why:
            raise InvalidRequestError(
                f"This text cannot be encoded: {why}.", setting="prompt"
            ) from why
        return [*self._parts.prefix, *ids, *self._parts.suffix]

    def encode_plain(self, text: str) -> list[int]:
        """The ids of a text in which nothing is special: tokens spelled out stay plain text.

        Raises:
            InvalidRequestError: this is no text (half of a surrogate pair, say).
        """
        try:
            return list(self._plain.encode(text, add_special_tokens=False).ids)
        except (TypeError, ValueError) as why:
            raise InvalidRequestError(
                f"This text cannot be encoded: {why}.", setting="prompt"
            ) from why

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ids; ids outside the vocabulary are skipped, broken UTF-8 becomes U+FFFD."""
        try:
            text = self._inner.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except (TypeError, OverflowError) as why:
            raise TokenizerError(f"These ids cannot be decoded: {why}.") from why
        return str(text)

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, or ``None``."""
        if not 0 <= token_id < self.vocab_size:
            return None
        token: str | None = self._inner.id_to_token(token_id)
        return token

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it, or ``None``."""
        found: int | None = self._inner.token_to_id(token)
        return found

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds in the middle of a text; empty for an unknown id."""
        found = self._bytes.get(token_id)
        if found is None:  # worked out once: half of what the host does for a request that ends
            token = self.id_to_token(token_id)
            if token is None:
                return b""
            found = self._bytes[token_id] = self._bytes_of(token_id, token)
        return found

    def _bytes_of(self, token_id: int, token: str) -> bytes:
        if self.text_kind == "byte_level":
            return _from_byte_alphabet(token)
        if self.text_kind == "byte_fallback":
            return _from_byte_fallback(token)
        if "Metaspace" in self._decoder:
            return token.replace(_SPACE, " ").encode()
        return self.decode([token_id], skip_special_tokens=False).encode()


def _without_added(inner: Any) -> Any:
    """The same model and rules without the added vocabulary; the model is shared, not copied."""
    plain = tokenizers_package().Tokenizer(inner.model)
    if inner.normalizer is not None:
        plain.normalizer = inner.normalizer
    if inner.pre_tokenizer is not None:
        plain.pre_tokenizer = inner.pre_tokenizer
    return plain


def _decoder_types(inner: Any) -> tuple[str, ...]:
    if inner.decoder is None:
        return ()
    state = json.loads(inner.decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    return tuple(part["type"] for part in parts)


def _text_kind(decoder: tuple[str, ...]) -> TextKind:
    if decoder == ("ByteLevel",):
        return "byte_level"
    if decoder in (
        ("Replace", "ByteFallback", "Fuse"),
        ("Replace", "ByteFallback", "Fuse", "Strip"),
    ):
        return "byte_fallback"
    return "other"


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE spells each byte as one visible character."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(b): b for b in visible} | {chr(256 + n): b for n, b in enumerate(hidden)}


_BYTES: Final = _byte_alphabet()


def _from_byte_alphabet(token: str) -> bytes:
    try:
        return bytes([_BYTES[char] for char in token])
    except KeyError:
        return token.encode()  # an added token outside the alphabet stands for itself


def _from_byte_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(_SPACE, " ").encode()


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """Load the tokenizer of a resolved model.

    Raises:
        TokenizerError: there is none, or its kind is unknown.
    """
    if source.tokenizer_path.is_file():
        from deepinfer.models.gguf_tokenizer import from_gguf

        return from_gguf(source.tokenizer_path, source.name)
    return _from_directory(source.tokenizer_path, source)


def has_tokenizer(source: ModelSource) -> bool:
    """Whether there is anything for ``load_tokenizer`` to read."""
    path = source.tokenizer_path
    names = ("tokenizer.json", *_SLOW_FILES)
    return path.is_file() or any((path / name).exists() for name in names)


def _from_directory(directory: Path, source: ModelSource) -> Tokenizer:
    inner = _read_inner(directory)
    config = _json(directory / "tokenizer_config.json")
    generation = _json(source.path / "generation_config.json") if source.kind == "hf" else {}
    named = {**_json(directory / "special_tokens_map.json"), **config}

    def special(key: str) -> int | None:
        value = named.get(key)
        token = value.get("content") if isinstance(value, dict) else value
        found: int | None = inner.token_to_id(token) if isinstance(token, str) else None
        return found

    ends = _ids(generation.get("eos_token_id"))
    eos = special("eos_token")
    parts = TokenizerParts(
        name=source.name,
        bos=special("bos_token"),
        eos=eos if eos is not None or not ends else ends[0],
        pad=special("pad_token"),
        unk=special("unk_token"),
        stops=ends,
        templates=_templates(directory, config),
    )
    return Tokenizer(inner, _with_affixes(inner, config, parts))


def _with_affixes(inner: Any, config: Mapping[str, Any], parts: TokenizerParts) -> TokenizerParts:
    """An explicit add_bos_token or add_eos_token wins over the post-processor in the file."""
    from dataclasses import replace

    wants_bos, wants_eos = config.get("add_bos_token"), config.get("add_eos_token")
    around = tuple(inner.encode("", add_special_tokens=True).ids)
    has_bos = parts.bos is not None and around[:1] == (parts.bos,)
    has_eos = parts.eos is not None and around[-1:] == (parts.eos,)
    bos = has_bos if wants_bos is None else bool(wants_bos) and parts.bos is not None
    eos = has_eos if wants_eos is None else bool(wants_eos) and parts.eos is not None
    if (bos, eos) == (has_bos, has_eos):
        return parts
    prefix = (parts.bos,) if bos and parts.bos is not None else ()
    suffix = (parts.eos,) if eos and parts.eos is not None else ()
    return replace(parts, prefix=prefix, suffix=suffix)


def _ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,)
    return tuple(int(v) for v in value) if isinstance(value, Sequence) else ()


def _read_inner(directory: Path) -> Any:
    file = directory / "tokenizer.json"
    if not file.exists():
        return _through_transformers(directory)
    try:
        return tokenizers_package().Tokenizer.from_file(str(file))
    except TokenizerError:
        raise
    except Exception as why:  # the library raises bare Exception
        raise TokenizerError(f"{file} cannot be read: {why}.", setting="tokenizer") from why


def tokenizers_package() -> Any:
    """The tokenizers package, imported on first use."""
    try:
        import tokenizers
    except ImportError as why:
        raise TokenizerError(
            "Text needs the package 'tokenizers', which is not installed.",
            setting="tokenizer",
            next_step="pip install 'tokenizers>=0.21'",
        ) from why
    return tokenizers


_SLOW_FILES: Final = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


def _through_transformers(directory: Path) -> Any:
    """Files that tokenizers alone cannot read, converted by transformers."""
    found = [name for name in _SLOW_FILES if (directory / name).exists()]
    if not found:
        raise TokenizerError(
            f"{directory} holds no tokenizer: no tokenizer.json.",
            setting="tokenizer",
            next_step="Add the file, or pass tokenizer= with the path or hub id of another model.",
        )
    try:
        from transformers import AutoTokenizer
    except ImportError as why:
        raise TokenizerError(
            f"{directory} holds only {', '.join(found)}; converting that needs 'transformers', "
            "which is not installed.",
            setting="tokenizer",
            next_step="pip install transformers, or add a tokenizer.json.",
        ) from why
    try:
        return AutoTokenizer.from_pretrained(str(directory), use_fast=True).backend_tokenizer
    except Exception as why:  # conversion code of many families
        raise TokenizerError(
            f"{directory}: transformers cannot convert {', '.join(found)}: {why}.",
            setting="tokenizer",
            next_step="Conversion may need sentencepiece and protobuf; or add a tokenizer.json.",
        ) from why


def _templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; a chat_template.jinja file wins over the config."""
    found: dict[str, str] = {}
    value = config.get("chat_template")
    if value is None:
        value = _json(directory / "chat_template.json").get("chat_template")
    if isinstance(value, str):
        found["default"] = value
    elif isinstance(value, list):
        found.update({entry["name"]: entry["template"] for entry in value})
    for file in sorted(directory.glob("additional_chat_templates/*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8")
    if (directory / "chat_template.jinja").exists():
        found["default"] = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    return found


def _json(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one if there is no such file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as why:
        raise TokenizerError(f"{path} cannot be read: {why}.", setting="tokenizer") from why
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} does not hold a JSON object.", setting="tokenizer")
    return value
