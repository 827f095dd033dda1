"""The command line as people call it, on a tiny checkpoint."""

import io
from types import SimpleNamespace

import pytest
from deepinfer.__main__ import run
from deepinfer.testing.tiny import write_tiny_checkpoint

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A directory with a tiny llama and a chat template."""
    path = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture
def shell(tiny_model, capsys, monkeypatch):
    """``shell("generate", "Hi")`` -> code, out, err; engine commands get the tiny model."""

    def call(*argv, model=True, stdin=""):
        typed = stdin if isinstance(stdin, bytes) else stdin.encode()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(typed), "utf-8"))
        extra = ["-m", str(tiny_model), "--threads", "1"] if model else []
        code = run([*argv, *extra])
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return call
