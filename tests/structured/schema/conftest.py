"""The helpers of this folder, on the path; skipped where the plugin is not installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # grammars, cases, random_schemas

if find_spec("deepinfer_structured") is None or find_spec("xgrammar") is None:
    collect_ignore_glob = ["test_*.py"]
