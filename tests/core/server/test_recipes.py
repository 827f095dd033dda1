"""Recipes over HTTP."""

import pytest

TICKETS = {"labels": ["complaint", "praise"]}


def test_the_recipes_are_listed(toy_shared):
    answer = toy_shared.get("/v1/recipes")
    assert answer.status == 200
    listed = {row["id"]: row["about"] for row in answer.json["data"]}
    assert {"classify", "ner", "sql", "transform"} <= set(listed) and all(listed.values())


@pytest.mark.parametrize(
    ("body", "words", "path"),
    [
        ({"recipe": "soup"}, "ner", "recipe"),
        ({"recipe": "classify"}, "labels or fields", "options"),
        ({"recipe": "classify", "options": {"labels": ["a"], "hue": 1}}, "hue", "options.hue"),
        ({"recipe": "classify", "options": {"labels": "a"}}, "labels", "options.labels"),
        ({"recipe": "ner", "options": {"types": [3]}}, "types", "options.types.0"),
        ({"recipe": "classify", "options": TICKETS, "hue": 1}, "hue", "hue"),
        ({"recipe": "classify", "text": "", "options": TICKETS}, "text", "text"),
        ({"recipe": "classify", "options": TICKETS, "max_repairs": 99}, "max_repairs", None),
        ({"recipe": "sql", "options": {"ddl": "DROP"}}, "ddl", "options.ddl"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_path(toy_shared, body, words, path):
    answer = toy_shared.ask("POST", "/v1/recipes", {"text": "x", **body})
    assert answer.status == 400 and words in answer.error["message"]
    assert answer.error["param"] == (path or words)
    toy_shared.wait_idle()


def test_an_engine_without_a_grammar_plugin_says_so(toy_server, slow):
    answer = toy_server(slow()).post("/v1/recipes", recipe="classify", text="x", options=TICKETS)
    assert answer.status == 400 and "grammar plugin" in answer.error["message"]


@pytest.mark.model
def test_a_recipe_runs_on_the_demo_model(demo_server):
    pytest.importorskip("deepinfer_structured")
    answer = demo_server.post("/v1/recipes", recipe="classify", text="Bad!", options=TICKETS)
    assert answer.status == 200, answer.text
    assert answer.json["value"]["label"] in TICKETS["labels"] and answer.json["valid"]
    assert answer.json["steps"][0]["attempt"] == 0
    demo_server.wait_idle()
