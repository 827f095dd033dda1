"""Front doors on a scripted device: no torch, milliseconds."""

from types import SimpleNamespace

import pytest
from deepinfer.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.entrypoints.assemble import Assembly
from deepinfer.entrypoints.async_llm import AsyncLLM
from deepinfer.entrypoints.inputs import Preparer
from deepinfer.entrypoints.llm import LLM
from deepinfer.testing.fake import FakeExecutor, FakeScript
from deepinfer.testing.toy import ToyTokenizer


def make_assembly(script=None, seed=0, **config):
    """All parts of an engine on a scripted device."""
    script = script or FakeScript()
    executor, tokenizer = FakeExecutor(script), ToyTokenizer()
    settings = EngineConfig(model="toy", max_num_seqs=script.max_num_seqs, seed=seed, **config)
    facts = executor.start()
    engine = Engine(settings, executor, facts, tokenizer=tokenizer)
    return Assembly(
        config=settings,
        executor=executor,
        facts=facts,
        tokenizer=tokenizer,
        engine=engine,
        preparer=Preparer(facts, tokenizer, frozenset({0}), seed),
    )


@pytest.fixture
def toy():
    """``toy.llm(...)``, ``toy.async_llm(...)``; what they are made of is closed after the test."""
    made = []

    def front(kind, **options):
        llm = kind.from_assembly(make_assembly(**options))
        made.append(llm)
        return llm

    yield SimpleNamespace(
        llm=lambda **o: front(LLM, **o),
        async_llm=lambda **o: front(AsyncLLM, **o),
        assembly=make_assembly,
        script=FakeScript,
    )
    for llm in made:
        llm.close()
