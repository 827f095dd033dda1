"""A small laboratory: engines on a scripted device, and requests for them."""

from types import SimpleNamespace

import pytest
from deepinfer.api.plan import Request
from deepinfer.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.logits import to_row_params
from deepinfer.sampling_params import SamplingParams
from deepinfer.testing.fake import FakeExecutor, FakeScript
from deepinfer.testing.toy import ToyTokenizer

TOKENIZER = ToyTokenizer()


def make_request(name="r", prompt=(1, 2, 3, 4, 5), **options):
    """A request; ``options`` are those of SamplingParams, or of Request."""
    fields = {"priority", "arrival", "cache_salt", "structured", "limit", "ticket", "stream"}
    own = {key: options.pop(key) for key in fields & options.keys()}
    params = SamplingParams(**{"temperature": 0.8, "seed": 1, "ignore_eos": True, **options})
    row = to_row_params(params, len(prompt), {0}, 17, TOKENIZER.encode)
    own.setdefault("limit", len(prompt) + params.max_tokens)
    return Request(
        name,
        tuple(prompt),
        params,
        row,
        seed=params.effective_seed,
        eos_ids=frozenset({0}),
        **own,
    )


@pytest.fixture
def lab():
    """``lab.engine(...)``, ``lab.request(...)``, ``lab.run(engine)``; engines are closed after."""
    engines = []

    def engine(script=None, config=None, executor=None, **rooms):
        device = executor or FakeExecutor(script or FakeScript())
        settings = {"model": "toy", "max_num_seqs": device.script.max_num_seqs, **(config or {})}
        rooms.setdefault("tokenizer", TOKENIZER)
        made = Engine(EngineConfig(**settings), device, device.start(), **rooms)
        engines.append(made)
        return made

    def run(engine, limit=2000):
        """Step until nothing is left; (ids, last delta) by request."""
        found = {}
        for _ in range(limit):
            if not engine.has_work():
                return found
            for delta in engine.step():
                ids, _ = found.get(delta.request_id, ((), None))
                found[delta.request_id] = ((*ids, *delta.token_ids), delta)
        raise AssertionError("stuck")

    yield SimpleNamespace(engine=engine, request=make_request, run=run, tokenizer=TOKENIZER)
    for made in engines:
        alive = made._over is None
        made.close()
        pool = made.cache.pool
        assert not alive or pool.free == pool.num_pages, "pages leaked"
