"""What ``model=`` may be, what is refused, and what the refusals say."""

from __future__ import annotations

import json
import sys

import pytest
from deepinfer.errors import ModelNotFoundError
from deepinfer.models import demo
from deepinfer.models.source import ModelSource, resolve

VARIABLE = "DEEPINFER_HF_MODEL_DIR"


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for huggingface_hub; ``calls`` are what was asked of it."""
    hub = pytest.importorskip("huggingface_hub")
    calls = []

    def fake(repo_id, *, revision=None, allow_patterns, ignore_patterns):
        calls.append((repo_id, revision, allow_patterns))
        if fake.error is not None:
            raise fake.error
        return str(fake.path)

    fake.error, fake.path, fake.calls = ConnectionError("no route"), None, calls
    monkeypatch.setattr(hub, "snapshot_download", fake)
    return fake


def model_directory(path):
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_a_directory(tmp_path):
    path = model_directory(tmp_path / "tiny")
    assert resolve(str(path)) == ModelSource("hf", path, path, "tiny")


def test_a_gguf_file_and_a_directory_with_one(tmp_path):
    file = tmp_path / "folder" / "tiny.gguf"
    file.parent.mkdir()
    file.write_bytes(b"GGUF")
    assert resolve(str(file)) == ModelSource("gguf", file, file, "tiny.gguf")
    assert resolve(str(file.parent)).path == file
    (file.parent / "config.json").write_text("{}")
    assert resolve(str(file.parent)).kind == "gguf"
    (file.parent / "model.safetensors").write_bytes(b"")
    assert resolve(str(file.parent)).kind == "hf"
    (file.parent / "model.safetensors").unlink()
    (file.parent / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFoundError, match=r"2 GGUF files: other\.gguf, tiny\.gguf"):
        resolve(str(file.parent))


def test_a_tokenizer_of_its_own(tmp_path):
    path = model_directory(tmp_path / "tiny")
    other = model_directory(tmp_path / "other")
    assert resolve(str(path), tokenizer=str(other)).tokenizer_path == other
    (other / "tokenizer.json").write_text("{}")
    file = str(other / "tokenizer.json")
    assert resolve(str(path), tokenizer=file).tokenizer_path == other
    with pytest.raises(ModelNotFoundError) as caught:
        resolve(str(path), tokenizer=str(tmp_path / "nope"))
    assert caught.value.setting == "tokenizer"


@pytest.mark.parametrize(
    "wrong",
    ["/no/such/place", "./nope", "../nope", "~/nope-nope", "a/b/c", "nope.gguf", "x/y.gguf"],
)
def test_a_wrong_path_is_never_a_hub_id(wrong, hub):
    with pytest.raises(ModelNotFoundError, match="No file or directory"):
        resolve(wrong)
    assert hub.calls == []


def test_near_names_are_offered(tmp_path):
    model_directory(tmp_path / "SmolLM2-135M")
    with pytest.raises(ModelNotFoundError, match=r"Near names in .*: SmolLM2-135M\."):
        resolve(str(tmp_path / "SmolLM-135M"))
    with pytest.raises(ModelNotFoundError, match=r"parent directory .* does not exist either"):
        resolve(str(tmp_path / "nope" / "SmolLM2-135M"))


def test_a_directory_without_config_says_what_it_holds(tmp_path):
    (tmp_path / "readme.txt").write_text("")
    with pytest.raises(ModelNotFoundError, match=r"no config\.json \(it holds readme\.txt\)"):
        resolve(str(tmp_path))
    (tmp_path / "readme.txt").unlink()
    with pytest.raises(ModelNotFoundError, match=r"no config\.json \(it is empty\)"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("wrong", ["", "  ", "two words", "org//name", "ümlaut"])
def test_what_is_neither_path_nor_hub_id(wrong, hub):
    with pytest.raises(ModelNotFoundError):
        resolve(wrong)
    assert hub.calls == []


def test_another_file_is_no_model(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match="not a GGUF file"):
        resolve(str(tmp_path / "model.bin"))


def test_a_hub_id_is_fetched(tmp_path, hub):
    hub.error, hub.path = None, model_directory(tmp_path / "snapshot")
    source = resolve("org/name", revision="v1")
    assert source == ModelSource("hf", hub.path, hub.path, "org/name")
    repo_id, revision, patterns = hub.calls[0]
    assert (repo_id, revision) == ("org/name", "v1") and "*.safetensors" in patterns
    assert resolve(str(hub.path), tokenizer="org/tok").tokenizer_path == hub.path
    assert "*.safetensors" not in hub.calls[1][2]


def test_an_unreachable_hub_names_the_id_the_cause_and_the_ways_out(hub, tmp_path, monkeypatch):
    with pytest.raises(ModelNotFoundError) as caught:
        resolve("org/name", revision="v1")
    text = str(caught.value)
    for part in ("'org/name'", "'v1'", "ConnectionError: no route", VARIABLE, "demo", "path"):
        assert part in text
    model_directory(tmp_path / "org" / "nane")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match="Near names in 'org': nane"):
        resolve("org/name")


def test_a_missing_hub_client_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelNotFoundError, match="huggingface_hub is not installed"):
        resolve("org/name")


@pytest.mark.parametrize("layout", ["org/name", "name", "."])
def test_the_local_copy_replaces_the_hub(tmp_path, monkeypatch, hub, layout):
    root = tmp_path / "copies"
    if layout == ".":
        model_directory(root)
    else:
        model_directory(root / layout)
    monkeypatch.setenv(VARIABLE, str(root))
    source = resolve("org/name")
    assert source.path == root / layout and source.name == "org/name"
    assert hub.calls == []


def test_a_local_copy_that_does_not_hold_the_model(tmp_path, monkeypatch, hub):
    model_directory(tmp_path / "other-name")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="no copy of 'org/name'") as caught:
        resolve("org/name")
    assert caught.value.setting == VARIABLE
    assert hub.calls == []


def test_paths_ignore_the_local_copy(tmp_path, monkeypatch):
    path = model_directory(tmp_path / "tiny")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nowhere"))
    assert resolve(str(path)).path == path


def test_demo_is_the_demo_model(tmp_path, monkeypatch):
    file = tmp_path / "demo.gguf"
    file.write_bytes(b"")
    monkeypatch.setattr(demo, "fetch", lambda: file)
    assert resolve("demo") == ModelSource("gguf", file, file, demo.NAME)


def test_finding_a_model_loads_neither_torch_nor_numpy(tmp_path):
    import subprocess

    model_directory(tmp_path / "tiny")
    code = (
        "import json, sys; from deepinfer.models.source import resolve; resolve(sys.argv[1]);"
        "print(json.dumps(sorted({'torch', 'numpy', 'huggingface_hub'} & set(sys.modules))))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "tiny")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
