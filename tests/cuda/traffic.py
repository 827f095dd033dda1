"""What launches move through shared memory, told from their arguments: nothing is compiled or run.

``racecheck`` looks at every access to shared memory, so that is the time that a launch takes there.
``python traffic.py`` prints it of the short launches and leaves with 1 if one is of no use there:
if it moves more than MOST, uses a stage of a ring but once, or has a program that walks a single
tile; or if a long launch on an H200 has a kernel in a tile that no short one has. ``test_kernels``
runs it.
"""

import sys
from math import prod
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from triton.runtime.jit import JITFunction

MOST = 20_000_000
"""Bytes, of a short launch."""
H200 = 132
"""Its multiprocessors."""
WEIGHT_BYTES = {0: 1, 1: 0.5, 2: 0.5, 3: 2, 4: 0.5}
"""By kind, see ``kernels.scaled`` and ``kernels.moe``."""
ROW_SIZES = {"quantize_kernel": {"WIDTH"}}
"""Constants that are no part of a tile: a row's width, where a program has a part of it."""


class Call(NamedTuple):
    """A launch of one kernel: all that it is given, by name."""

    kernel: Any
    grid: tuple[int, ...]
    values: dict[str, Any]

    @property
    def name(self):
        return self.kernel.__name__

    def tile(self):
        """What is compiled in: constants, options, boxes of descriptors, types of tensors."""
        constants = {p.name for p in self.kernel.params if p.is_constexpr}
        arguments = {p.name for p in self.kernel.params} - constants
        found = []
        for name, value in self.values.items():
            if name in ROW_SIZES.get(self.name, ()):
                continue
            if name in arguments:
                box = getattr(value, "block_shape", None)
                value = tuple(box) if box else str(getattr(value, "dtype", ""))
            found.append((name, str(getattr(value, "value", value))))
        return self.name, *sorted(found)


class Walk(NamedTuple):
    """Tiles that programs walk, steps of one and their bytes, stages that steps take in turn; bytes
    of a tile beside; whether a program has more than one tile.
    """

    tiles: int
    steps: int
    step: float
    stages: int = 1
    beside: int = 0
    persistent: bool = False

    @property
    def bytes(self):
        return int(self.tiles * (self.steps * self.step + self.beside))


def recorded(run):
    """The kernels that ``run`` would launch. What they would have written is not there."""
    found = []

    def note(kernel, *args, grid, warmup, **options):
        names = (p.name for p in kernel.params)
        found.append(Call(kernel, grid, dict(zip(names, args, strict=False)) | options))

    with patch.object(JITFunction, "run", note):
        run()
    return found


def traffic(calls):
    """Bytes through shared memory, about."""
    return sum(walk(call).bytes for call in calls)


def walk(call):
    """How a kernel's programs go through what they read."""
    v, programs = call.values, prod(map(int, call.grid))
    known = WALKS.get(call.name)
    return known(v, programs) if known else Walk(programs, 1, 4 * v.get("BLOCK", 1024))


