"""From a configuration to parts, and back to nothing when a part fails."""

import gc
import json
import logging
import threading

import pytest
from deepinfer import LLM, SamplingParams
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


def test_every_argument_of_the_configuration_is_an_argument_of_llm():
    import inspect

    given = set(inspect.signature(LLM.__init__).parameters) - {"self"}
    assert given == set(EngineConfig.model_fields)


def test_stage_times_are_kept_when_a_stage_fails():
    times = StartupTimes()
    with pytest.raises(ValueError, match="x"), times.stage("one"):
        raise ValueError("x")
    times.inside("one", {"total": 1.0, "part": 0.5})
    assert set(times.stages) == {"one", "one / part"}
