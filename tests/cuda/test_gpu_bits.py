"""On a GPU: the hardware is its model, no bit moved, and no row's bits depend on its company."""

import pytest
import torch

pytestmark = pytest.mark.gpu
COUNTS = (1, 2, 7, 16, 17, 33, 64, 100, 256, 300)


@pytest.fixture(scope="module")
def device():
    return torch.device("cuda", 0)


@pytest.mark.parametrize("n, k", [(64, 48), (200, 576), (576, 1040), (96, 4096)])
def test_products_are_the_tensor_cores_to_the_bit(device, n, k):
    """Every tile that the launcher chooses, against the model of the instruction."""
    from deepinfer_backend_cuda import bits, linear
    from tensor_core import product

    x, w = bits.values((300, k), 21, device), bits.values((n, k), 22, device, least=-9)
    with torch.inference_mode():
        want = product(x, w)
        for count in COUNTS:
            got = linear.linear(x[:count], w, out_dtype=torch.float32).cpu()
            assert torch.equal(got, want[:count]), f"M={count}"


@pytest.mark.parametrize("tile", ["LOW", "TALL"])
@pytest.mark.parametrize("m, n, k", [(257, 512, 64), (300, 1024, 576), (1000, 4096, 4096)])
def test_long_products_have_the_bits_of_the_kernels_for_any_gpu(device, tile, m, n, k):
    """Plain, with a bias, and gated: gates far out of range too, where exponentials overflow."""
    from deepinfer_backend_cuda import hopper, linear

    if not hopper.serves(device):
        pytest.skip("not a Hopper GPU")
    source = torch.Generator(device).manual_seed(31)
    x, w, u, bias = (
        torch.randn(shape, generator=source, device=device).bfloat16()
        for shape in ((m, k), (n, k), (2 * n, k), (n,))
    )
    with torch.inference_mode():
        for scale in (0.02, 3.0):
            for weights, b, gated in ((w, None, False), (w, bias, False), (u, None, True)):
                got, want = (torch.full((m, n), 7.0, device=device).bfloat16() for _ in "gw")
                rows = x * scale
                if gated:
                    linear._gated(rows, weights, want)
                else:
                    linear._tensor_cores(rows, weights, b, want)
                hopper.long(rows, weights, b, got, gated, getattr(hopper, tile))
                assert torch.equal(got.view(torch.int16), want.view(torch.int16)), (b, gated)


def test_no_bit_moved(device):
    """A change of compiler, or of a kernel's order, has to be recorded with open eyes."""
    from deepinfer_backend_cuda import bits

    capability = torch.cuda.get_device_capability(device)
    known = bits.golden(capability)
    if not known:
        pytest.skip(f"no bits are recorded for compute capability {capability}")
    with torch.inference_mode():
        assert bits.moved(device, known) == []


def names():
    try:
        from deepinfer_backend_cuda import bits
    except ImportError:
        return []
    return [probe.name for probe in bits.probes()]


@pytest.mark.parametrize("name", names())
def test_rows_have_the_same_bits_in_any_company(device, name):
    """Alone, in chunks, decoded or prefilled: rows 1, 2, 7 … 2048 at three places each."""
    from deepinfer_backend_cuda import bits

    (probe,) = (p for p in bits.probes() if p.name == name)
    with torch.inference_mode():
        assert bits.unequal(probe, device) == []


def test_graphs_padding_and_prefill_show_in_no_bit(device):
    """Decode steps of 1 to 70 requests, replayed and launched; the same rows of a prefill."""
    from decoder import World
    from deepinfer_backend_cuda.layers import Layers

    with torch.inference_mode():
        for requests in (1, 3, 8, 21, 70):
            world, graphs = World(device, requests), Layers(device)
            want = world.prefill()
            for run in (graphs, graphs, graphs, Layers(device, graphs=False)):
                assert torch.equal(world.decode(run), want), requests


def test_graphs_of_several_rows_a_request_show_in_no_bit(device):
    """Drafts to verify and short prompts: any mix of rows, by one graph, with the whole's bits."""
    from decoder import World
    from deepinfer_backend_cuda.layers import Layers

    source = torch.Generator().manual_seed(1)
    with torch.inference_mode():
        for requests in (1, 3, 9, 40):
            world, graphs = World(device, requests), Layers(device)
            want = world.whole()
            for turn in range(6):
                most = torch.randint(1, 7, (requests,), generator=source)
                if turn == 3:
                    most[:] = 1
                if requests < 9 and turn == 4:
                    most[0] = 20
                got, at = world.tails(graphs, most.to(device))
                assert torch.equal(got, want[at]), (requests, most.tolist())
            assert len(graphs._stages) <= 6
            assert any(stage.replay is not None for stage in graphs._stages.values())


@pytest.mark.parametrize("n, k", [(576, 576), (4096, 4096), (200, 96)])
def test_fp8_weights_have_the_bits_of_the_decoded_ones(device, n, k):
    """Any number of rows, with a bias or not, decoded in registers or at once."""
    from deepinfer_backend_cuda import bits, fp8, linear

    w, bias = bits.values((n, k), 41, device, least=-11), bits.values((n,), 42, device)
    x = bits.values((700, k), 43, device)
    with torch.inference_mode():
        kept = fp8.prepare(w, frozenset({"linear"}))
        plain = fp8.block_scaled(w).dequantize(torch.bfloat16)
        for more in ((), (bias,), (None, torch.float32)):
            want = linear.linear(x, plain, *more)
            for count in (1, 2, 7, 16, 33, 64, 100, 256, 511, 512, 700):
                got = fp8.linear(x[:count], kept, *more)
                assert bits.same(got, want[:count]), (count, len(more))


def test_a_decoder_with_fp8_weights_replays_the_bits_of_the_decoded_ones(device):
    """Whole layers: through graphs, and as a prefill's last rows."""
    from decoder import World
    from deepinfer_backend_cuda import fp8
    from deepinfer_backend_cuda.layers import Layers

    def plain(w):
        return fp8.block_scaled(w).dequantize(torch.bfloat16)

    def kept(w):
        return fp8.prepare(w, frozenset({"linear"}))

    with torch.inference_mode():
        want = World(device, 21, plain).prefill()
        world, graphs = World(device, 21, kept, fp8.BLOCKS), Layers(device, blocks=fp8.BLOCKS)
        assert torch.equal(world.prefill(), want)
        for _ in range(3):
            assert torch.equal(world.decode(graphs), want)