def _cdiv(a, b):
    return -(-a // b)


def _stream(v, programs):
    tiles = _cdiv(v["N"], v["BN"] // (1 + v["GATED"]))
    step = (64 + v["BN"]) * v["BK"] * 2
    return Walk(tiles, _cdiv(v["K"], v["BK"]), step, v["STAGES"], persistent=True)


def _wide(v, programs):
    width = v["P0"] + v["P1"] + v["P2"]
    tiles = _cdiv(v["M"], 128) * _cdiv(v["N"], width // (1 + v["GATED"]))
    step = (128 + width) * v["BK"] * 2
    return Walk(tiles, _cdiv(v["K"], v["BK"]), step, v["STAGES"], persistent=True)


def _long(v, programs):
    rows, columns = v["ROWS"] * v["PARTS"], 256 // (1 + v["GATED"])
    tiles = _cdiv(v["M"], rows) * _cdiv(v["N"], columns)
    step, out = (rows + 256) * 64 * 2, rows * columns * 2
    return Walk(tiles, _cdiv(v["K"], 64), step, v["STAGES"], out, True)


def _gemm(v, programs, gated=False):
    tiles = _cdiv(v["M"], v["BM"]) * _cdiv(v["N"], v["BN"])
    step, out = (v["BM"] + v["BN"] * (1 + gated)) * v["BK"] * 2, v["BM"] * v["BN"] * 2
    return Walk(tiles, _cdiv(v["K"], v["BK"]), step, v["num_stages"], out, True)


def _gated_gemm(v, programs):
    return _gemm(v, programs, gated=True)


def _plain(v, programs):
    step = (v["BM"] + v["BN"]) * v["BK"] * 4
    return Walk(programs, _cdiv(v["K"], v["BK"]), step, v["num_stages"])


def _product(v, programs, gated=False):
    if v.get("GROUPED", True):  # of what two experts have at most; tiles behind it end at once
        programs = programs // v["tile_ptr"].shape[0] * (_cdiv(v["rows"], v["BM"]) + 1)
    kind = getattr(v["KIND"], "value", v["KIND"])
    step = 128 * (2 * v["BM"] + WEIGHT_BYTES[kind] * v["BN"] * (1 + gated))
    return Walk(programs, v["blocks"], step, v["num_stages"], 4 * v["BM"] * v["BN"])


def _gated_product(v, programs):
    return _product(v, programs, gated=True)


def _keys(v):
    """Of all tiles of rows, in blocks of 64."""
    cuts, found = v["cu_q_ptr"].tolist(), 0
    for begin, end, length in zip(cuts, cuts[1:], v["lengths_ptr"].tolist(), strict=False):
        for first in range(0, end - begin, v["BQ"]):
            last = min(first + v["BQ"], end - begin)
            found += _cdiv(max(length - (end - begin) + last, 0), 64)
    return found * v["HKV"]


def _attention(v, programs):
    dim = v.get("BD", v["D"])
    step, rows = 64 * (2 * dim + v.get("BM", 128)) * 2, v.get("BM", 128) * dim * 2
    return Walk(1, _keys(v), step, beside=programs * rows)


def _sparse(v, programs):
    step, out = v["BLOCK_N"] * (v["BD"] + 2 * v["BH"]) * 2, v["BH"] * v["BD"] * 4
    steps = _cdiv(v["total"], v["BLOCK_N"])
    stages = v["num_stages"] if v["total"] > 128 else 1  # a window alone is no more than that
    return Walk(programs, steps, step, stages, out)


def _index_score(v, programs):
    visible = ((v["pos_ptr"] + 1) // v["ratio"]).tolist()
    if v["AMONG"]:
        blocks = (v["blocks_ptr"] >= 0).sum(1).tolist()
        visible = [min(a, b * v["SIZE"]) for a, b in zip(visible, blocks, strict=True)]
    step = (128 + v["HEADS"]) * v["DI"] * 2
    return Walk(1, sum(_cdiv(count, 128) for count in visible), step)


def _mix(v, programs):
    step = (v["BM"] + 3 * v["BN"]) * v["BK"] * 2
    return Walk(programs, 512 // v["BK"], step, beside=v["BM"] * v["BN"] * 4)


def _filter(v, programs):
    """Sums over warps, four numbers at a time: two bits at a time, twice, and some beside."""
    return Walk(programs, 40 * _cdiv(v["V"], v["BLOCK"]), v["num_warps"] * 32)


WALKS = {
    "stream_kernel": _stream,
    "wide_kernel": _wide,
    "long_kernel": _long,
    "gemm_kernel": _gemm,
    "gated_gemm_kernel": _gated_gemm,
    "plain_gemm_kernel": _plain,
    "product_kernel": _product,
    "gated_kernel": _gated_product,
    "plain_kernel": lambda v, programs: _plain(v | {"num_stages": 2}, programs),
    "attention_kernel": _attention,
    "flash_kernel": _attention,
    "sparse_kernel": _sparse,
    "index_score_kernel": _index_score,
    "mix_kernel": _mix,
    "filter_kernel": _filter,
    "index_keys_kernel": lambda v, programs: Walk(programs, 1, 4 * v["BLOCK"] * v["DI"]),
    "pool_kernel": lambda v, programs: Walk(programs, 1, 4 * v["BLOCK"] * v["BD"]),
    "gather_kernel": lambda v, programs: Walk(
        programs, 1, 4 * v["BLOCK"] * (v["BD"] if v["COPY"] else 1)
    ),
    "decode_kernel": lambda v, programs: Walk(programs, 1, 4 * v["BN"] * 128),
}


def faults(calls):
    """Why a short launch is of little use, as texts."""
    if (size := traffic(calls)) > MOST:
        yield f"moves {size / 1e6:.0f} MB"
    for call in calls:
        found = walk(call)
        if found.stages > 1 and found.steps < 2 * found.stages:
            yield f"{call.name} has {found.steps} steps for {found.stages} stages"
        if found.persistent and found.tiles < 2 * prod(map(int, call.grid)):
            yield f"{call.name} walks {found.tiles} tiles in {call.grid} programs"


def as_an_h200():
    """From now on tiles are chosen as on one, where there is none."""
    from deepinfer_backend_cuda import attention, hopper, linear, sparse

    for module in (attention, hopper, linear, sparse):
        module.processors = lambda device: H200


def main():
    from deepinfer_backend_cuda import hopper
    from dry_driver import DryDriver
    from registry import SM90, launches, unreached
    from triton.runtime import driver

    driver.set_active(DryDriver(SM90))
    as_an_h200()
    bad, rows, tiles = 0, [], set()
    for launch in launches(short=True):
        calls = recorded(launch.run)
        tiles |= {call.tile() for call in calls}
        said = "; ".join(faults(calls))
        bad += bool(said)
        rows.append((traffic(calls), launch.name, said))
    for size, name, said in sorted(rows):
        print(f"{size / 1e6:8.2f} MB  {name}  {said}")
    for serves in (False, True):  # what stands for Hopper's kernels, and these
        hopper.serves = lambda device, serves=serves: serves
        for launch in launches():
            lacking = {call.tile() for call in recorded(launch.run)} - tiles
            bad += len(lacking)
            for tile in sorted(lacking):
                print("in no short launch:", launch.name, *tile)
    for name in unreached({tile[0] for tile in tiles}):
        bad += 1
        print("reached by no short launch:", name)
    print(f"{len(rows)} short launches, {sum(row[0] for row in rows) / 1e6:.0f} MB, {bad} faulty")
    return 1 if bad or not rows else 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
