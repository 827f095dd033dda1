"""Taps: the stream after each layer, no bit of the result changed, nothing paid without them."""

import pytest
import torch
from deepinfer.api.backend import OpContext
from deepinfer.api.kv import KVOptions
from deepinfer.api.model import DeviceBatch
from deepinfer.models.checkpoint import open_checkpoint
from deepinfer.models.registry import adapter_for, architectures_of, model_config
from deepinfer.models.source import resolve
from deepinfer.models.weights import load_weights
from deepinfer.native.backend import NativeCPUBackend
from deepinfer.ops.backend import ReferenceBackend, build_ops
from deepinfer.parallel import single
from deepinfer.testing.tiny import write_tiny_checkpoint
from deepinfer.worker.drafting import HiddenTaps
from deepinfer.worker.kvpool import KVPool

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")


class Loaded:
    def __init__(self, path, backend, dtype):
        checkpoint = open_checkpoint(resolve(str(path)))
        adapter = adapter_for(architectures_of(checkpoint.config)[0])
        self.config = model_config(adapter, checkpoint)
        context = OpContext(
            dtype=dtype, device=torch.device("cpu"), invariant=True, head_dim=self.config.head_dim
        )
        self.ops = build_ops(backend(), context)
        self.model = adapter.build(self.config, self.ops, single())
        load_weights(self.model, adapter.weights(self.config), checkpoint, self.ops, dtype)
        options = KVOptions(dtype_bytes=dtype.itemsize)
        self.kv = KVPool(adapter.kv_spec(self.config, options), 8, 16, dtype, torch.device("cpu"))

    def forward(self, count, taps=None):
        place = torch.arange(count)
        batch = DeviceBatch(
            ids=place % 97 + 3,
            positions=place,
            row_of_token=torch.zeros_like(place),
            kv_slots=place,
            attn=self.ops.plan_attention(
                torch.arange(8, dtype=torch.int32)[None],
                torch.tensor([count]),
                torch.tensor([0, count], dtype=torch.int32),
                16,
            ),
            logit_rows=place,
        )
        found = None if taps is None else HiddenTaps(taps, batch, torch.zeros_like(place))
        with torch.inference_mode():
            return self.model.forward(batch, self.kv, found), found


@pytest.fixture(scope="module", params=FAMILIES)
def path(request, tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", [ReferenceBackend, NativeCPUBackend])
@pytest.mark.parametrize("count", [1, 40])
def test_taps_are_the_stream_after_each_layer(path, backend, dtype, count):
    loaded = Loaded(path, backend, dtype)
    layers = len(loaded.model.layers)
    plain, _ = loaded.forward(count)
    for wanted in ((-1, 0, 1, layers - 1), (1,), (-1,), tuple(range(layers))):
        hidden, taps = loaded.forward(count, wanted)
        assert torch.equal(hidden, plain), "tapping changed the result"
        assert sorted(taps.hidden) == sorted(wanted)
        if -1 in wanted:
            embedded = loaded.ops.embedding(taps.batch.ids, loaded.model.embed.weight)
            assert torch.equal(taps.hidden[-1], embedded.to(hidden.dtype))
        if layers - 1 in wanted:
            assert torch.equal(taps.hidden[layers - 1], hidden)
    # The stream after layer i is what a model that ends there gives.
    _, taps = loaded.forward(count, tuple(range(layers)))
    for keep in range(1, layers):
        short = Loaded(path, backend, dtype)
        short.model.layers = short.model.layers[:keep]
        assert torch.equal(short.forward(count)[0], taps.hidden[keep - 1])


def test_without_taps_the_layers_stay_one_call(path, monkeypatch):
    """Zero cost when off: the composite is called as ever, with no argument for taps."""
    loaded = Loaded(path, NativeCPUBackend, torch.float32)
    calls = []
    whole = loaded.ops.decoder_layers

    def seen(*args):
        calls.append(len(args))
        return whole(*args)

    monkeypatch.setattr(loaded.ops, "decoder_layers", seen)
    loaded.forward(3)
    loaded.forward(3, (1,))
    composite = loaded.model._plain is not None
    assert calls == ([5, 6] if composite else [])
