"""``deepinfer make-tiny``: what it writes and what it refuses to."""

from __future__ import annotations

import json


def test_a_checkpoint_is_written(shell, tmp_path):
    more = tmp_path / "more.json"
    more.write_text(json.dumps({"text_config": {"n_routed_experts": 2}}))
    path = tmp_path / "new"
    done = shell(
        "make-tiny",
        "deepseek-v41",
        str(path),
        "--config",
        str(more),
        "--seed",
        "3",
        "--shards",
        "4",
        model=False,
    )
    assert done.code == 0 and "8 files" in done.out
    config = json.loads((path / "config.json").read_text())
    assert config["text_config"]["n_routed_experts"] == 2
    assert len(list(path.glob("model-*-of-00004.safetensors"))) == 4


def test_a_full_folder_is_left_alone(shell, tmp_path):
    (tmp_path / "mine").write_text("x")
    done = shell("make-tiny", "deepseek-v41", str(tmp_path), model=False)
    assert done.code == 1 and "not empty" in done.err
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine"]


def test_large_layers_need_a_yes(shell, tmp_path):
    asked = ("make-tiny", "deepseek-v41", str(tmp_path / "new"), "--layers", "1", "--full-width")
    done = shell(*asked, model=False)
    assert done.code == 1 and "more than 2 GiB" in done.err and "full_width_layer" in done.err
    assert not (tmp_path / "new").exists()


def test_layers_and_full_width_go_together(shell, tmp_path):
    for option in (["--layers", "1"], ["--full-width"]):
        done = shell("make-tiny", "deepseek-v41", str(tmp_path / "n"), *option, model=False)
        assert done.code == 2 and "go together" in done.err


def test_bad_configurations_are_named(shell, tmp_path):
    file = tmp_path / "bad.json"
    for text, said in (
        ("{", "is no JSON"),
        ("[]", "JSON object"),
        ('{"text_config": {"hidden_size": 0}}', "hidden_size"),
    ):
        file.write_text(text)
        done = shell(
            "make-tiny", "deepseek-v41", str(tmp_path / "n"), "--config", str(file), model=False
        )
        assert done.code in (1, 2) and said in done.err
        assert not (tmp_path / "n").exists()
