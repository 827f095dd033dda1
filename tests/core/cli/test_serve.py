"""``deepinfer serve`` and ``python -m deepinfer.server`` as programs: signals, keys, endings."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

LIMITS = ("--port", "0", "--threads", "1", "--max-batch-size", "4")


def test_the_page_tells_every_option_of_the_server():
    from pathlib import Path

    from deepinfer.cli.options import _ENGINE
    from deepinfer.cli.serve import serve

    page = (Path(__file__).parents[3] / "docs" / "server.md").read_text("utf-8")
    engine = {part for names, _ in _ENGINE for name in names for part in name.split("/")}
    told = [{*o.opts, *o.secondary_opts} for o in serve.params if not engine & {*o.opts}]
    assert len(told) > 10
    assert [names for names in told if not any(f"`{n}" in page for n in names)] == []


@pytest.fixture
def program(tiny_model):
    """``program(*options)`` -> process and address, once the model is served."""
    running = []

    def start(*options, module=("deepinfer", "serve"), env=()):
        name, *command = module
        argv = [sys.executable, "-m", name, *command, "-m", str(tiny_model), *LIMITS, *options]
        process = subprocess.Popen(
            argv, stderr=subprocess.PIPE, text=True, env={**os.environ, **dict(env)}
        )
        running.append(process)
        said = []
        for line in process.stderr:
            said.append(line)
            found = re.search(r"is served at (http://\S+)", line)
            if found:
                return process, found[1]
        raise AssertionError("".join(said))

    yield start
    for process in running:
        process.kill()
        process.stderr.close()
        process.wait(10)


def ask(url, body=None, headers=()):
    data = None if body is None else json.dumps(body).encode()
    head = {"content-type": "application/json", **dict(headers)}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, head), timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as why:
        with why:
            return why.code, why.read().decode()


def test_sigterm_drains_and_ends_with_0(program):
    process, url = program(module=("deepinfer.server",))
    body = {"prompt": "Hi", "max_tokens": 200, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/generate", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as stream:
        stream.readline()
        process.send_signal(signal.SIGTERM)
        rest = stream.read().decode()
    assert '"finish_reason": "length"' in rest
    assert process.wait(20) == 0
    log = [json.loads(line) for line in process.stderr if line.startswith("{")]
    assert any(line["path"] == "/v1/generate" and line["status"] == 200 for line in log)


def test_the_drain_ends_at_its_deadline(program):
    process, url = program("--drain-seconds", "0.1", "--no-access-log")
    body = {"prompt": "Hi", "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/generate", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as stream:
        stream.readline()
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        stream.read()
    assert process.wait(20) == 0
    assert time.monotonic() - began < 10


def test_keys_from_a_file_and_a_variable(program, tmp_path):
    (tmp_path / "keys").write_text("sk-from-file-1\n")
    process, url = program(
        *("--api-key-file", str(tmp_path / "keys"), "--api-key-env", "MY_KEYS"),
        env={"MY_KEYS": "sk-from-env-2"},
    )
    body = {"prompt": "Hi", "max_tokens": 2}
    assert ask(f"{url}/v1/generate", body)[0] == 401
    for key in ("sk-from-file-1", "sk-from-env-2"):
        answer = ask(f"{url}/v1/generate", body, {"authorization": f"Bearer {key}"})
        assert answer[0] == 200, answer
    assert ask(f"{url}/health")[0] == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


@pytest.mark.parametrize(
    "options, word",
    [
        (("--api-key-file", "/nowhere/keys"), "/nowhere/keys"),
        (("--api-key-env", "DEEPINFER_NOBODY_SET_THIS"), "api_key_env"),
        (("--max-queue", "0"), "max_queue"),
        (("--host", "203.0.113.1"), "203.0.113.1"),
    ],
)
def test_what_is_refused_before_a_model_is_loaded(shell, options, word):
    done = shell("serve", "--port", "0", *options)
    text = done.err + done.out
    assert done.code == 2, text
    assert word in text or word.replace("_", "-") in text


def test_a_run_leaves_no_log_handler_behind(shell, tmp_path):
    import logging

    log = logging.getLogger("deepinfer.server.access")
    before = list(log.handlers), log.level, log.propagate
    shell("serve", "--model", str(tmp_path / "none"), "--port", "0", model=False)
    assert (list(log.handlers), log.level, log.propagate) == before


def test_a_model_that_is_none_ends_the_program(shell, tmp_path):
    done = shell("serve", "--port", "0", "-m", str(tmp_path / "none"), model=False)
    assert done.code == 2
    assert "none" in done.err


def test_every_option_of_the_engine_is_there(shell):
    from deepinfer.cli.generate import generate
    from deepinfer.cli.options import _ENGINE, _field
    from deepinfer.cli.serve import serve

    wanted = {_field(names) for names, _ in _ENGINE}
    assert wanted <= {option.name for option in serve.params}
    assert wanted <= {option.name for option in generate.params}
