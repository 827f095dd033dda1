"""Every public signature of ``deepinfer.api`` as text, read from the source.

``python tests/house/signatures.py`` rewrites ``signatures.json``. A plugin compiles against these:
within a major version they only grow, and a change needs a decision record in docs/decisions.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

from tree import CORE

SNAPSHOT = Path(__file__).with_name("signatures.json")


def signatures() -> dict[str, str]:
    """``api.backend.Device.future`` → ``(self, *tensors: torch.Tensor) -> Future``, and so on."""
    found: dict[str, str] = {}
    for path in sorted((CORE / "api").glob("*.py")):
        if path.stem != "__init__":
            found |= _members(ast.parse(path.read_text("utf-8")), f"api.{path.stem}")
    return found


def _members(tree: ast.AST, where: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            if not node.name.startswith("_") or node.name == "__init__":
                found[f"{where}.{node.name}"] = "".join(_signature(node))
        elif isinstance(node, ast.ClassDef):
            marks = [ast.unparse(d) for d in node.decorator_list]
            bases = ", ".join(ast.unparse(b) for b in node.bases)
            found[f"{where}.{node.name}"] = f"class({bases}) {' '.join(marks)}".strip()
            found |= _members(node, f"{where}.{node.name}")
        elif isinstance(node, ast.AnnAssign) and not ast.unparse(node.target).startswith("_"):
            value = f" = {ast.unparse(node.value)}" if node.value else ""
            found[f"{where}.{ast.unparse(node.target)}"] = ast.unparse(node.annotation) + value
    return found


def _signature(node: ast.FunctionDef) -> Iterator[str]:
    yield from (f"@{ast.unparse(d)} " for d in node.decorator_list)
    yield f"({ast.unparse(node.args)})"
    yield f" -> {ast.unparse(node.returns)}" if node.returns else ""


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(signatures(), indent=1, sort_keys=True) + "\n", "utf-8")
