"""Drafts inside the package: found by name, refused by name where a build has none."""

import json
import shutil

import pytest
import torch
from deepinfer import LLM, SamplingParams
from deepinfer.errors import ConfigError
from deepinfer_speculative.dspark import shipped
from deepinfer_speculative.dspark.save import shapes_of
from draft_rig import prompts
from dspark_rig import pair
from safetensors import safe_open

SHIPPED = shipped.FOLDER


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


def test_the_demo_draft_is_whole_and_light():
    """What the wheel brings: every tensor of its configuration in bfloat16, under 40 MB."""
    folder = SHIPPED / "dspark-demo"
    raw = json.loads((folder / "config.json").read_text())
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():
                found[name] = tensors.get_tensor(name)
    wanted = shapes_of(raw)
    assert {name: tuple(t.shape) for name, t in found.items()} == {
        name: tuple(shape) for name, shape in wanted.items()
    }
    assert all(t.dtype == torch.bfloat16 and bool(t.isfinite().all()) for t in found.values())
    assert sum(file.stat().st_size for file in folder.iterdir()) < 40e6
    trained = json.loads((folder / "training.json").read_text())
    assert trained["target"] == "demo" and trained["held_out"]["greedy"]["accepted_length"] > 2
