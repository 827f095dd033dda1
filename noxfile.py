"""The only door: ``python -m nox`` lints, types, tests, runs the plugins and builds the wheels.

``nox -l`` lists the sessions; ``nox -s tests -- -k paging`` hands arguments to pytest. ``types``,
``tests``, ``plugins``, ``docs`` and ``bench`` share one environment (``.nox/core``), so that torch
is installed once; ``dist`` and ``lowest`` make their own, because that is what they test.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tomllib
from pathlib import Path

import nox

ROOT = Path(__file__).parent
CORE = ROOT / "deepinfer-core"
CUDA = ROOT / "deepinfer-backend-cuda"
STRUCTURED = ROOT / "deepinfer-structured"
SPECULATIVE = ROOT / "deepinfer-speculative"
SAMPLE = ROOT / "tests" / "plugins" / "deepinfer-backend-sample"
SHARED = ROOT / ".nox" / "core"
CONSTRAINTS = ROOT / "constraints.txt"
KIT = ("-m", "pytest", "-q", "--pyargs", "deepinfer.testing.conformance")
DOCS = ("tests/house/test_docs.py", "tests/house/test_contract.py")
QUICK = "not slow and not network and not gpu and not npu and not browser"
# Two workers take half the time of one; each holds about 1.5 GB. Neighbours in a file mostly stay
# together, and with them what they share.
SPLIT = ("-n", "auto", "--maxprocesses", "4", "--dist", "worksteal")
# A process for each core: torch's own threads would only wait for each other (measured: half of the
# session's time). What tests say of several threads they set themselves.
ALONE = {"OMP_NUM_THREADS": "1"}
TRITON = "triton>=3.6,<3.7"
# xgrammar asks for Triton (285 MB), which only its CUDA kernels import: it is installed without,
# and what else it and deepinfer-structured need is named here.
XGRAMMAR = "xgrammar>=0.2.9"
GRAMMAR_NEEDS = (
    "apache-tvm-ffi>=0.1.11",
    "jsonschema>=4.23",
    "referencing>=0.35",
    "regex>=2024.11.6",
)
PEERS = ("transformers==5.24.0", "nemo-automodel==0.7.0")

nox.needs_version = ">=2024.4"
GOLDEN = ROOT.parent / "shared" / "golden" / "deepseek-v41"
SUITE = ROOT.parent / "shared" / "data" / "json-schema-test-suite"

nox.options.sessions = ["lint", "types", "tests", "plugins", "kernels", "dist"]
if GOLDEN.is_dir():
    nox.options.sessions.append("golden")
if SUITE.is_dir():
    nox.options.sessions.append("structured_coverage")
nox.options.error_on_external_run = True
nox.options.reuse_venv = "no"


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """ruff check and ruff format; then what has grown past its aim (reported, not enforced)."""
    session.install("-c", str(CONSTRAINTS), "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("python", "tests/house/sizes.py")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """mypy over the package; strict where pyproject.toml says so."""
    python = shared(session)
    where = (
        "deepinfer-core/src/deepinfer",
        "deepinfer-backend-cuda/src/deepinfer_backend_cuda",
        "deepinfer-structured/src/deepinfer_structured",
        "deepinfer-speculative/src/deepinfer_speculative",
    )
    session.run(python, "-m", "mypy", *where, external=True)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Everything that is neither slow nor in need of a device or a network."""
    # Where the golden data lie beside us, the session `golden` runs that folder: once is enough.
    once = ["--ignore=tests/core/models/deepseek_v41"] if GOLDEN.is_dir() else []
    where = session.posargs or [*SPLIT, "tests", "--ignore=tests/plugins", *once, "-m", QUICK]
    env = {} if session.posargs else ALONE
    session.run(shared(session), "-m", "pytest", "-q", *where, external=True, env=env)


@nox.session(venv_backend="none", default=False)
def golden(session: nox.Session) -> None:
    """DeepSeek-V4.1 on the golden configurations that a clone does not hold.

    ``nox -s golden -- PATH`` names their folder; without a path it is the one beside the workspace,
    and CI runs the session where that is there.
    """
    where = session.posargs or ([str(GOLDEN)] if GOLDEN.is_dir() else [])
    if not where:
        session.skip("give the folder of the golden configurations: nox -s golden -- PATH")
    folder = "tests/core/models/deepseek_v41"
    run = ("-m", "pytest", "-q", *SPLIT, folder, "--golden", where[0])
    session.run(shared(session), *run, external=True, env=ALONE)


