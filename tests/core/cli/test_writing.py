"""Where results go: a wrong place is refused before a model is loaded, a full one said in words."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

ABSENT = ("-m", "/no/such/model")  # a command that comes as far as the model says so
ASK = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
ASK["body"] = {"prompt": "Hi", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
FULL = "/dev/full"


@pytest.fixture
def batch_file(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(ASK) + "\n")
    return path


def commands(batch_file):
    """Every command that writes results, without its ``-o``."""
    return {
        "generate": ("generate", "Hi", "-n", "2"),
        "run-batch": ("run-batch", "-i", str(batch_file)),
        "bench": ("bench", "latency", "--rounds", "1"),
    }


def cli(*argv, **how):
    how = {"stdout": subprocess.PIPE, **how}
    return subprocess.Popen(
        [sys.executable, "-m", "deepinfer", *map(str, argv)],
        stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, **how,
    )  # fmt: skip


@pytest.mark.parametrize("command", ["generate", "run-batch", "bench"])
@pytest.mark.parametrize("where", ["no/such/folder/out", "."])
def test_a_place_that_cannot_be_opened_is_a_wrong_option(
    shell, tmp_path, batch_file, command, where
):
    argv = commands(batch_file)[command]
    done = shell(*argv, "-o", str(tmp_path / where), *ABSENT, model=False)
    assert done.code == 2
    assert "cannot be written" in done.err and "/no/such/model" not in done.err


@pytest.mark.parametrize("command", ["generate", "run-batch"])
def test_what_lay_there_stays_until_there_is_something_to_write(
    shell, tmp_path, batch_file, command
):
    out, argv = tmp_path / "out", commands(batch_file)[command]
    out.write_text("old\n" * 1000)
    assert shell(*argv, "-o", str(out), *ABSENT, model=False).code == 2
    assert out.read_text() == "old\n" * 1000
    assert shell(*argv, "-o", str(out)).code == 0
    (line,) = out.read_text().splitlines()
    assert json.loads(line)


def test_an_empty_batch_leaves_an_empty_file(shell, tmp_path):
    (tmp_path / "in").write_text("\n")
    (tmp_path / "out").write_text("old")
    assert shell("run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")).code == 0
    assert (tmp_path / "out").read_text() == ""


@pytest.mark.parametrize("command", ["generate", "run-batch"])
def test_results_do_not_go_where_prompts_are_read(shell, batch_file, command):
    given = {"generate": ("generate", "-f"), "run-batch": ("run-batch", "-i")}[command]
    before = batch_file.read_text()
    os.link(batch_file, batch_file.with_name("same"))
    done = shell(*given, str(batch_file), "-o", str(batch_file.with_name("same")))
    assert done.code == 2 and "read from too" in done.err
    assert batch_file.read_text() == before


@pytest.mark.skipif(not os.path.exists(FULL), reason="needs /dev/full")
@pytest.mark.parametrize("command", ["generate", "run-batch"])
def test_a_full_disk_is_said_in_words(shell, batch_file, command):
    done = shell(*commands(batch_file)[command], "-o", FULL)
    assert done.code == 1 and done.err.startswith("error: ")
    assert "/dev/full cannot be written: No space left on device" in done.err
    assert "Traceback" not in done.err


@pytest.mark.skipif(not os.path.exists(FULL), reason="needs /dev/full")
@pytest.mark.parametrize("command", ["text", "json", "run-batch", "config"])
def test_a_full_disk_behind_standard_output(tiny_model, batch_file, command):
    model = ("-m", tiny_model, "--threads", "1")
    argv = {
        "text": ("generate", "Hi", "-n", "2", *model),
        "json": ("generate", "Hi", "-n", "2", "--json", *model),
        "run-batch": ("run-batch", "-i", batch_file, *model),
        "config": ("config", "show"),
    }[command]
    with open(FULL, "w") as full:
        done = cli(*argv, stdout=full)
        _, err = done.communicate(timeout=60)
    assert done.returncode == 1 and "No space left on device" in err
    assert "Traceback" not in err and "Exception ignored" not in err


@pytest.mark.parametrize("command", ["text", "json", "run-batch", "config"])
def test_a_pipe_that_nobody_reads(tiny_model, batch_file, command):
    model = ("-m", tiny_model, "--threads", "1")
    argv = {
        "text": ("generate", "Hi", "-n", "2", *model),
        "json": ("generate", "Hi", "-n", "2", "--json", *model),
        "run-batch": ("run-batch", "-i", batch_file, *model),
        "config": ("config", "show"),
    }[command]
    read, write = os.pipe()
    os.close(read)
    done = cli(*argv, stdout=write)
    os.close(write)
    _, err = done.communicate(timeout=60)
    assert done.returncode == 1 and "Traceback" not in err and "Exception ignored" not in err
    assert command in ("text", "config") or "standard output cannot be written: Broken pipe" in err


def test_an_interrupt_keeps_what_has_ended(tiny_model, tmp_path):
    """One request ends while another has half a minute to go; then comes Ctrl-C."""
    long = {**ASK, "custom_id": "long"}
    long["body"] = {**ASK["body"], "max_tokens": None, "n": 2000}
    (tmp_path / "in").write_text("\n".join(map(json.dumps, (ASK, long))))
    out, model = tmp_path / "out", ("-m", tiny_model, "--threads", "1")
    done = cli("run-batch", "-i", tmp_path / "in", "-o", out, *model)
    deadline = time.monotonic() + 60
    while not (out.exists() and out.read_text().endswith("\n")):
        assert time.monotonic() < deadline and done.poll() is None, done.communicate()
        time.sleep(0.005)
    done.send_signal(signal.SIGINT)
    _, err = done.communicate(timeout=60)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == ["a"]
    assert lines[0]["error"] is None
    assert done.returncode == 130 and "Interrupted" in err and "Traceback" not in err
