"""Reports what has grown past the house's aims. It reports; it fails nothing.

``python tests/house/sizes.py``: files over 400 lines, functions over 60, classes with more than
15 attributes, functions with more than 7 parameters.
"""

from __future__ import annotations

import ast

from tree import ROOT, sources


def report() -> list[str]:
    """One line for each thing past its aim."""
    lines = []
    for path in sources():
        text, name = path.read_text("utf-8"), path.relative_to(ROOT)
        if (count := text.count("\n")) > 400:
            lines.append(f"{name}: {count} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines += [f"{name}:{node.lineno} {node.name}: {what}" for what in _function(node)]
            elif isinstance(node, ast.ClassDef) and (count := len(_attributes(node))) > 15:
                lines.append(f"{name}:{node.lineno} {node.name}: {count} attributes")
    return lines


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    length = (node.end_lineno or node.lineno) - node.lineno + 1
    count = len(node.args.args) + len(node.args.kwonlyargs) + len(node.args.posonlyargs)
    return [f"{length} lines"] * (length > 60) + [f"{count} parameters"] * (count > 8)


def _attributes(node: ast.ClassDef) -> set[str]:
    return {
        target.attr
        for found in ast.walk(node)
        if isinstance(found, ast.Attribute) and isinstance(found.ctx, ast.Store)
        for target in [found]
        if isinstance(target.value, ast.Name) and target.value.id == "self"
    }


if __name__ == "__main__":
    print("\n".join(report()) or "nothing is past its aim")