@nox.session(venv_backend="none", default=False)
def structured_coverage(session: nox.Session) -> None:
    """The JSON Schema Test Suite: no invalid instance accepted, and the numbers as published.

    ``nox -s structured_coverage -- PATH`` names its folder; without a path it is the one beside the
    workspace, and CI runs the session where that is there.
    """
    where = session.posargs or ([str(SUITE)] if SUITE.is_dir() else [])
    if not where:
        session.skip("give the folder of the suite: nox -s structured_coverage -- PATH")
    script = ("benchmarks/structured_coverage.py", *where, "--check")
    session.run(shared(session), *script, external=True)


@nox.session(default=False)
def oracle(session: nox.Session) -> None:
    """DeepSeek-V4.1 against other people's code: nemo-automodel, and transformers' DeepSeek-V4.

    ``nox -s oracle -- PATH`` names the folder of the golden configurations that a clone does not
    hold, as for ``golden``. nemo-automodel declares what training on a cluster takes; its model on
    a CPU imports torch and transformers alone, hence no dependencies.
    """
    session.install(f"{CORE}[test]", PEERS[0], env=bound())
    session.install("--no-deps", PEERS[1], env=bound())
    where = session.posargs or ([str(GOLDEN)] if GOLDEN.is_dir() else [])
    more = ("--golden", where[0]) if where else ()
    session.run("python", "-m", "pytest", "-q", "tests/oracle", "-m", "oracle", *more)


@nox.session(venv_backend="none")
def plugins(session: nox.Session) -> None:
    """The conformance kit on core's backends and on the sample plugin; faults must be named."""
    python = shared(session)
    for backend in ("reference", "cpu"):
        session.run(python, *KIT, "--backend", backend, external=True)
    install = (python, "-m", "pip", "install", "-qq", "--no-deps")
    session.run(*install, str(SAMPLE), external=True, env=bound())
    try:
        session.run(python, *KIT, "--backend", "sample", external=True)
        session.run(python, "-m", "pytest", "-q", "tests/plugins", external=True)
    finally:
        gone = (python, "-m", "pip", "uninstall", "-q", "-y", "deepinfer-backend-sample")
        session.run(*gone, external=True)


@nox.session(venv_backend="none")
def kernels(session: nox.Session) -> None:
    """Triton kernels without a GPU: on the interpreter, and compiled for SM90 and SM100.

    A case of each op and a variant of each kernel, two minutes; ``nox -s kernels -- -m "not gpu"``
    runs all of both. Triton lies beside the shared environment, not in it: the other sessions are
    to find out what happens without it.
    """
    python, folder = shared(session), ROOT / ".nox" / "triton"
    if not (folder / "triton").is_dir():
        target = ("install", "-qq", "--no-deps", "--target", str(folder))
        session.run(python, "-m", "pip", *target, TRITON, external=True, env=bound())
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    where = (*SPLIT, "tests/cuda", "-m", "not gpu and not slow", *session.posargs)
    env = {"PYTHONPATH": path, **ALONE}
    session.run(python, "tests/cuda/tested.py", external=True, env=env)  # or the tests skip
    session.run(python, "-m", "pytest", "-q", *where, external=True, env=env)


@nox.session(venv_backend="none", default=False)
def gpu(session: nox.Session) -> None:
    """On a machine with an NVIDIA GPU, in the Python that runs nox: install, check, time.

    Nothing is fetched: torch, Triton and what core needs must be there. Ten minutes; the numbers go
    to ``benchmarks/results``. A machine without nox runs the script itself.
    """
    script = ("benchmarks/gpu_check.py", *session.posargs)
    session.run(sys.executable, *script, external=True)


@nox.session(default=False)
def browser(session: nox.Session) -> None:
    """The server's page in a headless Chromium: $CHROMIUM, the system's, or playwright's own.

    And a thousand requests by schemathesis.
    """
    session.install(f"{CORE}[test]", "playwright>=1.40", "schemathesis>=4.0", env=bound())
    where = ("tests/core/server/test_page.py", "tests/core/server/test_fuzz.py")
    session.run("python", "-m", "pytest", "-q", *where, *session.posargs)


@nox.session(venv_backend="none", default=False)
def docs(session: nox.Session) -> None:
    """The part of ``tests`` that reads documents: links, README snippets, the settings page."""
    session.run(shared(session), "-m", "pytest", "-q", *DOCS, external=True)


@nox.session
def dist(session: nox.Session) -> None:
    """Build the wheels, install them in an empty environment, run the README's first example."""
    wheels = ROOT / "dist"
    shutil.rmtree(wheels, ignore_errors=True)
    session.install("build", env=bound())
    for project in (CORE, STRUCTURED, SPECULATIVE):
        build = ("-m", "build", "-q", "-o", str(wheels), str(project))
        session.run("python", *build, env=bound())
    built = [str(path) for path in wheels.glob("*.whl")]
    session.install("--no-compile", *built, env=bound())
    outside = session.create_tmp()  # so that the checkout is not what gets imported
    with session.chdir(outside):
        session.run(
            "deepinfer", "generate", "--model", "demo", "--chat", "What is the capital of France?"
        )
        session.run("python", str(ROOT / "examples" / "offline_inference.py"))
        session.run("python", str(ROOT / "examples" / "_structured_output.py"), "--samples", "1")
        session.run("deepinfer", "plugins", "list")


