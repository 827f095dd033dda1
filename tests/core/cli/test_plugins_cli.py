"""``deepinfer plugins`` and ``deepinfer doctor``, against synthetic distributions."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from deepinfer import __version__
from deepinfer.api.backend import Impl
from deepinfer.cli import doctor as doctor_module
from deepinfer.cli.doctor import check_owners, check_plugins, check_settings, import_owners
from deepinfer.cli.doctor import doctor as doctor_command
from deepinfer.cli.hygiene import examine
from deepinfer.cli.plugins import plugins
from deepinfer.cli.scaffold import TemplateError, backend_name, write_backend
from deepinfer.discovery import Plugin, discover

GOOD = """
from deepinfer.api import BackendSpec, hookimpl
@hookimpl
def deepinfer_provide():
    return [BackendSpec(name="{name}", load="json:JSONDecoder", probe={probe})]
"""


@pytest.fixture
def add(tmp_path, monkeypatch):
    """Write a distribution that this process and its children find; returns its window's name."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def write(name: str, window: str, requires: str = "deepinfer-core>=0.1", version: str = "1.0"):
        module = f"window_{name}"
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir()
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(f"{head}Requires-Dist: {requires}\n")
        (info / "entry_points.txt").write_text(f"[deepinfer.v1]\n{name} = {module}\n")
        (folder / f"{module}.py").write_text(window)
        monkeypatch.delitem(sys.modules, module, raising=False)
        return module

    return write


def good(name: str, probe: str = "lambda: None") -> str:
    return GOOD.format(name=name, probe=probe)


def invoke(*args: str):
    return CliRunner().invoke(plugins, args)


def plugin(module: str) -> Plugin:
    return Plugin(name="x", value=module, distribution="x", version="1", api=1)


# --- list ------------------------------------------------------------------------------------


def test_list_shows_state_specs_and_reasons(add):
    add("zchip", good("zchip", "lambda: 'no such device'"))
    add("zbad", "import nowhere_at_all")
    add("zlate", "raise RuntimeError", requires="deepinfer-core>=99")
    result = invoke("list")
    assert result.exit_code == 0
    text = result.output
    assert f"core  (deepinfer-core {__version__}, API 1)  ready" in text
    assert "zbad  (zbad 1.0, API 1)  broken: its window window_zbad failed" in text
    assert "zlate  (zlate 1.0, API 1)  version: it requires deepinfer-core >=99" in text
    assert "unusable  no such device" in text


def test_list_as_json_is_plain_data(add):
    add("zchip", good("zchip"))
    rows = json.loads(invoke("list", "--json").output)
    [row] = [r for r in rows if r["name"] == "zchip"]
    assert row == {
        "name": "zchip", "distribution": "zchip", "version": "1.0", "api": 1,
        "requires": ["deepinfer-core>=0.1"], "state": "ready", "reason": "",
        "specs": [{
            "kind": "backend", "name": "zchip", "priority": 0, "offers": [], "needs": [],
            "state": "usable", "reason": "",
        }],
    }  # fmt: skip


