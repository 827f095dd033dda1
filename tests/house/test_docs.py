"""Documentation that can be checked: links, the README's Python and commands, what is installed."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from tree import ROOT

SKIPPED = {".nox", ".venv", ".git", "node_modules", "build", "dist"}
PAGES = sorted(p for p in ROOT.rglob("*.md") if not SKIPPED & {*p.relative_to(ROOT).parts})
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
README = (ROOT / "README.md").read_text("utf-8") if (ROOT / "README.md").is_file() else ""
SNIPPETS = [code for language, code in FENCE.findall(README) if language == "python"]


def anchors(text: str) -> set[str]:
    """The anchors that headings get where Markdown is shown."""
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_resolve(page):
    """Every relative link names a file or folder, and every anchor a heading."""
    broken = []
    for target in LINK.findall(FENCE.sub("", page.read_text("utf-8"))):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        there = (page.parent / path).resolve() if path else page
        if not there.exists():
            broken.append(target)
        elif anchor and anchor not in anchors(there.read_text("utf-8")):
            broken.append(target)
    assert not broken


def test_the_readme_lists_every_command():
    from deepinfer.__main__ import _COMMANDS

    (listed,) = re.findall(r"^deepinfer ([\w-]+(?: \| [\w-]+)+)$", README, re.M)
    assert listed.split(" | ") == list(_COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_pages_install_what_lies_here(page):
    """A reader has a checkout. Under its bare name an index is asked, which may not have it."""
    bare = re.compile(r"(?<!-e )(?<!-e [\"'])(?<![\w./-])deepinfer-")  # -e takes a folder
    lines = re.findall(r"pip install ([^`\n]*)", page.read_text("utf-8"))
    assert [line for line in lines if bare.search(line)] == []


@pytest.mark.model
@pytest.mark.parametrize("code", SNIPPETS, ids=range(len(SNIPPETS)))
def test_readme_snippets_run(code, tmp_path):
    """As a newcomer would run them: a file of its own, outside the checkout."""
    script = tmp_path / "snippet.py"
    script.write_text(code, "utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "it prints nothing"
