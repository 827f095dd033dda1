"""What others build on: exports, the plugin API's signatures, op names, settings, manners."""

from __future__ import annotations

import ast
import json

import pytest
from settings_page import PAGE, page
from signatures import SNAPSHOT, signatures
from tree import CORE, ROOT, core_files, fresh, imports, sources, windows

HOMES = {
    "LLM": "deepinfer.entrypoints.llm",
    "AsyncLLM": "deepinfer.entrypoints.async_llm",
    "SamplingParams": "deepinfer.sampling_params",
}


def test_exports_resolve_and_are_listed():
    import deepinfer

    for name in deepinfer.__all__:
        assert getattr(deepinfer, name) is not None
    assert set(deepinfer.__all__) <= set(dir(deepinfer))
    with pytest.raises(AttributeError, match="no attribute 'LLLM'"):
        deepinfer.LLLM  # noqa: B018


@pytest.mark.parametrize("name", HOMES)
def test_exports_are_the_objects_of_their_published_homes(name):
    import importlib

    import deepinfer

    assert getattr(deepinfer, name) is getattr(importlib.import_module(HOMES[name]), name)


def test_api_exports_everything_public():
    from deepinfer import api

    classes = {k.split(".")[2] for k, v in signatures().items() if v.startswith("class(")}
    assert classes <= set(api.__all__)


def test_api_signatures_are_those_of_the_snapshot():
    now, then = signatures(), json.loads(SNAPSHOT.read_text("utf-8"))
    changed = {k: (then.get(k), now.get(k)) for k in {*now, *then} if now.get(k) != then.get(k)}
    assert not changed, (
        "the plugin API changed: write a decision record, then run "
        f"`python tests/house/signatures.py`. (before, after): {changed}"
    )


def test_op_names_are_the_table():
    from deepinfer.api.ops import OP_NAMES
    from deepinfer.ops.table import table

    assert set(OP_NAMES) == set(table())
    assert len(set(OP_NAMES)) == len(OP_NAMES)


def test_settings_page_is_current():
    assert PAGE.read_text("utf-8") == page(), "run `python tests/house/settings_page.py`"


def test_there_are_eight_settings():
    from deepinfer import settings

    assert len(settings.SETTINGS) == 8, "a ninth variable needs a decision record"


READERS = {"environ", "environb", "getenv", "putenv", "unsetenv"}


@pytest.mark.parametrize("path", sources(), ids=lambda p: "/".join(p.parts[-2:]))
def test_only_settings_reads_the_environment(path):
    if path == CORE / "settings.py" or path.is_relative_to(CORE / "testing"):
        return
    reads = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if {getattr(node, "attr", ""), getattr(node, "name", "")} & READERS
    ]
    assert not reads, f"{path} reads the environment in line(s) {reads}; settings.py is the place"


FORBIDDEN = {"utils", "util", "helpers", "helper", "common", "misc"}


def test_no_drawer_for_everything():
    parts = {p: {*p.relative_to(ROOT).with_suffix("").parts} & FORBIDDEN for p in sources()}
    assert not [path for path, hit in parts.items() if hit]


def test_no_mixins_and_no_star_imports():
    wrong = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef) and "Mixin" in node.name:
                wrong.append(f"{path}:{node.lineno}")
        wrong += [f"{path}:{i.line}" for i in imports(path) if i.module.endswith(".*")]
    assert not wrong


MANNERS = """
import json, logging, multiprocessing, os, signal, sys, threading
sys.path.insert(0, sys.argv[2])
def state():
    signals = {s.name: repr(signal.getsignal(s)) for s in signal.valid_signals()
               if isinstance(s, signal.Signals)}
    root = logging.getLogger()
    return {
        "environ": dict(os.environ), "signals": signals, "cwd": os.getcwd(),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "log handlers": len(root.handlers), "log level": root.level,
        "log factory": repr(logging.getLogRecordFactory()),
        "log class": repr(logging.getLoggerClass()),
        "own handlers": len(logging.getLogger("deepinfer").handlers),
        "threads": threading.active_count(), "excepthook": repr(sys.excepthook),
    }
before = state()
__import__(sys.argv[1])
after = state()
print(json.dumps({k: (before[k], after[k]) for k in before if before[k] != after[k]}))
"""


@pytest.mark.parametrize(
    "module", ["deepinfer", "deepinfer.config", "deepinfer.plugins", *(m for m, _ in windows())]
)
def test_importing_changes_nothing(module):
    source = dict(windows()).get(module, CORE.parent)
    changed = json.loads(fresh(MANNERS, module, str(source)))
    assert not changed


def test_no_module_state_but_the_op_table():
    """An assignment of an empty list, dict or set at module level is a place for hidden state."""
    wrong = []
    for path in core_files():
        for node in ast.parse(path.read_text("utf-8")).body:
            value = getattr(node, "value", None)
            empty = (
                isinstance(value, ast.List | ast.Dict | ast.Set)
                and not ast.dump(value).count("Constant")
                and ast.unparse(value) in ("[]", "{}")
            )
            if isinstance(node, ast.Assign | ast.AnnAssign) and empty:
                wrong.append(f"{path.relative_to(CORE)}:{node.lineno}")
    tables = {"ops/table.py", "testing/conformance/inputs.py"}  # filled at import, then only read
    assert {w.split(":")[0] for w in wrong} <= tables
