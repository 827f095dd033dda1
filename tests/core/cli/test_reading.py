"""Files that are no text, or JSON that nobody meant: refused by line, never a traceback."""

import json
import time

import pytest
from deepinfer.cli.reading import as_json, as_text
from deepinfer.errors import InvalidRequestError

FEW = ("-n", "2", "-t", "0", "--ignore-eos")
NO_TEXT = {
    "an image": b"\x89PNG\r\n\x1a\n\x00\xff\xfe",
    "UTF-16": "Hello\n".encode("utf-16"),
    "Latin-1": "caf\u00e9\n".encode("latin-1"),
    "a torn character": "caf\u00e9".encode()[:-1],
    "a surrogate in UTF-8": b"\xed\xa0\x80",
}
NO_JSON = {
    "deep lists": "[" * 100_000 + "]" * 100_000,
    "deep objects": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "deep enough": "[" * 900 + "]" * 900,
    "a long number": "1" * 5000,
    "half a pair": json.dumps({"prompt": "a\ud800b"}),
    "half a pair in a name": json.dumps({"\udfff": 1}),
    "half a pair, deep": json.dumps({"prompt": [{"a": ["\udc80"]}]}),
    "nothing": "\0",
}


def ways(shell, path, content):
    """Every command that reads a file or standard input, on that content."""
    (path / "p.txt").write_bytes(content)
    (path / "p.jsonl").write_bytes(content)
    return {
        "text": lambda: shell("generate", "-f", str(path / "p.txt"), *FEW),
        "jsonl": lambda: shell("generate", "-f", str(path / "p.jsonl"), "--json", *FEW),
        "stdin": lambda: shell("generate", "--json", *FEW, stdin=content),
        "chat": lambda: shell("chat", *FEW, stdin=content),
        "batch": lambda: shell("run-batch", "-i", str(path / "p.jsonl")),
        "batch stdin": lambda: shell("run-batch", "-i", "-", stdin=content),
    }


@pytest.mark.parametrize("content", NO_TEXT.values(), ids=NO_TEXT)
@pytest.mark.parametrize("way", ["text", "jsonl", "stdin", "chat", "batch", "batch stdin"])
def test_bytes_that_are_no_text_are_refused(shell, tmp_path, way, content):
    done = ways(shell, tmp_path, content)[way]()
    assert done.code == (1 if way.startswith("batch") else 2)
    assert "no UTF-8 text: byte 0x" in done.out + done.err


@pytest.mark.parametrize("content", NO_JSON.values(), ids=NO_JSON)
@pytest.mark.parametrize("way", ["jsonl", "batch", "batch stdin"])
def test_json_that_nobody_meant_is_refused(shell, tmp_path, way, content):
    done = ways(shell, tmp_path, content.encode())[way]()
    assert done.code == (1 if way.startswith("batch") else 2)
    assert "line 1" in done.out + done.err


def test_a_bad_line_of_a_batch_costs_only_itself(shell, tmp_path):
    good = {"custom_id": "é", "method": "POST", "url": "/v1/completions"}
    good["body"] = {"prompt": "Hi", "max_tokens": 2}
    line = json.dumps(good).encode()
    bad = [*NO_TEXT.values(), *(text.encode() for text in NO_JSON.values())]
    bad = [content.replace(b"\r", b"").replace(b"\n", b"") for content in bad]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join([line, *bad, line]))
    done = shell("run-batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out"))
    written = [json.loads(text) for text in (tmp_path / "out").read_text("utf-8").splitlines()]
    written.sort(key=lambda line: int(line["id"].rpartition("_")[2]))
    assert done.code == 1
    assert [w["response"]["status_code"] for w in written] == [200, *[400] * len(bad), 200]
    assert written[-1]["custom_id"] == "é"


def test_a_byte_order_mark_is_taken_off(shell, tmp_path):
    asked = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    asked["body"] = {"prompt": "Hi", "max_tokens": 2, "temperature": 0}
    mark = "\ufeff".encode()
    (tmp_path / "p.txt").write_bytes(mark + b"Hi")
    (tmp_path / "p.jsonl").write_bytes(mark + b'{"prompt": "Hi"}')
    (tmp_path / "b.jsonl").write_bytes(mark + json.dumps(asked).encode())
    for argv in (("-f", str(tmp_path / "p.txt")), ("-f", str(tmp_path / "p.jsonl"))):
        assert json.loads(shell("generate", *argv, "--json", *FEW).out)["prompt"] == "Hi"
    assert json.loads(shell("generate", "--json", *FEW, stdin=mark + b"Hi").out)["prompt"] == "Hi"
    assert shell("run-batch", "-i", str(tmp_path / "b.jsonl")).code == 0


