"""What people do to an engine, one thing at a time: the message, and what survives.

Each test breaks something, reads the error (it must name the thing at fault and the bound or the
next step), and then shows that the process, the engine or the next one still works.
"""

import gc
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest
import torch
from deepinfer import LLM, SamplingParams
from deepinfer.errors import (
    ConfigError,
    InvalidRequestError,
    KVCacheTooSmallError,
    ModelFaultError,
    ModelLoadError,
    ModelNotFoundError,
    TokenizerError,
)
from deepinfer.testing.tiny import write_tiny_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="session")
def good_model(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("abuse") / "good", "llama", 0)


@pytest.fixture
def broken(good_model, tmp_path):
    """A copy of the good model, to be broken."""
    return shutil.copytree(good_model, tmp_path / "broken")


@pytest.fixture(scope="session")
def shared_llm(good_model):
    with LLM(str(good_model), num_threads=1) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm):
    """One engine for all tests of requests: it must outlive every one of them."""
    before = shared_llm.generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids
    yield shared_llm
    after = shared_llm.generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids
    assert after == before
    assert shared_llm.get_metrics()["stats"].running == 0
    shared_llm.assembly.engine.check_integrity()


def refuses(path, kind, *words, **options):
    """Loading fails as it should, and leaves no thread and no half-open engine behind."""
    threads = set(threading.enumerate())
    with pytest.raises(kind) as caught:
        LLM(str(path), num_threads=1, **options)
    message = str(caught.value)
    for word in words:
        assert word in message, message
    del caught
    gc.collect()
    assert set(threading.enumerate()) == threads
    return message


# Models that cannot be loaded.


def test_wrong_path(tmp_path, good_model):
    near = good_model.parent / "goof"
    message = refuses(near, ModelNotFoundError, str(near), "demo")
    assert "good" in message  # the near name that does exist
    refuses(tmp_path, ModelNotFoundError, "no config.json")


def test_half_written_safetensors(broken):
    file = broken / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    refuses(broken, ModelLoadError, "model.safetensors")
    file.write_bytes(data[:4])
    refuses(broken, ModelLoadError, "model.safetensors")
    file.write_bytes(data)
    with LLM(str(broken), num_threads=1) as llm:
        assert llm.generate([1], GREEDY)[0].error is None


def test_gguf_cut_short(write_gguf):
    import numpy as np

    path = write_gguf("llama", {".block_count": 1}, {"token_embd.weight": np.ones((8, 8), "f4")})
    data = path.read_bytes()
    for size in (len(data) - 40, 60, 3):
        path.write_bytes(data[:size])
        refuses(path, ModelLoadError, path.name)


def test_unknown_architecture(broken):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(
        json.dumps({**config, "architectures": ["LlamoForCausalLM"]})
    )
    refuses(broken, ModelLoadError, "LlamoForCausalLM", "LlamaForCausalLM")


def test_tokenizer_missing(broken):
    (broken / "tokenizer.json").unlink()
    refuses(broken, TokenizerError, "tokenizer.json", "tokenizer=")


def test_kv_memory_too_small_for_one_request(good_model):
    refuses(
        good_model,
        KVCacheTooSmallError,
        "kv_cache_memory",
        "max_model_len=256",
        kv_cache_memory=20000,
        max_model_len=256,
    )


def test_arguments_that_cannot_be_honoured(good_model):
    refuses(good_model, ConfigError, "max_model_len", "512", max_model_len=100_000)
    refuses(good_model, ConfigError, "gpu_memory_utilization", gpu_memory_utilization=2)
    refuses(good_model, ConfigError, "tensor_parallel_size=2", tensor_parallel_size=2)


# Requests that cannot run.


def test_prompt_longer_than_the_context(llm):
    with pytest.raises(InvalidRequestError, match=r"600 tokens and max_model_len is 512"):
        llm.generate([5] * 600, GREEDY)


