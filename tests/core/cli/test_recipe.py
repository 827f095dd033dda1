"""``deepinfer recipe``: what it lists and what it refuses, before a model is loaded."""

import pytest

LABELS = ("-o", 'labels=["good", "bad"]')


def test_without_a_name_it_lists(shell):
    done = shell("recipe", model=False)
    assert done.code == 0
    assert {line.split()[0] for line in done.out.splitlines()} >= {"classify", "ner", "sql"}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("soup", "x"), "no recipe 'soup'"),
        (("classify", "x"), "labels or fields"),
        (("classify", "x", *LABELS, "-o", "hue=1"), "hue"),
        (("classify", "x", "-o", "labels"), "KEY=VALUE"),
        (("classify", "x", "-o", "labels=good"), "expected a list"),
        (("ner", "x", "-o", "types=person"), "expected a list"),
        (("classify", "x", *LABELS, "--temperature", "-1"), "temperature"),
    ],
)
def test_what_is_wrong_is_refused_by_name(shell, argv, words):
    done = shell("recipe", *argv, model=False)
    assert done.code == 2 and done.out == "" and words in done.err


@pytest.mark.parametrize(
    "option", ["--samples", "--json-schema", "--regex", "--grammar", "--choice"]
)
def test_what_a_recipe_decides_itself_is_no_option(shell, option):
    assert f"{option} " in shell("generate", "--help", model=False).out
    assert f"{option} " not in shell("recipe", "--help", model=False).out
    done = shell("recipe", "classify", "x", *LABELS, option, "1", model=False)
    assert done.code == 2 and "No such option" in done.err and option in done.err
