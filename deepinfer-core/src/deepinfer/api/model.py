"""A model, described once in ops. House section 7.2."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from deepinfer.api.kv import KVOptions, KVSpec

if TYPE_CHECKING:
    import torch

    from deepinfer.api.plan import Image
    from deepinfer.ops.table import OpSet


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequests:
    """The n requests of a step, on the device.

    ``cu_q`` int32[n+1]: request b owns token rows ``cu_q[b] … cu_q[b+1]−1``; ``starts`` int64[n]:
    the position of its first; ``block_table`` int32[n, P]: its pages; ``blocks`` int64[n]: its
    block in state groups; ``floors`` int64[n]: where a truncating model's late layers begin.
    """

    cu_q: torch.Tensor
    starts: torch.Tensor
    block_table: torch.Tensor
    blocks: torch.Tensor
    floors: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBatch:
    """One step's token rows, on the device. An argument of ``Model.forward``, never a global.

    ``ids``, ``positions``, ``row_of_token``, ``kv_slots``: int64[T]; a KV slot is
    page·page_size + offset, −1 writes nothing; row −1 is padding. ``attn``: opaque, from
    ``ops.plan_attention``; None for a model whose groups all have entries. ``logit_rows`` int64[m]:
    token rows whose logits are wanted. ``requests``: what models with entries or state read.
    ``history`` int64[T, lookback]: the ids right before each token, nearest first, −1 before the
    text; None without lookback. ``ahead``: ids int64[A] and history int64[A, lookback] of tokens
    that the next step will likely run (further chunks of prefills), so that what they need can be
    fetched; a hint. None where there are none.

    ``late``: the same step with only the rows at or above their request's floor, for the late
    layers of a model that truncates compactly; row i of it is row ``late_rows[i]`` of this one.
    None where all rows are kept.

    ``images``: (int64[k], [k, H]), token rows and what stands there in place of the id's embedding,
    from ``SeeingModel.see``; None in steps without any, and in ``late``.

    ``tail``: as ``attn``, of ``logit_rows`` alone. Where it is there, nobody reads the last layer's
    rows but these, and there are many others: a model may write that layer's keys and values and
    run the rest of it for these rows only, unless ``taps`` wants that layer. Without a tail a model
    gives all rows; who calls another's ``forward`` and needs them takes it out.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    row_of_token: torch.Tensor
    kv_slots: torch.Tensor
    attn: Any
    logit_rows: torch.Tensor
    requests: StepRequests | None = None
    history: torch.Tensor | None = None
    ahead: tuple[torch.Tensor, torch.Tensor] | None = None
    late: DeviceBatch | None = None
    late_rows: torch.Tensor | None = None
    images: tuple[torch.Tensor, torch.Tensor] | None = None
    tail: Any = None


class KVPools(Protocol):
    """The paged pool and the state blocks.

    ``layer(i)`` gives (k_cache, v_cache), each [pages, page_size, HKV, D]; ``tensor(group, i)``
    the one tensor of a layer in a group with an entry (:class:`~deepinfer.api.kv.KVGroup`).
    """

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]: ...

    def tensor(self, group: str, layer: int) -> torch.Tensor: ...


class Taps(Protocol):
    """Takes hidden rows of chosen layers for a drafter."""

    layers: tuple[int, ...]

    def put(self, layer: int, hidden: torch.Tensor) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRule:
    """How checkpoint tensors become one parameter.

    ``sources`` are checkpoint names with the ``shapes`` they must have; several are joined along
    dimension 0 (``stack`` False: concatenated rows, as fused projections; True: a new leading
    dimension); ``view``: the parameter's shape where it is not the joined one (fused experts).
    ``uses``: the ops that read it, a composite before those it is written in; the first that has a
    ``prepare`` is asked. A bias, which goes beside a weight, has none and stays a tensor. ``route``
    among them says that experts are chosen by what this weight gives, ``hyper_mix`` that streams
    are mixed by it, ``compress`` that tokens are pooled by it: such a weight is never quantised.
    ``stored``: how the checkpoint stores a low-bit weight whose name ends in ``.weight`` and whose
    scales lie beside it as ``.scale``: ``fp8`` E4M3 bytes with an E8M0 scale for each 32×32 tile,
    ``fp4`` two E2M1 values a byte with one for each row and 32 columns; ``table`` E4M3 bytes with
    one for each row and 32 columns, which stay in the file: the parameter is a
    :class:`~deepinfer.models.tables.MappedTable`; ``shapes`` are those of the values.
    Without a ``scaled…`` op among ``uses`` a low-bit weight is always dequantised.
    ``exact``: kept in float32 whatever the engine's dtype.
    ``shard``: the dimension that tensor parallelism splits, or None. ``optional``: absent in some
    checkpoints (a bias); the parameter is then not loaded.
    """

    parameter: str
    sources: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    uses: tuple[str, ...]
    stack: bool = False
    view: tuple[int, ...] | None = None
    shard: int | None = None
    optional: bool = False
    stored: Literal["fp8", "fp4", "table"] | None = None
    exact: bool = False


class Model(Protocol):
    """What a step runs."""

    def load(self, parameter: str, value: Any) -> None:
        """Take one prepared parameter, by the name in its rule."""
        ...

    def forward(self, batch: DeviceBatch, kv: KVPools, taps: Taps | None = None) -> torch.Tensor:
        """Hidden rows [T, H] after the last layer, before the final norm.

        With a ``batch.tail``, [m, H] are taken too: the rows of ``batch.logit_rows``.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Chosen hidden rows [m, H], through final norm and head, to logits float32[m, V]."""
        ...


class SeeingModel(Model, Protocol):
    """A model that takes images; its adapter is a :class:`SeeingAdapter`."""

    def see(self, pixels: torch.Tensor) -> torch.Tensor:
        """One image's positions [tokens, H] in order, which stand in place of embeddings.

        ``pixels`` uint8[height, width, 3], on the device. Depends on nothing else.
        """
        ...


class ImageReader(Protocol):
    """The host's half of a family's vision. Several threads may read at once.

    ``token``: the id of every position of an image; ``most_tokens``: positions of the largest.
    """

    token: int
    most_tokens: int

    def read(self, data: bytes, where: str) -> Image:
        """An encoded picture as the model takes it; ``start`` is left 0.

        Raises:
            InvalidRequestError: it is no picture or outside the limits; begins with ``where``.
        """
        ...


class ModelAdapter(Protocol):
    """Everything core must know of a model family.

    ``unread``: beginnings of checkpoint names that the family knows and may leave unread; a tensor
    that neither they nor a rule account for is then an error. None: such tensors are ignored.
    """

    architectures: tuple[str, ...]
    unread: tuple[str, ...] | None

    def config(self, raw: Mapping[str, Any]) -> Any:
        """The checkpoint's config.json into this family's frozen dataclass; refuses by name."""
        ...

    def kv_spec(self, config: Any, options: KVOptions) -> KVSpec: ...

    def build(self, config: Any, ops: OpSet, parallel: Any) -> Model: ...

    def weights(self, config: Any) -> Iterable[WeightRule]: ...


class SeeingAdapter(ModelAdapter, Protocol):
    """An adapter of a family some of whose models take images."""

    def image_reader(self, raw: Mapping[str, Any]) -> ImageReader | None:
        """What prepares pictures for the model of this config.json; None if it takes none."""
        ...