def test_a_window_that_prints_does_not_spoil_the_json(add):
    add("zloud", good("zloud") + "print('hello')\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = run(env, "-m", "deepinfer", "plugins", "list", "--json", cwd=Path.cwd())
    assert json.loads(done.stdout)
    assert "hello" in done.stderr


def test_list_without_a_plugin(add):
    add("zchip", good("zchip"))
    [row] = [
        r
        for r in json.loads(invoke("list", "--json", "--no-plugin", "zchip").output)
        if r["name"] == "zchip"
    ]
    assert (row["state"], row["specs"]) == ("disabled", [])


# --- plugins doctor ----------------------------------------------------------------------------


def test_doctor_of_a_sound_plugin(add):
    add("zchip", good("zchip"))
    result = invoke("doctor", "zchip")
    assert result.exit_code == 0
    assert "leaves the host alone" in result.output
    assert "backend zchip: usable" in result.output
    assert f"deepinfer-core {__version__}" in result.output


@pytest.mark.parametrize(
    ("window", "text"),
    [
        ("import nowhere_at_all", "nowhere_at_all"),
        ("import os\nos._exit(7)", "ended with code 7"),
        (good("zsick", "lambda: 1 / 0"), "ZeroDivisionError"),
        (good("zsick") + "import wave, click\n", "click"),
    ],
    ids=["import error", "exit", "probe", "foreign import"],
)
def test_doctor_of_a_broken_plugin_ends_with_one(add, window, text):
    add("zsick", window)
    result = invoke("doctor", "zsick")
    assert result.exit_code == 1
    assert text in result.output
    assert "FAIL" in result.output


def test_doctor_examines_all_also_behind_a_broken_one(add):
    add("abad", "import nowhere_at_all")
    add("zchip", good("zchip"))
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "backend zchip: usable" in result.output


def test_doctor_of_a_version_that_does_not_fit_says_what_to_do(add):
    add("zlate", "raise RuntimeError", requires="deepinfer-core>=99")
    result = invoke("doctor", "zlate")
    assert result.exit_code == 1
    assert "next: Install versions" in result.output


def test_doctor_of_an_unknown_name_shows_the_near_one(add):
    add("zchip", good("zchip"))
    result = invoke("doctor", "zchp")
    assert result.exit_code == 1
    assert "Did you mean zchip?" in result.output


TOUCHES = {
    "environment variables: ZCHIP_SET": "import os\nos.environ['ZCHIP_SET'] = '1'\n",
    "signal handlers: SIGTERM": "import signal\nsignal.signal(15, lambda *_: None)\n",
    "logging: root handlers": "import logging\nlogging.basicConfig(level=10)\n",
    "logging: handlers of asyncio": (
        "import logging\nlogging.getLogger('asyncio').addHandler(logging.NullHandler())\n"
    ),
    "interpreter: sys.path": "import sys\nsys.path.append('/nowhere')\n",
    "interpreter: start method": (
        "import multiprocessing\nmultiprocessing.set_start_method('spawn')\n"
    ),
    "interpreter: thread count": (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    ),
    "more than the standard library and deepinfer.api: deepinfer.ops": "import deepinfer.ops\n",
    "it prints: 'hello": "print('hello')\n",
    "it removes modules: pluggy": "import sys\ndel sys.modules['pluggy']\n",
}


@pytest.mark.parametrize("text", TOUCHES)
def test_hygiene_names_what_an_import_touches(add, text):
    report = examine(plugin(add("zdirty", good("zdirty") + TOUCHES[text])))
    assert report.failure == ""
    assert any(text in sentence for sentence in report.touched), report


def test_hygiene_survives_a_window_that_hangs_or_kills(add):
    hangs = add("zhang", "import time\ntime.sleep(60)\n")
    assert "longer than 1 s" in examine(plugin(hangs), timeout=1).failure
    kills = add("zkill", "import os\nos.kill(os.getpid(), 9)\n")
    assert "code -9" in examine(plugin(kills)).failure


def test_hygiene_is_not_kept_by_a_probe_that_hangs(add):
    module = add("zslow", "import time\n" + good("zslow", "lambda: time.sleep(60)"))
    report = examine(plugin(module), probe_seconds=0.2)
    assert report.specs[0].state == "broken"
    assert "did not answer" in report.specs[0].reason


def test_cores_own_window_is_clean():
    [core] = [p for p in discover() if p.name == "core"]
    report = examine(core)
    assert (report.failure, report.touched) == ("", ())


# --- plugins new -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "name"),
    [("x/deepinfer-backend-my-chip", "my_chip"), ("mychip", "mychip"), ("./My.Chip/", "my_chip")],
)
def test_a_name_comes_from_the_folder(path, name):
    assert backend_name(path) == name


@pytest.mark.parametrize("name", ["", "9x", "My", "a-b", "class", "cpu", "core", "a b", "x" * 41])
def test_bad_names_are_refused_and_nothing_is_written(tmp_path, name):
    with pytest.raises(TemplateError, match="--name"):
        write_backend(str(tmp_path / "new"), name)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_holds_something_is_refused(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    result = invoke("new", "backend", str(tmp_path), "--name", "zchip")
    assert result.exit_code == 1
    assert "not empty" in result.output
    assert [p.name for p in tmp_path.iterdir()] == ["precious.txt"]


def test_an_installation_without_templates_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("deepinfer.cli.scaffold._TEMPLATES", tmp_path / "nowhere")
    with pytest.raises(TemplateError, match="reinstall"):
        write_backend(str(tmp_path / "zchip"), "zchip")


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "zchip").write_text("mine")
    assert invoke("new", "backend", str(tmp_path / "zchip")).exit_code == 2
    with pytest.raises(TemplateError, match="cannot be written"):
        write_backend(str(tmp_path / "zchip" / "below"), "zchip")


