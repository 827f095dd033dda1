"""Options of launches, and the storage of what products read."""

import pytest
import torch


@pytest.fixture
def launch(sources):
    return pytest.importorskip("deepinfer_backend_cuda.launch", reason="needs Triton")


@pytest.mark.parametrize(
    "rows, stored",
    [(0, 0), (1, 8), (9, 16), (33, 64), (64, 64), (65, 128), (129, 256), (256, 256), (257, 384),
     (8192, 8448)],
)  # fmt: skip
def test_rows_lie_in_whole_tiles(launch, rows, stored):
    like = torch.zeros(1, dtype=torch.bfloat16)
    x = launch.empty_rows(like, (rows, 3, 4))
    assert x.shape == (rows, 3, 4) and x.dtype == like.dtype and x.is_contiguous()
    assert x.untyped_storage().nbytes() == stored * 12 * 2


@pytest.mark.parametrize("box", [8, 64, 128, 192])
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 129, 300])
def test_boxes_reach_as_far_as_the_storage(launch, rows, box):
    """And no further, wherever the rows lie in it and however far apart they are."""
    whole = -(-rows // box) * box
    x = launch.empty_rows(torch.zeros(1), (rows, 16))
    assert rows <= launch.rows_behind(x, box) <= whole
    assert launch.rows_behind(torch.zeros(rows, 16), box) == rows
    for behind in range(3):
        storage = torch.zeros((2 + rows + behind) * 24)
        some = storage[48:].view(rows + behind, 24)[:rows, 8:]  # ends where the storage does
        assert launch.rows_behind(some, box) == min(whole, rows + behind)


def test_storage_of_whole_tiles_serves_the_boxes_of_its_rows(launch):
    for rows in range(1, 400):
        x = launch.empty_rows(torch.zeros(1), (rows, 8))
        boxes = (128, 192) if rows > 256 else (128,) if rows > 64 else (8, 16, 32, 64)
        box = next(size for size in boxes if rows <= size or size == boxes[-1])
        for size in boxes if rows > 256 else (box,):
            assert launch.rows_behind(x, size) % size == 0
