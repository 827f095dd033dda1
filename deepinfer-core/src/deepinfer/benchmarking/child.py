"""One engine in a process of its own: ``python child.py ENGINE '{"model": …}'``.

Where you are: the far side of ``harness``. Runs in the interpreter that has the engine, so it
imports nothing of DeepInfer unless DeepInfer is the engine. Talks JSON lines: first
``{"ready": seconds, …}``, then one answer per command line. The engine's own chatter on standard
output goes to standard error.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import sys
import time
from typing import Any

_BEGAN = time.perf_counter()


class DeepInfer:
    """This engine. ``model`` is anything that ``LLM`` takes."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from deepinfer import LLM, SamplingParams

        self._params = SamplingParams
        arguments = {"max_num_seqs": 64, **spec.get("engine", {})}
        self._llm = LLM(spec["model"], num_threads=spec["threads"], **arguments)
        self.vocab = self._llm.assembly.facts.vocab_size
        self.notes = {
            "startup": self._llm.assembly.timings,
            "backend": self._backend(),
            "quantization": self._llm.assembly.config.quantization,
        }

    def _backend(self) -> str:
        facts = self._llm.assembly.facts
        return f"{facts.backend} {facts.dtype}"

    def run(self, prompts: list[Any], output: int) -> None:
        params = self._params(temperature=0.0, max_tokens=output, ignore_eos=True)
        done = self._llm.generate(list(prompts), params)
        for result in done:
            if result.error is not None:
                raise result.error
            assert len(result.outputs[0].token_ids) == output


class Transformers:
    """``generate`` of transformers; ``model`` is a directory with safetensors."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(spec["threads"])
        self._torch = torch
        dtype = getattr(torch, spec.get("dtype", "float32"))
        self._model = AutoModelForCausalLM.from_pretrained(spec["hf"], dtype=dtype).eval()
        self.vocab = self._model.config.vocab_size
        self.notes = {"backend": f"torch {torch.__version__} {dtype}"}

    def run(self, prompts: list[Any], output: int) -> None:
        ids = self._torch.tensor(prompts)
        with self._torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=output,
                max_new_tokens=output,
                pad_token_id=0,
            )


class LlamaCpp:
    """llama.cpp through llama-cpp-python's C interface, all sequences in one batch."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import llama_cpp

        self._c = c = llama_cpp
        c.llama_backend_init()
        path, threads = spec["gguf"].encode(), spec["threads"]
        self._model = c.llama_model_load_from_file(path, c.llama_model_default_params())
        options = c.llama_context_default_params()
        options.n_ctx, options.n_seq_max = 34 * 1088, 32
        options.n_batch = options.n_ubatch = 512
        options.n_threads = options.n_threads_batch = threads
        if hasattr(options, "kv_unified"):
            options.kv_unified = True
        self._context = c.llama_init_from_model(self._model, options)
        self.vocab = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self._model))
        self._batch = c.llama_batch_init(512, 0, 1)
        self.notes = {"backend": os.path.basename(spec["gguf"])}

    def run(self, prompts: list[Any], output: int) -> None:
        self._clear()
        shared = common(prompts) if len(prompts) > 1 else []
        self._decode([(t, i, 0, False) for i, t in enumerate(shared)])
        for seq in range(1, len(prompts) if shared else 0):
            self._copy(seq)
        rest = [
            (t, i, seq, i == len(prompt) - 1)
            for seq, prompt in enumerate(prompts)
            for i, t in enumerate(prompt)
            if i >= len(shared)
        ]
        best = self._decode(rest)
        for step in range(output - 1):
            rows = [
                (best[seq], len(prompt) + step, seq, True) for seq, prompt in enumerate(prompts)
            ]
            best = self._decode(rows)

    def _clear(self) -> None:
        c = self._c
        if hasattr(c, "llama_memory_clear"):
            c.llama_memory_clear(c.llama_get_memory(self._context), True)
        else:
            c.llama_kv_cache_clear(self._context)

    def _copy(self, seq: int) -> None:
        c = self._c
        if hasattr(c, "llama_memory_seq_cp"):
            c.llama_memory_seq_cp(c.llama_get_memory(self._context), 0, seq, -1, -1)
        else:
            c.llama_kv_cache_seq_cp(self._context, 0, seq, -1, -1)

    def _decode(self, rows: list[Any]) -> dict[int, int]:
        """Run rows (token, position, sequence, wants logits); the greedy token of each sequence."""
        import numpy as np

        best: dict[int, int] = {}
        for first in range(0, len(rows), 512):
            part, batch = rows[first : first + 512], self._batch
            for i, (token, position, seq, wants) in enumerate(part):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, wants
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
            batch.n_tokens = len(part)
            if self._c.llama_decode(self._context, batch) != 0:
                raise RuntimeError("llama_decode failed")
            for i, (_, _, seq, wants) in enumerate(part):
                if wants:
                    logits = self._c.llama_get_logits_ith(self._context, i)
                    best[seq] = int(np.ctypeslib.as_array(logits, (self.vocab,)).argmax())
        return best


