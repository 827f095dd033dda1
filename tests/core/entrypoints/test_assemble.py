"""From a configuration to parts, and back to nothing when a part fails."""

import gc
import json
import logging
import threading

import pytest
from deepinfer import LLM, AsyncLLM, SamplingParams
from deepinfer.config import EngineConfig
from deepinfer.entrypoints.assemble import StartupTimes, assemble
from deepinfer.testing.tiny import write_tiny_checkpoint


@pytest.fixture
def model(tmp_path):
    return write_tiny_checkpoint(tmp_path / "model")


def config(model, **arguments):
    return EngineConfig.make(model=str(model), num_threads=1, **arguments)


def generation(model, **fields):
    (model / "generation_config.json").write_text(json.dumps(fields))


def test_parts_and_times(model):
    assembly = assemble(config(model))
    try:
        assert assembly.facts.architecture == "LlamaForCausalLM"
        assert {"import torch", "tokenizer", "weights and KV"} <= set(assembly.timings)
        assert "    weights" in assembly.times.tree()
        assert assembly.resolution.get("executor").name == "local"
    finally:
        assembly.engine.close()


def test_what_was_opened_is_closed_when_a_later_part_fails(model, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no brain today")

    threads = set(threading.enumerate())
    monkeypatch.setattr("deepinfer.engine.engine.Engine", broken)
    with pytest.raises(RuntimeError, match="no brain today"):
        assemble(config(model))
    gc.collect()
    assert set(threading.enumerate()) == threads


def test_sampling_defaults_come_from_the_checkpoint(model):
    generation(model, temperature=0.5, top_p=0.9, top_k=7, max_new_tokens=33, do_sample=True)
    with LLM(str(model), num_threads=1) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(
            temperature=0.5, top_p=0.9, top_k=7, max_tokens=33
        )
        assert llm.generate([1, 2], None)[0].error is None
    with LLM(str(model), num_threads=1, generation_config="none") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


def test_defaults_that_make_no_sense_are_left_out_with_a_warning(model, caplog):
    generation(model, temperature=-3)
    with caplog.at_level(logging.WARNING, "deepinfer"), LLM(str(model), num_threads=1) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
    assert "generation_config.json is left out" in caplog.text


def test_every_end_token_of_the_checkpoint_ends_a_text(model):
    generation(model, eos_token_id=[2, 9, 9999])
    assembly = assemble(config(model))
    prepared = assembly.preparer.prepare("r", [1], SamplingParams())
    assembly.engine.close()
    assert prepared.requests[0].eos_ids >= {2, 9}
    assert 9999 not in prepared.requests[0].eos_ids


def test_unknown_variables_are_reported_with_the_nearest_name(model, monkeypatch, caplog):
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANTS", "1")
    with caplog.at_level(logging.WARNING, "deepinfer"):
        assemble(config(model)).engine.close()
    assert "Did you mean DEEPINFER_BATCH_INVARIANT?" in caplog.text


def test_the_variable_makes_it_invariant_and_the_argument_wins(model, monkeypatch):
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", "1")
    with LLM(str(model), num_threads=1) as llm:
        assert llm.assembly.config.batch_invariant is True
    with LLM(str(model), num_threads=1, batch_invariant=False) as llm:
        assert llm.assembly.config.batch_invariant is False


@pytest.mark.parametrize("door", [LLM, AsyncLLM])
def test_every_argument_of_the_configuration_is_an_argument_of_both_doors(door):
    import inspect

    arguments = inspect.signature(door).parameters
    assert list(arguments) == list(EngineConfig.model_fields)
    ours = {n: f.default for n, f in EngineConfig.model_fields.items() if not f.is_required()}
    theirs = {n: arguments[n].default for n in ours}
    # None leaves it to the environment; a fresh mapping each time
    assert {**theirs, "batch_invariant": False, "plugin_config": None} == {
        **ours,
        "plugin_config": None,
    }


@pytest.mark.parametrize("door", [LLM, AsyncLLM])
def test_both_doors_hand_every_argument_on(door, monkeypatch):
    """A value that is not the default, for every field, arrives in the configuration."""
    other = {
        "dtype": "bfloat16", "device": "cpu", "quantization": "int8", "kv_cache_dtype": "packed",
        "generation_config": "none", "gpu_memory_utilization": 0.5, "disable_plugins": ("x",),
        "plugin_config": {"x": {"y": 1}}, "max_model_len": 7, "max_num_seqs": 8,
        "max_num_batched_tokens": 9, "page_size": 32, "kv_cache_memory": 10, "seed": 11,
        "num_threads": 12, "yoco_prefill_truncation_mode": "mask", "yoco_prefill_keep_tokens": 13,
        "dequantize_weights": True, "load_format": "dummy",
        "grammar_acceleration": "cpu",
    }  # fmt: skip
    for name, field in EngineConfig.model_fields.items():
        if name.endswith("parallel_size"):
            other[name] = 1  # nothing else is built
        elif isinstance(field.default, bool):
            other[name] = not field.default
        else:
            other.setdefault(name, f"a {name}")
    monkeypatch.setattr("deepinfer.entrypoints.front.assemble", _Stop)
    with pytest.raises(_Stop) as caught:
        door(**other)
    assert caught.value.args[0] == EngineConfig(**other)


class _Stop(Exception):
    """In place of ``assemble``: shows what it was given."""

    def __init__(self, config):
        super().__init__(config)
        raise self


def test_stage_times_are_kept_when_a_stage_fails():
    times = StartupTimes()
    with pytest.raises(ValueError, match="x"), times.stage("one"):
        raise ValueError("x")
    times.inside("one", {"total": 1.0, "part": 0.5})
    assert set(times.stages) == {"one", "one / part"}
