"""The GGUF file format: metadata, the tensor table, the raw rows of a tensor.

Where you are: below ``checkpoint.py`` (weights under Hugging Face names) and ``tokenizer.py``
(vocabulary). Nothing here imports torch, so a front end can read a vocabulary without it.
The header is parsed here and not by ``gguf.GGUFReader``, which builds a numpy array for every
string of the vocabulary: 2.2 s for 49k tokens against 0.1 s. Sizes of the block types come from
the ``gguf`` package. Every declared extent is checked against the file's size while opening, so a
download that was cut short fails here and names the tensor, not with a bus error later.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from deepinfer.errors import ModelLoadError

_AGAIN: Final = "Fetch or convert the file again."
_MAX_DIMS: Final = 4
_SAMPLES: Final = 16
_SAMPLE_BYTES: Final = 4096

# GGUF value type -> (struct format, numpy dtype); 8 is a string, 9 an array.
_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final[Mapping[int, tuple[str, str]]] = {
    0: ("<B", "<u1"),
    1: ("<b", "<i1"),
    2: ("<H", "<u2"),
    3: ("<h", "<i2"),
    4: ("<I", "<u4"),
    5: ("<i", "<i4"),
    6: ("<f", "<f4"),
    7: ("<?", "|b1"),
    10: ("<Q", "<u8"),
    11: ("<q", "<i8"),
    12: ("<d", "<f8"),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of the tensor table. ``shape`` is row-major, the last dimension is contiguous."""

    name: str
    shape: tuple[int, ...]
    quant: str
    start: int
    nbytes: int


class GGUFFile:
    """An opened GGUF file: ``metadata`` (plain Python and numpy values) and ``tensors``.

    The file stays mapped as long as this object, or an array from ``raw``, is alive.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _opened(path) as file:
            self.size = os.fstat(file.fileno()).st_size
            if self.size < 24:
                raise ModelLoadError(
                    f"{path} is cut short: a GGUF header has at least 24 bytes, the file has "
                    f"{self.size}.",
                    setting="model",
                    next_step=_AGAIN,
                )
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        reader = _Reader(path, self._map, self.size)
        n_tensors, n_keys = reader.preamble()
        self.metadata: dict[str, Any] = reader.metadata(n_keys)
        table = [reader.tensor_entry() for _ in range(n_tensors)]
        self.header_bytes = reader.pos
        self.tensors = _place(path, self.size, reader.pos, self.metadata, table)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The stored bytes of a tensor as ``[rows, bytes per row]``; no copy."""
        info = self.tensors[name]
        flat = np.frombuffer(self._map, np.uint8, count=info.nbytes, offset=info.start)
        rows = int(np.prod(info.shape[:-1], dtype=np.int64)) if len(info.shape) > 1 else 1
        return flat.reshape(rows, -1)

    def token_id(self, key: str) -> int | None:
        """``tokenizer.ggml.{key}_token_id``, or ``None`` if the file does not name it."""
        value = self.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if value is not None and not isinstance(value, int):
            raise ModelLoadError(
                f"{self.path}: 'tokenizer.ggml.{key}_token_id' is {value!r}, expected a number.",
                setting="model",
            )
        return value

    def fingerprint(self) -> str:
        """A hash of the header, the size and a few samples of the data; not of time or path."""
        return file_fingerprint(self._map, self.size, self.header_bytes)