class VLLM:
    """vLLM's offline class, in this process; ``model`` is a directory with safetensors."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import torch
        import vllm

        torch.set_num_threads(spec["threads"])  # on a CPU it takes OMP_NUM_THREADS; says so below
        self._params = vllm.SamplingParams
        dtype = spec.get("dtype", "float32")
        self._llm = vllm.LLM(
            spec["hf"],
            skip_tokenizer_init=True,
            max_model_len=2048,
            dtype=dtype,
            max_num_seqs=64,
        )
        self.vocab = self._llm.llm_engine.model_config.get_vocab_size()
        threads = torch.get_num_threads()
        self.notes = {"backend": f"vllm {vllm.__version__} {dtype}", "threads": threads}

    def run(self, prompts: list[Any], output: int) -> None:
        params = self._params(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": p} for p in prompts]
        done = self._llm.generate(asked, params, use_tqdm=False)
        assert all(len(result.outputs[0].token_ids) == output for result in done)


ENGINES = {
    "deepinfer": ("deepinfer", DeepInfer),
    "transformers": ("transformers", Transformers),
    "llama.cpp": ("llama_cpp", LlamaCpp),
    "vllm": ("vllm", VLLM),
}


def common(prompts: list[Any]) -> list[int]:
    """The ids that all prompts begin with."""
    length = 0
    while all(len(p) > length and p[length] == prompts[0][length] for p in prompts):
        length += 1
    return list(prompts[0][:length])


def measure(engine: Any, work: dict[str, Any]) -> dict[str, Any]:
    """Run one workload; see ``workloads.Workload`` for the measures."""
    prompts, output = work["prompts"], work["output"]
    if work["measure"] == "gap":  # what the first token cost is taken off
        first = _timed(engine, prompts, 1)[0]
        wall, cpu = _timed(engine, work["again"], output)
        return {"wall": wall, "cpu": cpu, "value": (wall - first) / (output - 1) * 1e3}
    wall, cpu = _timed(engine, prompts, output)
    tokens = len(prompts) * output
    value = {"rate": tokens / wall, "first": wall * 1e3, "cpu": cpu}[work["measure"]]
    return {"wall": wall, "cpu": cpu, "value": value}


def _timed(engine: Any, prompts: list[Any], output: int) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    engine.run(prompts, output)
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    """Load the engine, say so, then answer commands until standard input ends."""
    name, spec = sys.argv[1], json.loads(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    package, kind = ENGINES[name]
    engine: Any
    if importlib.util.find_spec(package) is None:
        say({"absent": package})
        return
    try:
        engine = kind(spec)
        say({"ready": time.perf_counter() - _BEGAN, "vocab": engine.vocab, "notes": engine.notes})
        for line in sys.stdin:
            answer = measure(engine, json.loads(line))
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            say({**answer, "peak_mb": peak})
    except Exception as why:
        say({"failed": f"{type(why).__name__}: {why}"})
        raise


if __name__ == "__main__":
    main()
