"""How KV memory is divided: :func:`size_kv`, the one place. No torch here.

Where you are: beside ``host``, which asks before it allocates; ``deepinfer config memory`` asks the
same. Memory holds, in this order: one state block for each of ``max_num_seqs`` requests; snapshots
of state for the prefix cache, an eighth (``SNAPSHOT_SHARE``) of what is left, at most four for each
request, and none where one text of the longest length needs the room or nothing is cached; pages.

    (max_num_seqs + snapshots) · bytes_per_request + pages · page_bytes ≤ memory

Models without state have bytes_per_request = 0 and neither blocks nor snapshots.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepinfer.api.kv import KVOptions
from deepinfer.errors import ConfigError, KVCacheTooSmallError

if TYPE_CHECKING:
    from deepinfer.api.kv import KVSpec
    from deepinfer.config import EngineConfig

log = logging.getLogger(__name__)

SNAPSHOT_SHARE = 8
SNAPSHOTS_PER_REQUEST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSizes:
    """What a pool is made of. ``page_bytes``: a page of all growing groups; ``block_bytes``: a
    block of all state groups. ``max_len``: the longest text; ``state_blocks``: slots + snapshots.
    """

    max_len: int
    pages: int
    page_bytes: int
    slots: int
    snapshots: int
    block_bytes: int

    @property
    def state_blocks(self) -> int:
        return self.slots + self.snapshots if self.block_bytes else 0

    @property
    def nbytes(self) -> int:
        """All of it, exactly what a pool allocates."""
        return self.pages * self.page_bytes + self.state_blocks * self.block_bytes


def kv_options(config: EngineConfig, dtype_bytes: int, draft_len: int = 0) -> KVOptions:
    """What of a configuration shapes a model's KV."""
    mode, keep, asked = config.truncation()
    return KVOptions(
        dtype_bytes=dtype_bytes,
        page_size=config.page_size,
        draft_len=draft_len,
        cache_dtype=config.kv_cache_dtype,
        truncation=mode,
        keep_tokens=keep,
        asked=asked,
    )


def check_page_size(page_size: int, spec: KVSpec) -> None:
    """Refuse pages that would cut an entry of a group in two."""
    multiple = spec.page_multiple
    if page_size % multiple:
        raise ConfigError(
            f"page_size={page_size}: this model keeps one entry for every {multiple} tokens, so a "
            f"page must be a multiple of {multiple} tokens.",
            setting="page_size",
            next_step=f"Give {-(-page_size // multiple) * multiple}.",
        )


def full_bytes(config: EngineConfig, spec: KVSpec, max_len: int) -> int:
    """What all requests at their longest, and all snapshots, would fill: more is never used."""
    pages = -(-max_len // config.page_size) * config.max_num_seqs
    blocks = config.max_num_seqs * (1 + SNAPSHOTS_PER_REQUEST)
    return pages * spec.page_bytes(config.page_size) + blocks * spec.bytes_per_request


def size_kv(config: EngineConfig, spec: KVSpec, max_len: int, memory: int) -> KVSizes:
    """Divide ``memory`` bytes. Where the user named no length, a pool too small shortens it.

    Raises:
        KVCacheTooSmallError: it cannot hold the state of all requests, or a text of the length
            that the user named.
        ConfigError: pages of this size cannot be.
    """
    size, slots = config.page_size, config.max_num_seqs
    check_page_size(size, spec)
    page_bytes, block_bytes = spec.page_bytes(size), spec.bytes_per_request
    left = memory - slots * block_bytes
    if block_bytes and left < page_bytes:
        raise _no_room_for_state(memory, slots, block_bytes, page_bytes)
    longest = -(-max_len // size) * page_bytes
    snapshots = 0
    if block_bytes and config.enable_prefix_caching:
        spare = max(0, min(left // SNAPSHOT_SHARE, left - longest))
        snapshots = min(spare // block_bytes, SNAPSHOTS_PER_REQUEST * slots)
        if not snapshots:
            need = slots * block_bytes + max(SNAPSHOT_SHARE * block_bytes, longest + block_bytes)
            log.warning(
                "kv_cache_memory=%d has no room for a snapshot of state (%d bytes), so no prefix "
                "is reused. Give %d or more, fewer max_num_seqs or a shorter max_model_len.",
                memory, block_bytes, need,
            )  # fmt: skip
    pages = (left - snapshots * block_bytes) // page_bytes
    return KVSizes(
        max_len=_longest(config, max_len, pages * size, memory, longest + slots * block_bytes),
        pages=pages,
        page_bytes=page_bytes,
        slots=slots,
        snapshots=snapshots,
        block_bytes=block_bytes,
    )


def _longest(config: EngineConfig, max_len: int, fits: int, memory: int, need: int) -> int:
    if fits >= max_len:
        return max_len
    if config.max_model_len is None and fits >= 2:
        log.info("max_model_len is %d, not the model's %d: KV memory ends there.", fits, max_len)
        return fits
    shorter = f", or max_model_len={fits} or less" if fits >= 2 else ""
    raise KVCacheTooSmallError(
        f"kv_cache_memory={memory} holds {fits} tokens, and one text of max_model_len={max_len} "
        f"needs {need} bytes.",
        setting="kv_cache_memory",
        next_step=f"Give kv_cache_memory={need} or more{shorter}.",
    )


def _no_room_for_state(memory: int, slots: int, block: int, page: int) -> KVCacheTooSmallError:
    need, fewer = slots * block + page, max(0, memory - page) // block
    return KVCacheTooSmallError(
        f"kv_cache_memory={memory} is too small: the state of max_num_seqs={slots} requests "
        f"({slots} · {block} bytes) and one page ({page} bytes) need {need} bytes.",
        setting="kv_cache_memory",
        next_step=f"Give kv_cache_memory={need} or more"
        + (f", or max_num_seqs={fewer} or less." if fewer else "."),
    )
