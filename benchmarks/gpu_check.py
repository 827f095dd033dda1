"""Builds, checks and times DeepInfer on a bare GPU machine, within ten minutes; ``nox -s gpu``.

    python benchmarks/gpu_check.py [--out FOLDER] [--wheels FOLDER] [--parts bits,faults,…]
                                   [--model GGUF] [--prompts FOLDER]

Standard library only, and nothing is fetched: torch, Triton and pytest must be there; what else is
missing comes from ``--wheels``. Each part has a time limit and is told apart from the others: one
that fails does not end the rest. Leaves with 1 if a part failed. ``text`` needs the demo model,
``load`` (drafts at 16 and 64 requests) that and prompts; these, ``engine``, ``recorded``, ``v41``
and ``record`` run when they are named.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
CUDA = ROOT / "tests" / "cuda"
PYTEST = (sys.executable, "-u", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default")

EXAMPLE = f"""
import runpy, sys, tempfile
from deepinfer.testing.tiny import write_tiny_checkpoint
model = sys.argv[1] or str(write_tiny_checkpoint(tempfile.mkdtemp()))
sys.argv = ["offline_inference.py", "--device", "cuda", "--model", model]
runpy.run_path({str(ROOT / "examples" / "offline_inference.py")!r}, run_name="__main__")
"""


def parts(out, model, prompts):
    """Name → (seconds at most, command), in order."""
    bench, python = ROOT / "benchmarks", (sys.executable, "-u")
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    check = (*python, str(CUDA / "sanitized.py"))
    engine = ("--parts", "prefill,offline", "--json", str(out / "cuda_engine.json"))
    found = {
        "bits": (150, (*PYTEST, str(CUDA / "test_gpu_bits.py"))),
        "faults": (120, (*PYTEST, *(str(CUDA / f"test_gpu_{n}.py") for n in ("faults", "host")))),
        "recorded": (240, (*PYTEST, str(CUDA / "test_gpu_recorded.py"))),
        "v41": (300, (*PYTEST, str(CUDA / "test_gpu_v41.py"))),
        "graphs": (60, (*PYTEST, str(CUDA / "test_gpu.py"), "-k", "graph")),
        "startup": (
            150,
            (*python, str(bench / "cuda_startup.py"), "--json", str(out / "cuda_startup.json")),
        ),
        "fp8": (
            120,
            (*python, str(bench / "cuda_fp8.py"), "--json", str(out / "cuda_fp8.json")),
        ),
        "example": (60, (*python, "-c", EXAMPLE, model or "")),
        "doctor": (150, (*python, "-m", "deepinfer", "doctor")),
        "memcheck": (
            200,
            (sanitizer, "--tool", "memcheck", "--error-exitcode", "9", *check, "100"),
        ),
        "racecheck": (200, (*python, str(CUDA / "racecheck.py"), "100")),
        "kit": (300, (*PYTEST, str(CUDA / "test_gpu.py"), "-k", "conformance")),
        "time": (
            300,
            (*python, str(bench / "cuda_check.py"), "--json", str(out / "cuda_check.json")),
        ),
        "engine": (
            240,
            (*python, str(bench / "cuda_engine.py"), *engine),
        ),
        "record": (100, (*python, str(CUDA / "record_bits.py"), str(out / "golden_bits.json"))),
    }
    if model:
        text = ("--parts", "text", "--model", model, "--json", str(out / "cuda_text.json"))
        found["text"] = (120, (*python, str(bench / "cuda_check.py"), *text))
    if model and prompts:
        how = ("--parts", "load", "--device", "cuda", "--concurrency", "16", "64", "--minutes", "4")
        where = ("--model", model, "--prompts", prompts, "--json", str(out / "speculative.json"))
        found["load"] = (420, (*python, str(bench / "speculative.py"), *how, *where))
    return found


OURS = ("deepinfer-core", "deepinfer-backend-cuda", "deepinfer-speculative")
DEFAULT = "bits,faults,graphs,startup,fp8,example,doctor,memcheck,racecheck,kit,time"


def install(wheels):
    """Core and plugins, as they lie here; first what a folder of wheels has that is missing."""
    pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps")
    if wheels:
        files = sorted(map(str, Path(wheels).glob("*.whl")))
        subprocess.run([*pip, "--no-index", *files], check=True)
    ours = [str(ROOT / name) for name in OURS]
    subprocess.run([*pip, "--no-build-isolation", *ours], check=True)


def run(name, limit, command, out):
    """One part; its output goes to ``gpu_check.log``, the end of it to the terminal."""
    print(f"== {name}", flush=True)
    began = time.perf_counter()
    with tempfile.TemporaryFile() as file:
        inside = subprocess.Popen(
            command, cwd=out, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = inside.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(inside.pid, signal.SIGKILL)
            inside.wait()
            code = "ran past its limit"
        file.seek(0)
        text = file.read().decode("utf-8", "replace")
    took = time.perf_counter() - began
    with (out / "gpu_check.log").open("a", encoding="utf-8") as log:
        log.write(f"== {name}\n{text}\n")
    print("\n".join(line[:300] for line in text.splitlines()[-18:]))
    print(f"-- {name}: {'ok' if code == 0 else code}, {took:.0f} s", flush=True)
    return {"code": code, "seconds": round(took, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "results"))
    parser.add_argument("--wheels")
    parser.add_argument("--installed", action="store_true", help="core and plugins are, already")
    parser.add_argument("--model", help="the demo model's GGUF file, for parts text and load")
    parser.add_argument("--prompts", help="a folder of prompts, for part load")
    parser.add_argument("--parts", default=DEFAULT)
    args = parser.parse_args()
    out = Path(args.out).resolve()
    known = parts(out, args.model, args.prompts)
    wanted = args.parts.split(",")
    missing = [name for name in wanted if name not in known]
    if missing:
        parser.error(f"--parts {','.join(missing)}: there are {', '.join(known)}.")
    out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    if not args.installed:
        install(args.wheels)
    print(f"-- install: {time.perf_counter() - began:.0f} s", flush=True)
    results = {"date": datetime.date.today().isoformat()}
    for name in wanted:
        results[name] = run(name, *known[name], out)
        (out / "gpu_check.json").write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    wrong = [n for n, found in results.items() if n != "date" and found["code"] != 0]
    print(f"-- {time.perf_counter() - began:.0f} s; failed: {', '.join(wrong) or 'nothing'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