def test_empty_prompt(llm):
    for prompt in ("", [], {"prompt": ""}, {"prompt_token_ids": []}):
        if prompt == []:
            assert llm.generate(prompt, GREEDY) == []
            continue
        with pytest.raises(InvalidRequestError, match="prompt is empty"):
            llm.generate(prompt, GREEDY)


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", -1), ("temperature", float("nan")), ("top_p", 2), ("n", 0)]
)
def test_parameters_out_of_range(field, value):
    with pytest.raises(InvalidRequestError, match=f"{field}={value}"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    "fields", [{"stop_token_ids": [320]}, {"logit_bias": {-1: 1}}, {"allowed_token_ids": [9999]}]
)
def test_ids_outside_the_vocabulary(llm, fields):
    name = next(iter(fields))
    with pytest.raises(InvalidRequestError, match=rf"{name}: id .* \(0 … 319\)"):
        llm.generate([1], SamplingParams(**fields))
    good, bad = llm.generate([[1], [1]], [GREEDY, SamplingParams(**fields)])
    assert good.error is None and name in str(bad.error)


def test_structured_output_without_a_plugin(good_model):
    params = SamplingParams(so_args={"schema_type": "regex", "schema": "a+"})
    with LLM(str(good_model), num_threads=1, disable_plugins="structured") as llm:
        with pytest.raises((InvalidRequestError, ConfigError), match=r"structured|grammar"):
            llm.generate([1], params)
        assert llm.generate([1], GREEDY)[0].error is None


# Things that break while it runs.


def test_nan_logits_from_a_broken_checkpoint(broken):
    from safetensors.torch import load_file, save_file

    tensors = load_file(str(broken / "model.safetensors"))
    tensors["model.embed_tokens.weight"][7] = torch.nan  # only texts with this id are lost
    save_file(tensors, str(broken / "model.safetensors"), metadata={"format": "pt"})
    with LLM(str(broken), num_threads=1) as llm:
        calm = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logit_bias={7: -100})
        outputs = llm.generate([[5, 6], [5, 7], [8, 9]], calm)
        assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
        assert isinstance(outputs[1].error, ModelFaultError)
        assert "NaN" in str(outputs[1].error)
        again = llm.generate([5, 6], calm)[0]
        assert again.outputs[0].token_ids == outputs[0].outputs[0].token_ids


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_in_the_middle_of_a_batch(llm):
    timer = threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        while True:
            llm.generate([[i] for i in range(3, 30)], GREEDY.model_copy(update={"max_tokens": 300}))
    timer.join()
    assert llm._driver.unfinished == 0


def test_two_engines_at_once(good_model, llm, tmp_path):
    other_model = write_tiny_checkpoint(tmp_path / "other", "qwen3", 1)
    with LLM(str(other_model), num_threads=1, dtype="bfloat16") as other:
        alone = [one.generate([[1, 2], [3]], GREEDY) for one in (llm, other)]
        results = {}

        def work(name, one):
            results[name] = [one.generate([[1, 2], [3]], GREEDY) for _ in range(3)]

        threads = [threading.Thread(target=work, args=pair) for pair in enumerate((llm, other))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for name in (0, 1):
            expected = [o.outputs[0].token_ids for o in alone[name]]
            for outputs in results[name]:
                assert [o.outputs[0].token_ids for o in outputs] == expected


def test_engine_dropped_without_close(good_model):
    threads = set(threading.enumerate())
    llm = LLM(str(good_model), num_threads=1)
    llm.generate([1], GREEDY)
    assert set(threading.enumerate()) > threads
    del llm
    gc.collect()
    assert set(threading.enumerate()) == threads


def test_a_process_that_never_closes_still_ends(good_model):
    code = (
        "import sys; from deepinfer import LLM, SamplingParams;"
        "llm = LLM(sys.argv[1], num_threads=1);"
        "print(len(llm.generate([1], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(good_model)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_a_life_leaves_the_process_as_it_was(good_model):
    def state():
        return (
            dict(os.environ),
            {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)},
            list(logging.getLogger().handlers),
            list(logging.getLogger("deepinfer").handlers),
            torch.get_default_dtype(),
            torch.is_inference_mode_enabled(),
            set(threading.enumerate()),
        )

    before = state()
    with LLM(str(good_model), dtype="bfloat16", num_threads=1) as llm:
        llm.generate(["Hello", [1, 2]], GREEDY)
    llm.close()
    assert state() == before
