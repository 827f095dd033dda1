"""Drafts inside the package: found by name, refused by name where a build has none."""

import shutil

import pytest
from deepinfer import LLM, SamplingParams
from deepinfer.errors import ConfigError
from deepinfer_speculative.dspark import shipped
from dspark_rig import pair, prompts


def opened(target, speculative):
    return LLM(str(target), max_model_len=64, num_threads=1, speculative=speculative)


@pytest.fixture
def here(tmp_path, monkeypatch):
    target, draft = pair(tmp_path, "llama")
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "models")
    return target, draft, tmp_path / "models" / "dspark-demo"


@pytest.mark.parametrize(
    "said", ["dspark-demo,mode=static", {"model": "dspark-demo", "mode": "static"}]
)
def test_a_shipped_draft_drafts(here, said):
    target, draft, place = here
    shutil.copytree(draft, place)
    asked, params = prompts(2), SamplingParams(max_tokens=8, temperature=0)
    with LLM(str(target), max_model_len=64, num_threads=1) as llm:
        right = [out.outputs[0].token_ids for out in llm.generate(asked, params)]
    with opened(target, said) as llm:
        outs = llm.generate(asked, params)
    assert [out.outputs[0].token_ids for out in outs] == right
    assert sum(out.metrics.drafted for out in outs) > 0


def test_a_build_without_it_says_so(here):
    with pytest.raises(ConfigError, match=r"'dspark-demo' is not part of this build"):
        opened(here[0], "dspark-demo")


def test_it_takes_no_other_model(here):
    with pytest.raises(ConfigError, match=r"takes no model \(model='elsewhere'\)"):
        opened(here[0], {"method": "dspark-demo", "model": "elsewhere"})
