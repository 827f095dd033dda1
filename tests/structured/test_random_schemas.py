"""Random schemas, random models, one engine: nothing that is called finished breaks its schema.

The models draw from random logits over a small vocabulary of JSON's pieces, with drafts. Beside six
constrained requests run two free ones, which must say what they say alone.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from decimal import Decimal
from pathlib import Path

import jsonschema
import pytest
from deepinfer.api.plan import Request
from deepinfer.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.logits import to_row_params
from deepinfer.engine.request import mix
from deepinfer.errors import InvalidRequestError
from deepinfer.sampling_params import SamplingParams
from deepinfer.testing.fake import FakeExecutor, FakeScript
from grammar_rig import backend_for, spec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent / "schema"))
from random_schemas import SCHEMAS

# Every printable character, so that no text is stuck for want of one, and what JSON often holds.
PIECES = [b"<end>", *(bytes([byte]) for byte in range(32, 127)), b"\n", b"\xc3", b"\xa9"]
PIECES += [*b'{ } [ ] : , " { } "'.split(), b"ab", b"\\u00", b"true", b"false", b"null"] * 2
PIECES += [b'": ', b'":', b'"a"', b'", "', b'"}', b"{}", b"[]", b"],", b"null]", b"}}"] * 3
PIECES += [b"2026-01-02", b"1.2.3.4", b"10:00:00Z", b'{"a"', b'"b":', b"1,"]
PROMPT = (1, 2, 3)
STEPS = 4000


class Pieces:
    """A vocabulary of pieces of JSON; id 0 is special."""

    name, text_kind, strips_first_space = "pieces", "byte_level", False
    vocab_size, special_ids = len(PIECES), frozenset({0})

    def token_bytes(self, token):
        return PIECES[token] if token < len(PIECES) else b""

    def token_to_id(self, token):
        return None

    def decode(self, ids, skip_special_tokens=True):
        kept = [PIECES[i] for i in ids if i or not skip_special_tokens]
        return b"".join(kept).decode("utf-8", "replace")


BACKEND = backend_for(Pieces(), compile_seconds=20.0)


class Shared:
    """Survives the engines that use it."""

    check, ready, compile, fill = BACKEND.check, BACKEND.ready, BACKEND.compile, BACKEND.fill

    def close(self):
        pass


def request(name, seed, rule=None):
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=seed, ignore_eos=rule is None)
    return Request(
        id=name,
        token_ids=PROMPT,
        sampling=params,
        row_params=to_row_params(params, len(PROMPT), {0}, len(PIECES), None),
        seed=mix(seed, 0),
        limit=len(PROMPT) + 60,
        eos_ids=frozenset({0}),
        structured=None if rule is None else spec("json", rule),
    )


def finished(requests, seed):
    """The last delta and the text of each; an engine that does not end is a failure."""
    script = FakeScript(
        vocab_size=len(PIECES), num_pages=200, max_model_len=64, max_num_seqs=8,
        draft_len=seed % 3, seed=seed,
    )  # fmt: skip
    executor = FakeExecutor(script)
    config = EngineConfig(model="toy", max_num_seqs=8, enable_prefix_caching=True)
    facts = executor.start()
    engine = Engine(config, executor, facts, tokenizer=Pieces(), grammar_backend=Shared())
    ends = {}
    texts = dict.fromkeys((r.id for r in requests), "")
    try:
        for one in requests:
            engine.add(one)
        for _ in range(STEPS):
            for delta in engine.step() if engine.has_work() else ():
                texts[delta.request_id] += delta.text
                if delta.finish is not None:
                    ends[delta.request_id] = delta
        assert len(ends) == len(requests), "some request never ended"
    finally:
        engine.close()
    return texts, ends


def check_load(schemas, seed, tally):
    free = [request(f"free{i}", seed + i) for i in range(2)]
    alone, _ = finished(free, seed)
    bound = []
    for i, schema in enumerate(schemas):
        try:
            BACKEND.check(spec("json", schema))
        except ValueError:  # refused by name
            tally["refused"] += 1
            continue
        bound.append((schema, request(f"bound{i}", seed + i, schema)))
    texts, ends = finished([*free, *(r for _, r in bound)], seed)
    assert {name: texts[name] for name in alone} == alone
    for schema, one in bound:
        finish = ends[one.id].finish
        tally[finish] += 1
        if finish == "stop":
            exact = json.loads(json.dumps(schema), parse_float=Decimal)
            value = json.loads(texts[one.id], parse_float=Decimal)
            jsonschema.Draft202012Validator(exact).validate(value)
        elif finish == "error":  # it costs too much to compile
            assert isinstance(ends[one.id].error, InvalidRequestError), ends[one.id].error
        else:
            assert finish == "length"


LOADS = given(st.lists(SCHEMAS, min_size=6, max_size=6), st.integers(0, 10**6))
QUIET = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def run_loads(tally, count):
    @settings(QUIET, max_examples=count)
    @LOADS
    def run(schemas, seed):
        check_load(schemas, seed, tally)

    run()


def test_what_is_called_finished_is_valid():
    tally = Counter()
    run_loads(tally, 15)
    assert tally["stop"] >= 10, tally


@pytest.mark.slow
def test_five_hundred_random_schemas():
    tally = Counter()
    run_loads(tally, 180)
    print(dict(tally))
    assert tally["stop"] + tally["length"] >= 500 and tally["stop"] > 300, tally
