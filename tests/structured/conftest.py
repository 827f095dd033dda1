"""Tests of deepinfer-structured; skipped where it is not installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # grammar_rig, shared by the tests of this folder

if find_spec("deepinfer_structured") is None or find_spec("xgrammar") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def nothing_stays_open():
    yield
    from grammar_rig import OPEN

    for backend in OPEN:
        backend.close()


@pytest.fixture(scope="session")
def demo_tokenizer():
    from deepinfer.models.source import resolve
    from deepinfer.tokenizer import load_tokenizer

    return load_tokenizer(resolve("demo", revision=None, tokenizer=None, weights=False))


@pytest.fixture(scope="session")
def llm():
    from deepinfer import LLM

    with LLM("demo", max_model_len=512, max_num_seqs=16, kv_cache_memory="256MiB") as engine:
        yield engine
