"""The frame around the commands: help, errors, exit codes, speed."""

import json
import subprocess
import sys

import pytest
from deepinfer import __version__

COMMANDS = (
    *("generate", "chat", "run-batch", "bench", "verify"),
    *("plugins", "doctor", "config", "make-tiny"),
)


def python(*code):
    return subprocess.run(
        [sys.executable, *code], capture_output=True, text=True, check=False, timeout=60
    )


def test_help_names_every_command(shell):
    done = shell("--help", model=False)
    assert done.code == 0
    for name in COMMANDS:
        assert name in done.out


def test_every_command_has_help(shell):
    for name in COMMANDS:
        done = shell(name, "--help", model=False)
        assert done.code == 0 and "Usage" in done.out


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from deepinfer.__main__ import run; run(['--help']);"
        "print([m for m in ('torch', 'numpy', 'pydantic') if m in sys.modules])"
    )
    done = python("-c", code)
    assert done.stdout.rstrip().endswith("[]"), done.stderr


def test_version(shell):
    assert __version__ in shell("--version", model=False).out


def test_unknown_command_and_option_end_with_2(shell):
    assert shell("nonsense", model=False).code == 2
    assert shell("generate", "--nonsense", model=False).code == 2


def test_an_error_is_a_sentence_and_a_next_step(shell):
    done = shell("generate", "Hi", "-m", "/no/such/model", model=False)
    assert done.code == 2 and done.out == ""
    assert done.err.startswith("error: ") and "/no/such/model" in done.err
    assert "Traceback" not in done.err and len(done.err.splitlines()) >= 2


def test_debug_shows_the_traceback(shell):
    done = shell("--debug", "generate", "Hi", "-m", "/no/such/model", model=False)
    assert "Traceback" in done.err and done.code == 2


def test_sizes_that_are_not_built_are_refused(shell):
    done = shell("generate", "Hi", "--ep", "8")
    assert done.code == 2 and "expert_parallel_size=8" in done.err


@pytest.mark.parametrize("option", ["--backend", "--scheduling-policy", "--no-plugin"])
def test_names_that_no_plugin_has_are_wrong_options(shell, option):
    done = shell("generate", "Hi", option, "nonsense")
    assert done.code == 2 and "nonsense" in done.err


def test_config_show_says_where_values_come_from(shell, monkeypatch):
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", "1")
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANCE", "1")
    done = shell("config", "show", "--json", "--dtype", "bfloat16")
    rows = {row["name"]: row for row in json.loads(done.out)}
    assert rows["dtype"] == {"name": "dtype", "value": "bfloat16", "source": "option"}
    assert rows["batch_invariant"]["source"] == "environment"
    assert rows["seed"]["source"] == "default"
    assert rows["DEEPINFER_BATCH_INVARIANT"]["value"] is True
    assert "Did you mean DEEPINFER_BATCH_INVARIANT" in rows[""]["value"]


def test_config_memory_counts_from_the_header(shell, tiny_model):
    done = shell(
        "config", "memory", str(tiny_model), "--json", "--kv-cache-memory", "1MiB", model=False
    )
    facts = json.loads(done.out)
    assert facts["kv_bytes_per_token"] == 2 * 2 * 16 * 4 * 3
    assert facts["pages"] == (1 << 20) // (facts["kv_bytes_per_token"] * 16)
    assert facts["image_bytes_per_request"] == 0


def test_config_memory_counts_the_largest_image(shell, tmp_path):
    """Of a model that sees, at the rows that its own plan gives the largest picture."""
    from deepinfer.models.deepseek_v41.images import VisionConfig, plan_image

    path = tmp_path / "m"
    assert shell("make-tiny", "deepseek-v41", str(path), model=False).code == 0
    raw = json.loads((path / "config.json").read_text())
    done = shell("config", "memory", str(path), "--json", model=False)
    vision, found = VisionConfig.read(raw), json.loads(done.out)["image_bytes_per_request"]
    assert vision is not None, "the tiny model sees"
    row = raw["text_config"]["hidden_size"] * 4
    assert found == vision.max_tokens * row
    sizes = [(w, h) for w in (1, 400, 999, 4000) for h in (1, 400, 1000, 4000)]
    assert 0.9 * found <= max(plan_image(w, h, vision).tokens for w, h in sizes) * row <= found


def test_the_example_says_what_is_not_built():
    from pathlib import Path

    script = Path(__file__).parents[3] / "examples" / "offline_inference.py"
    done = python(str(script), "--ep", "8")
    assert done.returncode == 1
    assert "error: expert_parallel_size=8: only 1 works" in done.stderr


def test_the_example_runs(tiny_model):
    from pathlib import Path

    script = Path(__file__).parents[3] / "examples" / "offline_inference.py"
    done = python(str(script), "--model", str(tiny_model), "--max-tokens", "4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("->") == 4
