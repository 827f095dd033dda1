"""How many operations a step costs beside the model: on a GPU each is a launch and a gap."""

from deepinfer import LLM, SamplingParams
from deepinfer.testing.tiny import write_tiny_checkpoint
from deepinfer.worker.batch import BatchBuilder
from deepinfer.worker.runner import ModelRunner
from torch.utils._python_dispatch import TorchDispatchMode


class Counted(TorchDispatchMode):
    """Counts what is no view."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and "empty" not in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_plain_decode_step_costs_few_operations(tmp_path, monkeypatch):
    """Not more with the rows, and half of what looking everything up by row would take (66)."""
    model, steps = str(write_tiny_checkpoint(tmp_path / "tiny")), []

    def counted(fn):
        def run(self, *args):
            with Counted() as seen:
                found = fn(self, *args)
            steps.append(seen.names)
            return found

        return run

    monkeypatch.setattr(BatchBuilder, "build", counted(BatchBuilder.build))
    monkeypatch.setattr(ModelRunner, "_sample", counted(ModelRunner._sample))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(model, num_threads=1, kv_cache_memory="8MiB") as llm:
        for rows in (1, 5):
            steps.clear()
            outputs = llm.generate([[7, 8, 9 + i] for i in range(rows)], params)
            assert all(len(out.outputs[0].token_ids) == 8 for out in outputs)
            build, sample = steps[-4], steps[-3]  # a decode step in the middle of the text
            assert 5 < len(build) + len(sample) <= 38, (build, sample)