def test_the_template_is_a_whole_distribution(tmp_path):
    target = tmp_path / "deepinfer-backend-zchip"
    result = invoke("new", "backend", str(target))
    assert result.exit_code == 0
    assert "conformance --backend zchip" in result.output
    project = tomllib.loads((target / "pyproject.toml").read_text())["project"]
    assert project["name"] == "deepinfer-backend-zchip"
    minor = ".".join(__version__.split(".")[:2])
    assert f"deepinfer-core~={minor}" in project["dependencies"]
    assert project["entry-points"]["deepinfer.v1"] == {"zchip": "deepinfer_backend_zchip.plugin"}
    sources = sorted(target.rglob("*.py"))
    assert [p.name for p in sources] == [
        "__init__.py", "backend.py", "plugin.py", "test_conformance.py",
    ]  # fmt: skip
    for source in sources:
        text = source.read_text()
        compile(text, str(source), "exec")
        assert "$" not in text
        assert max(map(len, text.splitlines())) <= 100


def installed(tmp_path: Path) -> dict[str, str]:
    """The template, installed by pip into a folder; an environment that sees it."""
    source, site = tmp_path / "zchip", tmp_path / "installed"
    write_backend(str(source), "zchip")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*pip, "--no-index", "--disable-pip-version-check", "--target", str(site), str(source)],
        check=True,
        capture_output=True,
        timeout=300,
    )
    return {**os.environ, "PYTHONPATH": str(site)}


def run(env: dict[str, str], *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], env=env, cwd=cwd, capture_output=True, text=True, check=False
    )


needs_setuptools = pytest.mark.skipif(
    importlib.util.find_spec("setuptools") is None, reason="pip needs setuptools to build here"
)


