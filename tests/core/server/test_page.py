"""The page at /, in a headless Chromium."""

import json
import os
import shutil

import pytest

pytestmark = pytest.mark.browser
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
SCHEMA = json.dumps({"type": "string", "enum": ["a", "b"]})


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        options = {} if CHROMIUM is None else {"executable_path": CHROMIUM}
        try:
            browser = playwright.chromium.launch(args=["--no-sandbox"], **options)
        except sync_api.Error as why:
            pytest.skip(f"no Chromium: {why.message.splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    page = browser.new_page()
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.problems = problems
    yield page
    page.close()
    assert not problems


def test_a_chat_streams_and_is_remembered(page, toy_server, slow):
    server = toy_server(slow())
    page.goto(server.url)
    page.fill("#length", "30")
    page.fill("#temperature", "0")
    page.fill("#message", "abc")
    page.click("#send")
    page.wait_for_selector(".assistant[data-done]")
    assert page.query_selector(".error") is None, page.text_content("#talk")
    said = page.text_content(".assistant .words")
    assert said
    page.fill("#message", "ab")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.keyboard.press("Enter")
    messages = asked.value.post_data_json["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]
    assert messages[1]["content"] == said
    page.wait_for_function("() => document.querySelectorAll('.assistant[data-done]').length == 2")
    assert page.text_content("#model") == "toy"


def test_stop_frees_the_engine(page, toy_server, slow):
    server = toy_server(slow(jitter=0.05))
    page.goto(server.url)
    page.fill("#length", "3000")
    page.fill("#message", "<b>abc</b>")
    page.click("#send")
    page.wait_for_selector(".assistant .words")
    page.click("#stop")
    page.wait_for_selector("#send:enabled")
    server.wait_idle()
    assert page.text_content(".user") == "<b>abc</b>"  # text, no markup
    assert page.query_selector(".user b") is None


def test_numbers_of_the_engine(page, toy_server):
    server = toy_server()
    server.post("/v1/generate", prompt="abc", max_tokens=5, ignore_eos=True)
    page.goto(server.url)
    page.wait_for_selector("#numbers tr")
    rows = dict(zip(*[iter(page.locator("#numbers td").all_text_contents())] * 2, strict=True))
    assert rows["Output tokens"] == "5"
    assert rows["Running"] == rows["Waiting"] == "0"
    assert rows["Time to first token (mean)"].endswith(" ms")
    assert page.text_content("#state") == "ready"


def test_what_the_server_refuses_is_shown(page, toy_server):
    server = toy_server()
    page.goto(server.url)
    page.fill("#schema", SCHEMA)
    page.click("#make")  # no grammar backend is there
    page.wait_for_selector("#result[data-done]")
    assert "grammar" in page.text_content("#verdict .bad")
    page.fill("#schema", "{")
    page.click("#make")
    page.wait_for_function(
        "() => document.querySelector('#verdict').textContent.includes('no JSON')"
    )


def test_a_result_is_checked_while_it_comes(page, toy_server, slow):
    server = toy_server(slow())
    page.goto(server.url)
    page.uncheck("#force")
    page.fill("#schema", SCHEMA)
    page.click("#make")
    page.wait_for_selector("#verdict li.bad")  # what a toy says is no JSON
    page.click("#halt")
    page.wait_for_selector("#make:enabled")
    server.wait_idle()


BEGINS = [
    ("", True), ("{", True), ('{"a', True), ('{"a": ', True), ('{"a": "x\\', True),
    ('{"a": "\\u00', True), ("[1, -", True), ("[1.", True), ("[1e+", True), ("tr", True),
    ("[true, nul", True), ("[]", True), ("[1", True), ("12 ", True), ("[1,]", False), ("{]", False),
    ('{"a" 1}', False), ("{a", False), ("[01", False), ("x", False), ("[1] 2", False),
    ('"a\n', False), ("tru1", False), ('{"a": 1,}', False), ('"\\x', False), ("[1 2", False),
]  # fmt: skip


def test_beginnings_of_json(page, toy_server):
    page.goto(toy_server().url)
    for text, want in BEGINS:
        assert page.evaluate("beginsJson", text) is want, text
        if want:
            continue
        for end in ("", "]", "}", '"', '"}'):
            with pytest.raises(ValueError):
                json.loads(text + end)


def test_the_small_validator_agrees_with_jsonschema(page, toy_server):
    jsonschema = pytest.importorskip("jsonschema")
    page.goto(toy_server().url)
    schemas = [
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"type": "object", "additionalProperties": False, "properties": {"a": True}},
        {"enum": [1, "a", None, {"x": [1]}]},
        {"const": {"b": 1, "a": 2}},
        {"type": ["string", "null"], "maxLength": 2, "minLength": 1},
        {"type": "array", "items": {"minimum": 2, "exclusiveMaximum": 5}, "minItems": 1},
        {"uniqueItems": True, "maxItems": 2},
        {"anyOf": [{"type": "string", "pattern": "b"}, {"maximum": 1}]},
        {"oneOf": [{"type": "integer"}, {"minimum": 2}]},
        {"allOf": [{"minimum": 1}, {"not": {"const": 3}}]},
        False,
    ]
    values = [
        {}, {"a": 1}, {"a": 1.5}, {"a": 1, "b": 2}, {"a": 2, "b": 1}, {"x": [1]}, [], [1], [2, 3],
        [1, 1], [2, 5], [1, 2, 3], "", "a", "ab", "abc", "𝔸𝔸", None, True, 0, 1, 2, 3, 1.5, -1,
    ]  # fmt: skip
    for schema in schemas:
        validator = jsonschema.Draft202012Validator(schema)
        for value in values:
            got = page.evaluate("([v, s]) => fits(v, s)", [value, schema])
            assert got is validator.is_valid(value), (schema, value)


def test_keywords_that_it_does_not_know_are_named(page, toy_server):
    page.goto(toy_server().url)
    lines = page.evaluate("verdict('1', {multipleOf: 3, $ref: '#/x'}, 'stop')")
    assert lines[-1][0] == "Not checked here: multipleOf, $ref."


def test_a_browser_can_show_its_key(browser, toy_server):
    server = toy_server(api_keys=("sk-secret-0123",))
    context = browser.new_context(
        http_credentials={"username": "any", "password": "sk-secret-0123"}
    )
    page = context.new_page()
    page.goto(server.url)
    page.wait_for_function("() => document.querySelector('#model').textContent == 'toy'")
    context.close()