def file_fingerprint(data: mmap.mmap, size: int, header_bytes: int) -> str:
    """Hash the header, the size and evenly spread samples: cheap, and tells fine-tunes apart.

    Headers alone would not: a fine-tune has its base's names and shapes.
    """
    digest = hashlib.sha256(str(size).encode())
    digest.update(data[:header_bytes])
    step = max((size - header_bytes) // _SAMPLES, 1)
    for start in range(header_bytes, size, step):
        digest.update(data[start : start + _SAMPLE_BYTES])
    return digest.hexdigest()


def _opened(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as why:
        raise ModelLoadError(f"{path} cannot be opened: {why}.", setting="model") from why


class _Reader:
    """A cursor over the header that never reads past the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path = path
        self.data = data
        self.size = size
        self.pos = 0

    def fail(self, what: str) -> NoReturn:
        raise ModelLoadError(f"{self.path}: {what}.", setting="model", next_step=_AGAIN)

    def need(self, count: int, what: str) -> int:
        """Claim ``count`` bytes and return where they start."""
        start, end = self.pos, self.pos + count
        if end > self.size:
            self.fail(
                f"the file is cut short or damaged: {what} ends at byte {end}, "
                f"the file has {self.size}"
            )
        self.pos = end
        return start

    def number(self, form: str, what: str) -> Any:
        start = self.need(struct.calcsize(form), what)
        return struct.unpack_from(form, self.data, start)[0]

    def string(self, what: str) -> str:
        length = self.number("<Q", what)
        start = self.need(length, what)
        return self.data[start : start + length].decode("utf-8", "replace")

    def preamble(self) -> tuple[int, int]:
        magic = self.data[:4]
        if magic != b"GGUF":
            self.fail(f"not a GGUF file: it begins with {magic!r} instead of b'GGUF'")
        self.pos = 4
        version = self.number("<I", "the version")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            kind = "a big-endian file" if swapped in (2, 3) else f"GGUF version {version}"
            self.fail(f"{kind} is not supported; known are versions 2 and 3, little-endian")
        counts = self.number("<Q", "the tensor count"), self.number("<Q", "the key count")
        for count in counts:
            if count > self.size:
                self.fail(f"the header is damaged: it declares {count} entries")
        return counts

    def metadata(self, count: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for index in range(count):
            key = self.string(f"metadata key {index} of {count}")
            kind = self.number("<I", f"the type of {key!r}")
            values[key] = self.value(kind, key)
        return values

    def value(self, kind: int, key: str) -> Any:
        what = f"the value of {key!r}"
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(what)
        if kind not in _SCALARS:
            self.fail(f"{what} has the unknown type {kind}")
        form, dtype = _SCALARS[kind]
        number = self.number(form, what)
        return shortest(number) if dtype == "<f4" else number

    def array(self, what: str) -> Any:
        kind = self.number("<I", what)
        count = self.number("<Q", what)
        if kind == _STRING:
            return self.strings(count, what)
        if kind not in _SCALARS:
            self.fail(f"{what} is an array of the unsupported type {kind}")
        dtype = np.dtype(_SCALARS[kind][1])
        start = self.need(count * dtype.itemsize, what)
        return np.frombuffer(self.data, dtype, count=count, offset=start).copy()

    def strings(self, count: int, what: str) -> list[str]:
        """A vocabulary: hundreds of thousands of strings, so the loop is kept bare."""
        if count * 8 > self.size - self.pos:
            self.need(count * 8, what)
        unpack, data, pos, last = struct.Struct("<Q").unpack_from, self.data, self.pos, self.size
        out = []
        for _ in range(count):
            if pos + 8 > last:
                self.pos = pos
                self.need(8, what)
            (length,) = unpack(data, pos)
            pos += 8
            end = pos + length
            if end > last:
                self.pos = pos
                self.need(length, what)
            out.append(data[pos:end].decode("utf-8", "replace"))
            pos = end
        self.pos = pos
        return out

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, row-major shape, type number, offset in the data section."""
        name = self.string("a name in the tensor table")
        n_dims = self.number("<I", f"the entry of tensor {name!r}")
        if not 1 <= n_dims <= _MAX_DIMS:
            self.fail(f"tensor {name!r} declares {n_dims} dimensions; 1 to {_MAX_DIMS} are known")
        where = f"the entry of tensor {name!r}"
        dims = [self.number("<Q", where) for _ in range(n_dims)]
        if 0 in dims:
            self.fail(f"tensor {name!r} declares the empty shape {dims}")
        kind = self.number("<I", where)
        return name, tuple(reversed(dims)), kind, self.number("<Q", where)


def shortest(number: float) -> float:
    """The shortest decimal of a float32: 1e-5 is stored as 9.999999747378752e-06."""
    return float(str(np.float32(number)))


def _place(
    path: Path,
    size: int,
    header_end: int,
    metadata: Mapping[str, Any],
    table: list[tuple[str, tuple[int, ...], int, int]],
) -> dict[str, TensorInfo]:
    """Turn offsets into checked extents."""
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelLoadError(f"{path}: general.alignment is {alignment!r}.", setting="model")
    data_start = -(-header_end // alignment) * alignment
    sizes = _block_sizes()
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in table:
        info = _extent(path, sizes, name, shape, kind, data_start + offset)
        if name in tensors:
            raise ModelLoadError(f"{path} holds tensor {name!r} twice.", setting="model")
        if info.start + info.nbytes > size:
            raise ModelLoadError(
                f"{path} is cut short: tensor {name!r} ends at byte {info.start + info.nbytes}, "
                f"the file has {size}.",
                setting="model",
                next_step=_AGAIN,
            )
        tensors[name] = info
    return tensors


def _extent(
    path: Path,
    sizes: Mapping[int, tuple[str, int, int]],
    name: str,
    shape: tuple[int, ...],
    kind: int,
    start: int,
) -> TensorInfo:
    if kind not in sizes:
        known = ", ".join(quant for quant, _, _ in sizes.values())
        raise ModelLoadError(
            f"{path}: tensor {name!r} has the unknown type number {kind}; known are {known}.",
            setting="model",
            next_step="Use a file in one of these types.",
        )
    quant, block, nbytes = sizes[kind]
    if shape[-1] % block:
        raise ModelLoadError(
            f"{path}: rows of tensor {name!r} hold {shape[-1]} values, {quant} needs a multiple "
            f"of {block}.",
            setting="model",
            next_step=_AGAIN,
        )
    count = 1
    for dim in shape:
        count *= dim
    return TensorInfo(name, shape, quant, start, count // block * nbytes)


def _block_sizes() -> Mapping[int, tuple[str, int, int]]:
    """Type number -> (name, values per block, bytes per block), from the gguf package."""
    gguf = gguf_package()
    return {
        int(kind): (kind.name, block, nbytes)
        for kind, (block, nbytes) in gguf.GGML_QUANT_SIZES.items()
    }


def gguf_package() -> Any:
    """The gguf package, imported on first use."""
    try:
        import gguf
    except ImportError as why:
        raise ModelLoadError(
            "Reading GGUF files needs the package 'gguf', which is not installed.",
            setting="model",
            next_step="pip install 'gguf>=0.17'",
        ) from why
    return gguf
