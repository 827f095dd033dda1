"""How a launch is made short and still has what a race can hide in, for ``compute-sanitizer``.

Its ``racecheck`` looks at every access to shared memory: of a model's products one takes minutes.
So a short launch has the tile, the stages and the overlap of a long one, chosen by the backend for
the long one's shape, but a GPU of PROCESSORS multiprocessors and a few tiles. Programs that walk
tiles walk two or three, the last ones have edges, and sums are so long that every stage of a ring
is used three times.
"""

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from deepinfer_backend_cuda import attention, hopper, launch, linear, sparse

PROCESSORS = 2
EDGE = 8
"""Rows that the last tile of rows has."""


@contextmanager
def step(rows, short_rows):
    """In this context ``short_rows`` rows are launched as ``rows`` would be.

    Nothing is left to Hopper's kernels, which have launches of their own: so those that stand for
    them elsewhere run on a Hopper GPU too.
    """
    chained = launch.CHAINED_ROWS * short_rows // rows  # so that slots, several a row, agree too
    with ExitStack() as changes:
        changes.enter_context(patch.object(launch, "CHAINED_ROWS", chained))
        changes.enter_context(patch.object(hopper, "serves", lambda device: False))
        for module in (attention, hopper, linear, sparse):
            changes.enter_context(patch.object(module, "processors", lambda device: PROCESSORS))
        yield


def height(rows, tile_rows):
    """Rows of the short launch: one tile, or one and the edge of another."""
    return min(rows, tile_rows + EDGE)


def width(tile_columns, tiles_of_rows=1, residents=1):
    """Columns: two tiles for each program and one more, the last of a row cut in half.

    Half a tile is rounded up to 16 columns, as kernels are compiled for a multiple of them.
    """
    tiles = -(-(2 * residents * PROCESSORS + 1) // tiles_of_rows)
    return (tiles - 1) * tile_columns + -(-tile_columns // 32) * 16


def depth(tile_depth, stages):
    """Length of sums: twice round the ring and one step, so that tiles begin at other stages."""
    return (2 * stages + 1) * tile_depth
