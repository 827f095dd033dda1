"""An engine whose GPU is lost in its third step: ``test_gpu_faults`` runs it. Argument: a model."""

import json
import sys

import torch
from deepinfer import SamplingParams
from deepinfer.config import EngineConfig
from deepinfer.entrypoints.assemble import assemble


def break_later(ops, steps):
    """After so many calls a kernel fails an assertion, as a wild address would end the context."""
    real, calls = ops.decoder_layers, []

    def layers(*args, **kwargs):
        calls.append(1)
        if len(calls) == steps:
            torch._assert_async(torch.zeros(1, dtype=torch.bool, device="cuda"))
        return real(*args, **kwargs)

    ops.decoder_layers = layers


def main():
    config = EngineConfig.make(
        model=sys.argv[1], backend="cuda", max_num_seqs=4, kv_cache_memory="64MiB"
    )
    made = assemble(config)
    engine = made.engine
    break_later(made.executor.call("ops")[0], 3)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    asked = []
    for i in range(6):
        prepared = made.preparer.prepare(f"r{i}", list(range(5 + i, 30)), params)
        for request in prepared.requests:
            engine.add(request)
            asked.append(request.id)
    errors = {}
    while len(errors) < len(asked):
        for delta in engine.step():
            if delta.finish is not None:
                errors[delta.request_id] = str(delta.error)
    try:
        engine.step()
        later = ""
    except Exception as why:
        later = type(why).__name__
    engine.close()
    found = {"asked": len(asked), "told": len(errors), "errors": sorted(set(errors.values()))}
    print(json.dumps({**found, "later": later, "closed": True}))


main()
