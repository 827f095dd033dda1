"""``deepinfer generate``: where prompts come from and where texts go."""

import json

import pytest

FEW = ("-n", "4", "-t", "0", "--ignore-eos")


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


def test_prompts_from_arguments(shell):
    done = shell("generate", "Hello", *FEW)
    assert done.code == 0 and done.out.strip() and "---" not in done.out


def test_several_prompts_are_told_apart(shell):
    done = shell("generate", "Hello", "World", *FEW)
    assert "--- 1.1" in done.out and "--- 2.1" in done.out


def test_json_lines(shell):
    done = shell("generate", "Hello", "World", "--json", "--logprobs", "1", *FEW)
    one, two = lines(done.out)
    assert (one["prompt"], two["prompt"]) == ("Hello", "World")
    out = one["outputs"][0]
    assert len(out["token_ids"]) == 4 == len(out["logprobs"])
    assert out["finish_reason"] == "length"


def test_same_seed_same_text_and_samples(shell):
    sampled = ("--json", "-n", "6", "-t", "1", "-s", "5", "--samples", "2", "--ignore-eos")
    one, two = (lines(shell("generate", "Hello", *sampled).out) for _ in range(2))
    assert one == two
    assert len(one[0]["outputs"]) == 2


def test_a_text_file_has_a_prompt_a_line(shell, tmp_path):
    (tmp_path / "p.txt").write_text("Hello\n\nWorld\n")
    done = shell("generate", "-f", str(tmp_path / "p.txt"), "--json", *FEW)
    assert [line["prompt"] for line in lines(done.out)] == ["Hello", "World"]


def test_a_jsonl_file_has_texts_ids_and_conversations(shell, tmp_path):
    prompts = [
        {"prompt": "Hello"},
        {"prompt_token_ids": [5, 6]},
        {"messages": [{"role": "user", "content": "Hi"}]},
        "plain",
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    done = shell("generate", "-f", str(tmp_path / "p.jsonl"), "-o", str(tmp_path / "out"), *FEW)
    assert done.code == 0
    written = lines((tmp_path / "out").read_text())
    assert [w["prompt"] for w in written][:2] == ["Hello", [5, 6]]
    assert all(len(w["outputs"][0]["token_ids"]) == 4 for w in written)


def test_a_broken_jsonl_line_is_named(shell, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    done = shell("generate", "-f", str(tmp_path / "p.jsonl"), *FEW)
    assert done.code == 2 and "line 2 is no JSON" in done.err


def test_standard_input_is_one_prompt(shell):
    done = shell("generate", "--json", *FEW, stdin="Hello\nWorld\n")
    assert [line["prompt"] for line in lines(done.out)] == ["Hello\nWorld"]


def test_no_prompt_at_all(shell):
    done = shell("generate")
    assert done.code == 2 and "No prompt" in done.err


def test_chat_goes_through_the_template(shell):
    done = shell("generate", "--chat", "--system", "Be kind", "Hi", "--json", *FEW)
    assert len(lines(done.out)[0]["outputs"][0]["token_ids"]) == 4
    assert shell("generate", "--system", "Be kind", "Hi").code == 2


def test_one_bad_prompt_is_reported_and_the_rest_is_there(shell, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt_token_ids": [9999]}\n')
    done = shell("generate", "-f", str(tmp_path / "p.jsonl"), "--json", *FEW)
    assert done.code == 1
    good, bad = lines(done.out)
    assert "error" not in good and "id 9999" in bad["error"]
    assert "id 9999" in done.err


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (("-t", "-1"), "temperature"),
        (("--top-p", "2"), "top_p"),
        (("--samples", "0"), "n="),
        (("--stop-token-id", "9999"), "id 9999"),
        (("--logit-bias", "x"), "ID:BIAS"),
    ],
)
def test_bad_parameters_end_with_2_and_their_name(shell, option, words):
    done = shell("generate", "Hello", *option)
    assert done.code == 2 and words in done.err


BAD = {
    "temperature": ("-t", "-1"),
    "top_p": ("--top-p", "2"),
    "max_tokens": ("-n", "0"),
    "min_tokens": ("-n", "2", "--min-tokens", "3"),
    "n=": ("--samples", "0"),
    "stop": ("--stop", ""),
    "seed": ("-s", str(1 << 70)),
    "ID:BIAS": ("--logit-bias", "x"),
    "neither a number nor none": ("-n", "many"),
    "give one of them": ("--regex", "a", "--choice", "b"),
    "neither a rule nor a file": ("--json-schema", "nowhere.json"),
    "schema is no JSON": ("--json-schema", "{"),
    "'type' stands there twice": ("--json-schema", '{"items": {"type": "null", "type": "null"}}'),
}


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(("words", "option"), BAD.items(), ids=BAD)
def test_wrong_values_are_refused_before_a_model_is_looked_for(shell, command, words, option):
    given = (command, "Hello") if command == "generate" else (command,)
    done = shell(*given, *option, "-m", "/no/such/model", model=False)
    assert done.code == 2
    assert words in done.err and "/no/such/model" not in done.err


def test_an_empty_prompt_is_refused_before_a_model_is_looked_for(shell):
    done = shell("generate", "Hello", "", "-m", "/no/such/model", model=False)
    assert done.code == 2 and "Prompt 2 is empty" in done.err
    assert shell("generate", "--chat", "", *FEW).code == 0  # a user may say nothing


def test_no_limit_runs_to_the_end_of_the_context(shell):
    done = shell("generate", "Hello", "-n", "none", "--json", "--ignore-eos", "-t", "0",
                 "--max-model-len", "40")  # fmt: skip
    out = lines(done.out)[0]["outputs"][0]
    assert out["finish_reason"] == "length" and len(out["token_ids"]) > 16


def test_progress_bar_only_where_it_is_wanted(shell):
    assert "generating" not in shell("generate", "a", "b", *FEW).err
    assert "generating" in shell("generate", "a", "b", "--progress", *FEW).err
