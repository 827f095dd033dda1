"""``load_format="dummy"``: a real engine from a config.json alone."""

import json

import pytest
import torch
from deepinfer import LLM, SamplingParams
from deepinfer.api.backend import OpContext
from deepinfer.errors import InvalidRequestError, ModelLoadError, TokenizerError, UnsupportedError
from deepinfer.models.checkpoint import open_checkpoint
from deepinfer.models.dummy import SPREAD, make_weights
from deepinfer.models.registry import adapter_for, architectures_of, model_config
from deepinfer.models.source import resolve
from deepinfer.models.weights import LoadPlan, load_weights, weight_bytes
from deepinfer.ops.backend import ReferenceBackend, build_ops
from deepinfer.ops.lowbit import BlockScaled
from deepinfer.parallel import single
from deepinfer.testing.tiny import FAMILIES, write_tiny_checkpoint
from deepinfer.testing.tiny_v41 import write_tiny_v41

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
CONTEXT = OpContext(dtype=torch.bfloat16, device=torch.device("cpu"))


class Store:
    def __init__(self):
        self.values = {}

    def load(self, parameter, value):
        assert parameter not in self.values
        self.values[parameter] = value


def described(folder):
    """(adapter, its config) of a model directory, dummy or not."""
    checkpoint = open_checkpoint(resolve(str(folder)), "dummy")
    adapter = adapter_for(architectures_of(checkpoint.config)[0])
    return adapter, model_config(adapter, checkpoint)


def filled(folder, **plan):
    adapter, config = described(folder)
    store, ops = Store(), build_ops(ReferenceBackend(), CONTEXT)
    size = make_weights(store, adapter.weights(config), ops, torch.bfloat16, LoadPlan(**plan))
    return store.values, size


def alone(folder, tmp_path):
    """A copy of nothing but config.json."""
    to = tmp_path / "alone"
    to.mkdir()
    (to / "config.json").write_text((folder / "config.json").read_text("utf-8"), "utf-8")
    return to


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_gets_the_parameters_that_loading_gives_it(tmp_path, family):
    folder = write_tiny_checkpoint(tmp_path / "real", family)
    made, size = filled(alone(folder, tmp_path))
    real, checkpoint = Store(), open_checkpoint(resolve(str(folder)))
    adapter, config = described(folder)
    ops = build_ops(ReferenceBackend(), CONTEXT)
    required = [rule for rule in adapter.weights(config) if not rule.optional]
    read = load_weights(real, required, checkpoint, ops, torch.bfloat16)
    shapes = [{n: (v.shape, v.dtype) for n, v in values.items()} for values in (made, real.values)]
    assert shapes[0] == shapes[1] and size == read


@pytest.mark.parametrize("dequantize", [True, False])
def test_low_bit_weights_have_the_bytes_of_real_ones_and_finite_values(tmp_path, dequantize):
    folder = write_tiny_v41(tmp_path / "v41")
    adapter, config = described(folder)
    rules = [r for r in adapter.weights(config) if not r.optional and r.stored != "table"]
    store, ops = Store(), build_ops(ReferenceBackend(), CONTEXT)
    plan = LoadPlan(dequantize=dequantize, parallel=single())
    size = make_weights(store, rules, ops, torch.bfloat16, plan)
    assert size == weight_bytes(rules, torch.bfloat16, dequantize, single())
    low = {n: v for n, v in store.values.items() if isinstance(v, BlockScaled)}
    assert bool(low) == (not dequantize)
    assert {value.kind for value in low.values()} == (set() if dequantize else {"fp8", "fp4"})
    for rule in rules:
        value = store.values[rule.parameter]
        value = value.dequantize() if isinstance(value, BlockScaled) else value.float()
        assert value.isfinite().all(), rule.parameter
        if value.numel() > 2000 and "rms_norm" not in rule.uses:
            assert SPREAD / 2 < value.std() < SPREAD * 2, rule.parameter


def test_a_table_that_stays_in_the_file_is_refused_by_name(tmp_path):
    folder = write_tiny_v41(tmp_path / "v41")
    with pytest.raises(UnsupportedError, match=r"load_format='dummy'.*engram"):
        filled(folder)


def test_numbers_are_the_same_at_every_start_and_nobody_elses(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "real")
    torch.manual_seed(1)
    before = torch.get_rng_state()
    (one, _), (two, _) = filled(folder), filled(folder)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], two[name]) for name in one)
    queries = [v for n, v in one.items() if n.endswith("qkv.weight")]
    assert not torch.equal(queries[0], queries[1])


def test_an_engine_runs_from_config_json_alone(tmp_path):
    folder = alone(write_tiny_checkpoint(tmp_path / "real"), tmp_path)
    with pytest.raises(ModelLoadError, match="safetensors"):
        LLM(str(folder), num_threads=1)
    with LLM(str(folder), num_threads=1, load_format="dummy") as llm:
        ids = llm.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids
        assert len(ids) == 4
        with pytest.raises(InvalidRequestError, match="token ids"):
            llm.generate("text", GREEDY)
        with pytest.raises(TokenizerError, match="no tokenizer"):
            llm.get_tokenizer()
    with LLM(str(folder), num_threads=1, load_format="dummy") as llm:
        assert llm.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids == ids


def test_a_tokenizer_that_is_there_is_used_and_real_weights_are_not_read(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "real")
    for file in folder.glob("*.safetensors"):
        file.write_bytes(b"damaged")
    with LLM(str(folder), num_threads=1, load_format="dummy") as llm:
        assert llm.get_tokenizer().vocab_size > 0
        assert llm.generate("text", GREEDY)[0].error is None


def test_kv_of_dummy_weights_is_nobody_elses(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "real")
    source = resolve(str(folder))
    dummy, real = open_checkpoint(source, "dummy"), open_checkpoint(source)
    assert dummy.fingerprint() != real.fingerprint()
    raw = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**raw, "rope_theta": 7.0}))
    assert open_checkpoint(source, "dummy").fingerprint() != dummy.fingerprint()


def test_a_gguf_files_header_is_a_description_too(demo_gguf):
    checkpoint = open_checkpoint(resolve(str(demo_gguf)), "dummy")
    assert checkpoint.tied and checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert checkpoint.names() == ()
