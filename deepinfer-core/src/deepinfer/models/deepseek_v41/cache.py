"""What the text model keeps of a text: growing entries, rolling windows, open groups. Spec 9.1.

Every layer has its own window of raw latents; layers that own a compressor have entries and index
keys, one for every ``ratio`` tokens, and at ratio 2 the group that is still open. Stored as packed
records (``auto``, ``packed``), or the same values in bfloat16.
"""

from __future__ import annotations

from typing import Literal, assert_never

from deepinfer.api.kv import Entry, KVGroup, KVOptions, KVSpec, Truncation
from deepinfer.errors import UnsupportedError
from deepinfer.models.deepseek_v41.config import DeepseekV41Config

Kind = Literal["fp8", "nvfp4", "mxfp4"]


def kv_spec(config: DeepseekV41Config, options: KVOptions) -> KVSpec:
    """All groups, sized for a page size, a draft length and a storage.

    Raises:
        UnsupportedError: a storage, or a truncation, that this model does not have.
    """
    packed = _packed(options.cache_dtype)
    groups = [_window(config, options, packed)]
    for ratio in sorted({config.ratios[source] for source in config.kv_sources}, reverse=True):
        sources = tuple(s for s in config.kv_sources if config.ratios[s] == ratio)
        groups.append(
            _growing("compressed", ratio, sources, _entry("nvfp4", config.head_dim, packed))
        )
        groups.append(_growing("index", ratio, sources, _entry("mxfp4", config.index_dim, packed)))
        if ratio == 2:
            groups.append(_open(config, options, sources))
    storage = "packed" if packed else "bfloat16"
    return KVSpec(
        groups=tuple(groups),
        layout=f"deepseek-v41-{storage}",
        lookback=0 if config.engram is None else config.engram.max_ngram - 1,
        truncation=truncation(config, options),
    )


def truncation(config: DeepseekV41Config, options: KVOptions) -> Truncation | None:
    """Which layers may skip a prompt's beginning, and from where on that is exact. Spec 3.12.

    Raises:
        UnsupportedError: the model's layers do not allow it, or too few rows would be kept.
    """
    mode, last = options.truncation, config.last_source
    late = config.layers - 1 - last
    if mode == "off" or last < 0 or late == 0:
        return None
    _check_truncation(config, options)
    reach = (config.window - 1) * late
    if mode == "exact":
        keep = 1 + reach
    elif mode == "compact" or mode == "mask":
        keep = options.keep_tokens
    else:
        assert_never(mode)
    # Drafts are verified on rows after the prompt, which may look back over a whole window.
    keep = max(keep, config.window + options.draft_len) if mode == "exact" else keep
    return Truncation(keep=keep, reach=reach, first_layer=last + 1, compact=mode != "mask")


def _check_truncation(config: DeepseekV41Config, options: KVOptions) -> None:
    last, name = config.last_source, "yoco_prefill_truncation_mode"
    reasons = []
    if config.ratios[last] > 1:
        reasons.append(f"its last KV source, layer {last}, has ratio {config.ratios[last]}")
    if config.engram is not None and max(config.engram.layers) >= last:
        reasons.append(f"layer {max(config.engram.layers)} has Engram")
    if reasons:
        raise UnsupportedError(
            f"{name}={options.truncation!r} does not fit this model: {' and '.join(reasons)}.",
            setting=name,
            next_step="Set it to 'off'.",
        )
    least = config.window + options.draft_len
    if options.truncation != "exact" and options.keep_tokens < least:
        drafts = f" and the {options.draft_len} tokens of a draft" if options.draft_len else ""
        raise UnsupportedError(
            f"yoco_prefill_keep_tokens={options.keep_tokens} is too few: the window of "
            f"{config.window} tokens{drafts} must be covered.",
            setting="yoco_prefill_keep_tokens",
            next_step=f"Keep at least {least}.",
        )


def _packed(cache_dtype: str) -> bool:
    if cache_dtype in ("auto", "packed"):
        return True
    if cache_dtype == "bfloat16":
        return False
    raise UnsupportedError(
        f"kv_cache_dtype={cache_dtype!r} is not a storage of this model.",
        setting="kv_cache_dtype",
        next_step="It has auto, packed and bfloat16.",
    )


def _entry(kind: Kind, width: int, packed: bool) -> Entry:
    """A record of ``ops.pack_rows``, or its values."""
    if not packed:
        return Entry(width=width, dtype="bfloat16")
    if kind == "fp8":
        return Entry(width=width + width // 32, dtype="uint8")
    return Entry(width=width // 2 + width // (16 if kind == "nvfp4" else 32), dtype="uint8")


def _window(config: DeepseekV41Config, options: KVOptions, packed: bool) -> KVGroup:
    """A ring long enough that a snapshot of it, taken up to a page later than a boundary, still
    holds the window before that boundary, and that rejected drafts overwrite nothing needed.
    """
    return KVGroup(
        name="window",
        kind="state",
        layers=tuple(range(config.layers)),
        entry=_entry("fp8", config.head_dim, packed),
        rows=config.window + options.page_size + options.draft_len + 1,
    )


def _growing(name: str, ratio: int, layers: tuple[int, ...], entry: Entry) -> KVGroup:
    return KVGroup(
        name=f"{name}-r{ratio}",
        kind="full",
        layers=layers,
        entry=entry,
        ratio=ratio,
        bytes_per_token=-(-entry.nbytes * len(layers) // ratio),
    )


def _open(config: DeepseekV41Config, options: KVOptions, layers: tuple[int, ...]) -> KVGroup:
    """u and s of the last tokens: as many as a rejected draft may step back, and one."""
    rows = 1 << (options.draft_len + 1).bit_length()
    return KVGroup(
        name="open",
        kind="state",
        layers=layers,
        entry=Entry(width=2 * config.head_dim, dtype="float32"),
        rows=rows,
    )