@nox.session(default=False)
def lowest(session: nox.Session) -> None:
    """The tests against the oldest versions that pyproject.toml allows.

    torch stays at the version of constraints.txt: its oldest allowed one is no CPU build everywhere
    and would pull gigabytes. Needs Python 3.11 or 3.12 (older numpy has no later wheels).
    """
    limits = Path(session.create_tmp()) / "lowest.txt"
    limits.write_text("\n".join(lower_bounds()) + "\n", "utf-8")
    session.install("-c", str(limits), f"{CORE}[test]", env={"PIP_CONSTRAINT": str(limits)})
    session.run("python", "-m", "pip", "list")
    where = session.posargs or [
        "tests",
        "--ignore=tests/plugins",
        "--ignore=tests/structured",
        "-m",
        QUICK,
    ]
    session.run("python", "-m", "pytest", "-q", *where)


@nox.session(venv_backend="none", default=False)
def bench(session: nox.Session) -> None:
    """``deepinfer bench`` on the demo model; its arguments follow ``--``."""
    session.run(shared(session), "-m", "deepinfer", "bench", *session.posargs, external=True)


@nox.session(venv_backend="none", default=False)
def bench_v41(session: nox.Session) -> None:
    """Prefill and memory of a tiny DeepSeek-V4.1, minutes; the numbers go to benchmarks/results."""
    python = shared(session)
    for name in ("v41_memory", "v41_prefill"):
        to = f"benchmarks/results/{name}.json"
        session.run(python, f"benchmarks/{name}.py", "--json", to, *session.posargs, external=True)


def shared(session: nox.Session) -> str:
    """The Python of the shared environment, brought up to date first.

    It is made anew when metadata, pins or the interpreter changed. When only a C source did, core
    alone is installed again, which compiles it.
    """
    python = SHARED / ("Scripts" if os.name == "nt" else "bin") / "python"
    # Most of what is installed is never imported: byte code is made of what is.
    install = (str(python), "-m", "pip", "install", "-qq", "--no-compile")
    made = [project / "pyproject.toml" for project in (CORE, STRUCTURED, SPECULATIVE)]
    pins = [*made, CORE / "setup.py", CONSTRAINTS]
    if stale("made-from", pins):
        session.run(sys.executable, "-m", "venv", "--clear", str(SHARED), external=True)
        wanted = (f"{CORE}[test,transformers]", "mypy")
        more = (*GRAMMAR_NEEDS, "-e", str(SPECULATIVE))
        session.run(*install, "-e", *wanted, *more, external=True, env=bound())
        grammar = ("--no-deps", XGRAMMAR, "-e", str(STRUCTURED))
        session.run(*install, *grammar, external=True, env=bound())
        note("made-from", pins)
    elif stale("compiled-from", native()):
        session.run(*install, "--no-deps", "-e", str(CORE), external=True, env=bound())
    note("compiled-from", native())
    return str(python)


def native() -> list[Path]:
    """The C sources."""
    folder = CORE / "src" / "deepinfer" / "native"
    return sorted([*folder.glob("*.c"), *folder.glob("*.h")])


def stale(stamp: str, files: list[Path]) -> bool:
    """Whether the shared environment was made from other contents of these files."""
    path = SHARED / stamp
    return not path.is_file() or path.read_text("utf-8") != fingerprint(files)


def note(stamp: str, files: list[Path]) -> None:
    """Remember what it was made from."""
    (SHARED / stamp).write_text(fingerprint(files), "utf-8")


def fingerprint(files: list[Path]) -> str:
    """Of the files' contents and the interpreter."""
    parts = [path.read_bytes() for path in files if path.is_file()]
    return hashlib.sha256(b"\0".join([sys.version.encode(), *parts])).hexdigest()


def lower_bounds() -> list[str]:
    """``numpy>=1.26`` as ``numpy==1.26.0``; torch as constraints.txt has it."""
    project = tomllib.loads((CORE / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    lines = [line for line in CONSTRAINTS.read_text("utf-8").splitlines() if line[:5] == "torch"]
    for text in wanted:
        match = re.fullmatch(r"([A-Za-z0-9_-]+)>=([0-9.]+)", text.strip())
        if match is None:
            raise ValueError(f"{text!r} states no lower bound that could be tested")
        if match[1] != "torch":
            lines.append(f"{match[1]}=={match[2]}")
    return lines


def bound() -> dict[str, str]:
    """The pins, for pip and for the environments in which pip builds; for this command only."""
    return {"PIP_CONSTRAINT": str(CONSTRAINTS)}
