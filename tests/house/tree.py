"""The source tree as the house tests see it: files, rooms, and the imports of each file."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
CORE = ROOT / "deepinfer-core" / "src" / "deepinfer"


class Import(NamedTuple):
    """One imported module; ``lazy``: inside a function, so not at import of the file."""

    module: str
    lazy: bool
    line: int


def core_files() -> list[Path]:
    """Every Python file of the package."""
    return sorted(CORE.rglob("*.py"))


def sources() -> list[Path]:
    """The package's files and those of the sibling distributions."""
    return [
        *core_files(),
        *sorted(p for p in ROOT.glob("deepinfer-*/src/*/**/*.py") if CORE not in p.parents),
    ]


def room(path: Path) -> str:
    """``api`` for ``deepinfer/api/plan.py``; ``config`` for ``deepinfer/config.py``."""
    return path.relative_to(CORE).parts[0].removesuffix(".py")


def room_of_module(module: str) -> str:
    """The room that ``deepinfer.api.plan`` lies in; ``__init__`` for the package's own names."""
    name = [*module.split("."), ""][1]
    known = (CORE / name).is_dir() or (CORE / f"{name}.py").is_file()
    return name if name and known else "__init__"


def imports(path: Path) -> list[Import]:
    """What a file imports, without what stands under ``if TYPE_CHECKING``."""
    return list(_walk(ast.parse(path.read_text("utf-8")), lazy=False))


def _walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from _walk(other, lazy)
        elif isinstance(child, ast.Import):
            yield from (Import(alias.name, lazy, child.lineno) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: relative import"
            yield from (Import(f"{child.module}.{a.name}", lazy, child.lineno) for a in child.names)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _walk(child, lazy or inside)


def windows() -> list[tuple[str, Path]]:
    """(module, source folder) of core's own window and of every sibling distribution's."""
    found = [("deepinfer.builtin", CORE.parent)]
    for path in sorted(ROOT.glob("deepinfer-*/src/*/plugin.py")):
        found.append((f"{path.parent.name}.plugin", path.parents[1]))
    return found


def fresh(code: str, *args: str, flags: tuple[str, ...] = ()) -> str:
    """Run code in a new interpreter and return what it printed; its error is the test's error."""
    done = subprocess.run(
        [sys.executable, *flags, "-c", code, *args], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