def test_arguments_that_are_no_text(shell):
    broken = b"caf\xe9".decode(errors="surrogateescape")  # as the interpreter hands them over
    done = shell("generate", "Hello", broken, "--json", *FEW)
    assert done.code == 2 and "prompt 2 is no UTF-8 text: byte 0xe9" in done.err
    assert shell("generate", "--chat", "--system", broken, "Hi", *FEW).code == 2


@pytest.mark.parametrize("beside", [{"temperature": 0}, {"messages": []}, {"id": 3}])
def test_fields_beside_a_prompt_are_named(shell, tmp_path, beside):
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "Hi", **beside}))
    done = shell("generate", "-f", str(tmp_path / "p.jsonl"), *FEW)
    assert done.code == 2
    assert next(iter(beside)) in done.err and "beside" in done.err


def test_a_message_names_its_line_once(shell, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": }\n')
    done = shell("generate", "-f", str(tmp_path / "p.jsonl"), *FEW)
    assert "p.jsonl, line 2 is no JSON: Expecting value at character 12." in done.err
    assert done.err.count("line ") == 1
    for content in [*NO_JSON.values(), "", "{", '"a', "[1,]"]:
        with pytest.raises(InvalidRequestError, match=r"^line 7 ") as caught:
            as_json(content, "line 7")
        assert caught.value.message.count("line ") == 1


def test_depth_is_counted_in_levels():
    assert as_json("[" * 200 + "]" * 200, "x")
    with pytest.raises(InvalidRequestError, match="x is nested deeper than 200 levels"):
        as_json("[" * 201 + "]" * 201, "x")


TWICE = {
    '{"a": 1, "a": 2}': "a",
    '{"a": {"b": [0, {"c": 1, "d": 2, "c": 3}]}}': "a.b[1].c",
    '[[{"x": 1}, {"": 1, "": 2}]]': "[0][1].",
    '{"a": {"c": 1, "c": 2}, "b": 1, "a": 3}': "a",  # what is thrown away is not looked into
    '{"a": {"c": 1, "c": 2}, "b": {"d": 1, "d": 2}}': "b.d",
    '{"a": {"c": {"e": 0}, "c": {"d": 1, "d": 2}}}': "a.c",
    '{"\\u0061": 1, "a": 1}': "a",
}


@pytest.mark.parametrize("text", TWICE)
def test_a_key_that_stands_twice_is_named(text):
    with pytest.raises(InvalidRequestError, match=r"line 7 has .* more than once") as caught:
        as_json(text, "line 7")
    assert caught.value.setting == TWICE[text]


def test_a_key_may_stand_in_several_objects():
    value = [{"a": {"a": 1}}, {"a": 2, "b": [{"a": 1}, {"a": 1}]}, {}, {}]
    assert as_json(json.dumps(value), "x") == value


@pytest.mark.parametrize("text", ["{LONG: [[],[],{AB}]}", "{MANY, AB}", "[[[{AB}]], {MANY}]"])
def test_looking_for_the_key_takes_no_longer_than_reading(text):
    """Not the square of it, whatever is long: keys, objects, lists."""
    parts = {"LONG": f'"{"k" * 10**6}"', "AB": '"a": 1, "a": 2'}
    parts["MANY"] = ", ".join(f'"{i}": []' for i in range(10**5))
    for name, part in parts.items():
        text = text.replace(name, part)
    began = time.process_time()
    with pytest.raises(InvalidRequestError, match="more than once"):
        as_json(text.replace("[],[],", "[]," * 10**5), "x")
    assert time.process_time() - began < 10


def test_text_passes_as_it_is():
    assert as_text("naïve \U0001f600 \0", "x") == "naïve \U0001f600 \0"
    assert as_json('"\\ud83d\\ude00"', "x") == "\U0001f600"