@needs_setuptools
def test_the_template_installs_and_passes_the_doctor(tmp_path):
    done = run(installed(tmp_path), "-m", "deepinfer", "plugins", "doctor", "zchip", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "backend zchip: usable" in done.stdout


@needs_setuptools
@pytest.mark.slow
def test_the_template_passes_its_own_tests(tmp_path):
    done = run(installed(tmp_path), "-m", "pytest", "-q", cwd=tmp_path / "zchip")
    assert done.returncode == 0, done.stdout + done.stderr


# --- doctor ------------------------------------------------------------------------------------


def owner(folder: Path, name: str, version: str, *, top_level: bool) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("deepinfer/__init__.py,,\n")
    (folder / "deepinfer").mkdir(exist_ok=True)
    (folder / "deepinfer" / "__init__.py").touch()
    if top_level:
        (info / "top_level.txt").write_text("deepinfer\n")


def test_two_owners_of_the_import_name_are_named_with_what_to_do(tmp_path):
    owner(tmp_path, "deepinfer", "0.0.3", top_level=False)
    owner(tmp_path, "deepinfer_core", "0.1.0", top_level=True)
    path = [str(tmp_path)]
    assert import_owners("deepinfer", path) == {"deepinfer": "0.0.3", "deepinfer-core": "0.1.0"}
    [finding] = check_owners(path)
    assert finding.mark == "FAIL"
    assert "deepinfer 0.0.3" in finding.text
    assert "pip uninstall deepinfer;" in finding.next_step
    assert "--force-reinstall --no-deps deepinfer-core" in finding.next_step


def test_one_owner_is_fine_and_none_is_a_note(tmp_path):
    assert [f.mark for f in check_owners([str(tmp_path)])] == ["note"]
    owner(tmp_path, "deepinfer-core", "0.1.0", top_level=False)
    assert [f.mark for f in check_owners([str(tmp_path)])] == ["ok"]


def test_variables_that_are_unknown_or_cannot_be_read(monkeypatch):
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIAN", "1")
    monkeypatch.setenv("DEEPINFER_USE_NEXTN_DECODE", "many")
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", "1")
    findings = {f.text.split("=")[0].split(":")[0]: f.mark for f in check_settings()}
    assert findings["DEEPINFER_USE_NEXTN_DECODE"] == "FAIL"
    assert findings["DEEPINFER_BATCH_INVARIANT is set"] == "ok"
    [note] = [f.text for f in check_settings() if f.mark == "note"]
    assert "Did you mean DEEPINFER_BATCH_INVARIANT?" in note


def test_a_broken_plugin_fails_the_installation(add):
    add("zbad", "import nowhere_at_all")
    add("zsick", good("zsick", "lambda: 1 / 0"))
    failed = [f for f in check_plugins() if f.mark == "FAIL"]
    assert [f.next_step for f in failed] == [
        "deepinfer plugins doctor zbad",
        "deepinfer plugins doctor zsick",
    ]


def test_doctors_exit_code_follows_its_findings(add, monkeypatch):
    for name in [n for n in os.environ if n.startswith("DEEPINFER_")]:
        monkeypatch.delenv(name)
    sound = CliRunner().invoke(doctor_command, "--quick")
    assert ("FAIL" in sound.output) == (sound.exit_code == 1)
    add("zbad", "import nowhere_at_all")
    sick = CliRunner().invoke(doctor_command, "--quick")
    assert sick.exit_code == 1
    assert "next: deepinfer plugins doctor zbad" in sick.output


EXAMINED = """
from deepinfer.api import BackendSpec, hookimpl
def examine():
    yield "ok", "the driver is 7.5", ""
    yield "FAIL", "the device is upside down", "Turn it."
    {then}
@hookimpl
def deepinfer_provide():
    return [BackendSpec(name="zchip", load="{load}", doctor="window_zchip:examine",
                        probe=lambda: {probe!r})]
"""
SOUND = {"load": "deepinfer.ops.backend:ReferenceBackend", "probe": None, "then": ""}


def findings(add, monkeypatch, **more):
    """What the doctor says of one backend, beside core's, whose ops are not run."""
    add("zchip", EXAMINED.format(**{**SOUND, **more}))
    monkeypatch.setattr(doctor_module, "_ops", lambda name: iter(()))
    return [f for f in doctor_module.check_kernels() if "zchip" in f.text]


def test_a_backends_own_examination_is_shown_under_its_name(add, monkeypatch):
    first, second = findings(add, monkeypatch)
    assert (first.mark, first.text) == ("ok", "zchip: the driver is 7.5")
    assert (second.mark, second.next_step) == ("FAIL", "Turn it.")


def test_an_examination_that_ends_in_an_error_is_a_finding(add, monkeypatch):
    *_, last = findings(add, monkeypatch, then="raise OSError('the bus is gone')")
    assert last.mark == "FAIL" and "the bus is gone" in last.text


def test_a_backend_that_cannot_run_is_not_examined(add, monkeypatch):
    (only,) = findings(add, monkeypatch, probe="no such chip")
    assert (only.mark, only.text) == ("note", "zchip: cannot run here: no such chip")


def test_ops_are_compared_with_their_references(monkeypatch):
    from deepinfer.native.backend import NativeCPUBackend
    from deepinfer.testing import selftest

    sound = selftest.check_ops("cpu", seconds=0)
    assert sound.ran == sound.ops > 10 and sound.left > 0 and sound.wrong == ()
    real = NativeCPUBackend.provide

    def faulty(self, ctx):
        provided = dict(real(self, ctx))
        silu = provided["silu_mul"].fn
        return {**provided, "silu_mul": Impl(lambda *a, **k: silu(*a, **k) * 1.01)}

    monkeypatch.setattr(NativeCPUBackend, "provide", faulty)
    (said,) = selftest.check_ops("cpu", seconds=0).wrong
    assert said.startswith("silu_mul (") and "error" in said


def test_the_commands_files_load_nothing_heavy():
    program = (
        "import sys\nimport deepinfer.cli.plugins, deepinfer.cli.doctor\n"
        "heavy = 'torch numpy pluggy importlib_metadata packaging deepinfer.discovery'.split()\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = run(dict(os.environ), "-c", program, cwd=Path.cwd())
    assert done.stdout.strip() == "[]", done.stderr
