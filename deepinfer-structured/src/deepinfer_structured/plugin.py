"""The window: one grammar backend. Standard library and ``deepinfer.api`` only."""

from __future__ import annotations

from importlib.util import find_spec

from deepinfer.api import GrammarSpec, Spec, hookimpl


def why_not() -> str | None:
    """None if what the backend stands on is installed."""
    missing = [name for name in ("xgrammar", "jsonschema", "referencing") if not find_spec(name)]
    return f"{', '.join(missing)} cannot be found" if missing else None


@hookimpl
def deepinfer_provide() -> list[Spec]:
    """The six ways to say what a text must obey."""
    return [
        GrammarSpec(
            name="xgrammar",
            load="deepinfer_structured.backend:XGrammarBackend",
            priority=10,
            probe=why_not,
            offers=frozenset({"json", "regex", "ebnf", "choice", "json_object", "structural_tag"}),
        )
    ]
