"""From arguments and variables to a speculator: what is meant, what is refused, by which name."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
from deepinfer import LLM, SamplingParams
from deepinfer.cli.config import memory_facts
from deepinfer.config import EngineConfig
from deepinfer.discovery import import_path
from deepinfer.errors import (
    ConfigError,
    DeepInferError,
    EngineDeadError,
    ModelLoadError,
    UnsupportedError,
)
from deepinfer.testing.tiny import write_tiny_checkpoint

ON, NEXTN = "DEEPINFER_ENABLE_MTP_VARLEN", "DEEPINFER_USE_NEXTN_DECODE"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    monkeypatch.delenv(ON, raising=False)
    monkeypatch.delenv(NEXTN, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def opened(tiny, **more):
    return LLM(tiny, num_threads=1, max_num_seqs=4, kv_cache_memory="16MiB", **more)


def asked(speculative):
    return EngineConfig.make(model="x", speculative=speculative).speculation()


@pytest.mark.parametrize(
    "given",
    [
        {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2},
        '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}',
        "method=ngram,num_speculative_tokens=3,prompt_lookup_max=2",
        "ngram,num_speculative_tokens=3,prompt_lookup_max=2",
        {"method": "ngram", "num_speculative_tokens": 3, "options": {"prompt_lookup_max": 2}},
    ],
)
def test_ways_to_say_the_same(given):
    found = asked(given)
    assert (found.method, found.num_speculative_tokens) == ("ngram", 3)
    assert found.options == {"prompt_lookup_max": 2} and found.mode == "adaptive"


def test_names_paths_and_off():
    assert asked("ngram").method == "ngram"
    assert asked("some/draft").model == "some/draft"
    both = asked("mode=static,some/draft")
    assert (both.method, both.model, both.mode) == (None, "some/draft", "static")
    assert asked("off") is None and asked(None) is None
    assert asked({"num_speculative_tokens": 0}) is None


@pytest.mark.parametrize(
    "given, said",
    [
        ({"mode": "fast"}, "speculative.mode='fast'"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens=-1"),
        ({"acceptance": "maybe"}, "acceptance='maybe'"),
        ("{broken", "JSON"),
        ("=5", "no key"),
        ("ngram,,mode=static", "no key"),
        ("ngram,method=dspark", "every name once"),
        ("mode=cap,mode=static", "every name once"),
        (7, "speculative=7"),
    ],
)
def test_odd_values_are_refused_by_name(given, said):
    with pytest.raises(ConfigError, match=said):
        asked(given)


def test_the_draft_length(monkeypatch):
    config = asked("ngram")
    assert [config.draft_length(t) for t in (None, 3, 7)] == [5, 3, 5]
    monkeypatch.setenv(NEXTN, "7")
    assert config.draft_length(7) == 7
    with pytest.raises(ConfigError, match=r"DEEPINFER_USE_NEXTN_DECODE=7: .* 5"):
        config.draft_length(5)
    assert asked({"num_speculative_tokens": 2}).draft_length(5) == 2, "an argument wins"
    monkeypatch.setenv(NEXTN, "0")
    assert asked("ngram") is None
    for wrong in ("-1", "many", "1.5", "65"):
        monkeypatch.setenv(NEXTN, wrong)
        with pytest.raises(ConfigError, match=NEXTN):
            asked("ngram")


def test_the_switch_asks_for_the_carried_draft(monkeypatch, tiny):
    monkeypatch.setenv(ON, "1")
    with pytest.raises(ConfigError, match=f"{ON}=1 .* carries none"):
        opened(tiny)
    with opened(tiny, speculative="off") as llm:
        assert llm.assembly.facts.draft_len == 0, "an argument wins"
    monkeypatch.setenv(NEXTN, "0")
    with opened(tiny) as llm:
        assert llm.assembly.facts.draft_len == 0
    monkeypatch.setenv(ON, "0")
    with opened(tiny, speculative="ngram,profile_seconds=0,num_speculative_tokens=2") as llm:
        assert llm.assembly.facts.draft_len == 2


@pytest.mark.parametrize(
    "given, said",
    [
        ({"method": "ngrm"}, "no method 'ngrm'. Did you mean 'ngram'"),
        ({"method": "ngram", "prompt_lookup_mx": 2}, "no option 'prompt_lookup_mx' .*_max"),
        ({"method": "ngram", "num_speculativ_tokens": 2}, "'num_speculativ_tokens' .*tokens'"),
        ({"method": "ngram", "model": "a/b"}, "takes no model"),
        ({}, "carries none"),
        ({"Method": "ngram"}, "carries none. Did you mean 'method' by 'Method'"),
        ("mtp", "DeepSeek-V4.1 checkpoint carries, and this one carries none"),
        ("/no/draft", "Give the path of a draft checkpoint's folder"),
    ],
)
def test_what_is_not_there_is_refused_by_name(tiny, given, said):
    with pytest.raises(DeepInferError, match=said):
        opened(tiny, speculative=given)


def test_without_a_plugin_it_says_what_to_install(tiny):
    with pytest.raises(UnsupportedError, match="no plugin here brings any") as caught:
        opened(tiny, speculative="ngram", disable_plugins="speculative")
    assert "deepinfer-speculative" in str(caught.value)


def test_ratio_and_batch_invariance_exclude_each_other(tiny):
    with pytest.raises(UnsupportedError, match="acceptance='ratio'"):
        opened(tiny, speculative={"method": "ngram", "acceptance": "ratio"}, batch_invariant=True)


def test_a_draft_checkpoint_of_nobody_is_refused(tiny, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["OddDraftModel"]}))
    with pytest.raises(ConfigError, match="OddDraftModel"):
        opened(tiny, speculative=str(tmp_path))


def test_what_is_wrong_in_a_drafts_checkpoint_is_said_of_the_draft(tiny, tmp_path):
    raw = {**json.loads(Path(tiny, "config.json").read_text()), "block_size": 0}
    for architecture in ("LlamaDSparkModel", "LlamaForCausalLMEagle3"):
        written = json.dumps({**raw, "architectures": [architecture], "num_hidden_layers": 1})
        (tmp_path / "config.json").write_text(written)
        (tmp_path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
        with pytest.raises(ModelLoadError, match=f"^Draft {tmp_path}: ") as why:
            opened(tiny, speculative=str(tmp_path))
        assert str(why.value).count("Draft ") == 1


def test_memory_is_told_for_a_draft_too(tiny):
    how = {"dtype": "float32", "kv_cache_memory": "16MiB"}
    plain, drafted = memory_facts(tiny, **how), memory_facts(tiny, **how, speculative="ngram")
    assert plain == drafted, "ngram has neither weights nor KV"


def test_a_speculating_engine_ends_with_the_same_text(tiny):
    prompts = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [9, 9, 9, 9]]
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=30, ignore_eos=True, n=2)
    texts = []
    for given in (None, "ngram,profile_seconds=1", "ngram,mode=static", "ngram,mode=cap"):
        with opened(tiny, speculative=given, batch_invariant=True) as llm:
            outputs = llm.generate(prompts, params)
            texts.append([o.token_ids for out in outputs for o in out.outputs])
            drafted = sum(out.metrics.drafted for out in outputs)
            if given is None or "mode" in given:  # else it goes by what pays here
                assert (drafted > 0) == (given is not None)
    assert texts[1:] == texts[:1] * 3


def test_off_is_as_if_the_plugin_were_not_there(tiny):
    """No drafter, no taps, no other KV, and the same steps."""
    with opened(tiny) as off, opened(tiny, disable_plugins="speculative") as without:
        one, two = off.assembly.facts, without.assembly.facts
        assert (one.kv, one.num_pages, one.draft_len) == (two.kv, two.num_pages, 0)
        for llm in (off, without):
            runner = llm.assembly.executor._host.runner
            assert type(runner._rig.drafter).__name__ == "NullDrafter"
            assert llm.assembly.engine.scheduler.planner is None
            assert runner.slots.width == llm.assembly.facts.max_model_len + 1


@pytest.mark.parametrize(
    "path, call",
    [
        *(("deepinfer_speculative.ngram:NgramDrafter", c) for c in ("allot", "commit", "propose")),
        *(("deepinfer_speculative.planner:Planner", c) for c in ("choose", "observe")),
    ],
)
def test_a_plugin_that_raises_within_a_step_is_named(tiny, monkeypatch, path, call):
    def broken(*args):
        raise KeyError("lost")

    with opened(tiny, speculative="ngram,mode=static") as llm:
        monkeypatch.setattr(import_path(path), call, broken)
        with pytest.raises(EngineDeadError) as told:
            llm.generate([[5, 6, 5, 6, 5]], SamplingParams(max_tokens=9, ignore_eos=True))
    said = f"speculator 'ngram' of deepinfer-speculative {version('deepinfer-speculative')} raised"
    assert said in str(told.value) and f"KeyError('lost') in {call}" in str(told.value)
