"""Loading and choosing, against synthetic distributions that are broken in every known way.

Each test writes dist-info folders and windows into ``tmp_path`` and shows a manager only that
path, so the outcome does not depend on what is installed.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
from deepinfer.api.specs import (
    API_VERSION,
    BackendSpec,
    ModelSpec,
    Spec,
    SpeculatorSpec,
    StoreSpec,
)
from deepinfer.discovery import discover
from deepinfer.errors import ConfigError, ModelLoadError, PluginError, UnknownPluginError
from deepinfer.plugins import PluginManager, Resolution, Wanted

HEAD = "from deepinfer.api import BackendSpec, ModelSpec, PolicySpec, hookimpl\n"


class Site:
    """A folder of distributions that exist only for one test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.prefix = "w" + "".join(c for c in folder.parent.name + folder.name if c.isalnum())

    def add(
        self,
        name: str,
        window: str | None,
        *,
        entry: str | None = None,
        version: str = "1.0",
        requires: str | None = "deepinfer-core>=0.1",
        group: str = "deepinfer.v1",
    ) -> str:
        """Write a distribution; return its window's module name (unique to the test)."""
        module = f"{self.prefix}_{name}"
        info = self.folder / f"{name}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {requires}"] if requires else []
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{entry or name} = {module}\n")
        if window is not None:
            (self.folder / f"{module}.py").write_text(HEAD + window)
        return module

    def manager(self, *, disable: tuple[str, ...] = (), probe_seconds: float = 5.0):
        return PluginManager(disable=disable, path=[str(self.folder)], probe_seconds=probe_seconds)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return Site(folder)


def sells(*specs: str) -> str:
    return f"@hookimpl\ndef deepinfer_provide(api):\n    return [{', '.join(specs)}]\n"


def backend(name: str, rest: str = "") -> str:
    return f'BackendSpec(name="{name}", load="json:JSONDecoder", {rest})'


def wants(name: str | None = None, *needs: str) -> Wanted:
    return Wanted(kinds={"backend": name}, needs=frozenset(needs))


def state(manager: PluginManager, name: str) -> tuple[str, str]:
    [plugin] = [p for p in manager.plugins if p.name == name]
    return plugin.state, plugin.reason


# --- specs ---------------------------------------------------------------------------------


def test_api_version_is_the_groups_major():
    assert API_VERSION[0] == 1


def test_a_spec_is_frozen_and_checks_its_load_path():
    spec = BackendSpec(name="x", load="a.b:C")
    with pytest.raises(FrozenInstanceError):
        spec.name = "y"  # type: ignore[misc]
    for bad in ("a.b", "a.b:", "a b:c", ":C", "a.b:C d", ""):
        with pytest.raises(ValueError, match=r"package\.module:attribute"):
            BackendSpec(name="x", load=bad)
    with pytest.raises(ValueError, match="needs a name"):
        BackendSpec(name="", load="a:b")
    with pytest.raises(ValueError, match="subclass"):
        Spec(name="x", load="a:b")


def test_specs_of_several_parts_name_each():
    speculator = SpeculatorSpec(name="s", planner="a:P", drafter="a:D", verifier="a:V")
    assert speculator.parts() == {"planner": "a:P", "drafter": "a:D", "verifier": "a:V"}
    assert "verifier" not in SpeculatorSpec(name="s", planner="a:P", drafter="a:D").parts()
    assert StoreSpec(name="h", load="a:S", worker="a:W").parts() == {"load": "a:S", "worker": "a:W"}


# --- what is installed -----------------------------------------------------------------------


def test_core_sells_its_own_rooms_through_the_same_hook(site):
    manager = site.manager()
    assert [p.name for p in manager.plugins] == ["core"]
    names = {(o.spec.kind, o.spec.name) for o in manager.offers()}
    assert {("backend", "reference"), ("backend", "cpu"), ("executor", "local")} <= names
    assert {("policy", "fcfs"), ("policy", "priority"), ("sampler", "gumbel")} <= names
    models = {a for o in manager.offers("model") for a in o.spec.architectures}
    assert {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3MoeForCausalLM"} <= models


def test_a_plugin_is_found_loaded_and_chosen_by_priority(site):
    site.add("chip", sells(backend("chip", "priority=50, offers=frozenset({'invariant'})")))
    resolution = site.manager().resolve(wants(None, "invariant"))
    choice = resolution.get("backend")
    assert (choice.name, choice.distribution, choice.version) == ("chip", "chip", "1.0")
    from json import JSONDecoder

    assert resolution.load("backend") is JSONDecoder


def test_another_major_is_listed_and_never_imported(site):
    module = site.add("future", "raise SystemExit('imported')\n", group="deepinfer.v2")
    manager = site.manager()
    assert state(manager, "future") == (
        "other-api",
        "installed, for API 2; this core speaks API 1",
    )
    assert module not in sys.modules
    with pytest.raises(PluginError, match="for API 2"):
        manager.resolve(wants("future"))


@pytest.mark.parametrize("requires", ["deepinfer-core>=99", "deepinfer_core ~= 0.0.1"])
def test_versions_are_compared_before_import(site, requires):
    module = site.add("late", "raise RuntimeError\n", requires=requires)
    manager = site.manager()
    assert state(manager, "late")[0] == "version"
    assert "this is" in state(manager, "late")[1]
    assert module not in sys.modules


def test_requirements_of_extras_and_markers_do_not_count(site):
    site.add("extra", sells(), requires='deepinfer-core>=99; extra == "all"')
    site.add("old", sells(), requires='deepinfer-core>=99; python_version < "3"')
    site.add("free", sells(), requires=None)
    assert {p.state for p in site.manager().plugins} == {"ready"}


def test_an_unreadable_requirement_is_a_fault_of_that_plugin(site):
    site.add("odd", sells(), requires="deepinfer-core >>> 1")
    assert state(site.manager(), "odd")[0] == "version"


def test_duplicate_names_are_refused_naming_both_distributions(site):
    first = site.add("one", sells(), entry="chip")
    site.add("two", sells(), entry="chip", version="2.0")
    manager = site.manager()
    with pytest.raises(PluginError, match=r"one 1\.0 and two 2\.0 both register 'chip'"):
        manager.resolve(Wanted(kinds={}))
    assert first not in sys.modules
    site.manager(disable=("two",)).resolve(Wanted(kinds={}))


def test_nobody_may_call_itself_core(site):
    site.add("thief", sells(), entry="core")
    with pytest.raises(PluginError, match="both register 'core'"):
        site.manager().resolve(Wanted(kinds={}))


def test_the_first_copy_of_a_distribution_on_the_path_wins(site, tmp_path):
    site.add("chip", sells(), version="2.0")
    shadow = Site(tmp_path / "shadow")
    shadow.folder.mkdir()
    shadow.add("chip", sells(), version="1.0")
    found = discover(path=[str(site.folder), str(shadow.folder)])
    assert [(p.name, p.version) for p in found if p.name != "core"] == [("chip", "2.0")]


def test_a_folder_without_metadata_does_not_stop_the_others(site):
    site.add("good", sells())
    site.add("torn", sells())
    (site.folder / "torn-1.0.dist-info" / "METADATA").unlink()
    assert state(site.manager(), "good")[0] == "ready"


@pytest.mark.parametrize("text", ["nonsense", "chip = no module!", " = x"])
def test_a_torn_entry_point_file_is_a_fault_of_its_own_plugin(site, text):
    site.add("good", sells())
    site.add("torn", sells())
    file = site.folder / "torn-1.0.dist-info" / "entry_points.txt"
    file.write_text(f"[deepinfer.v1]\n{text}\n")
    manager = site.manager()
    assert state(manager, "good")[0] == "ready"
    assert {p.state for p in manager.plugins if p.distribution == "torn"} == {"broken"}
    file.write_text("[console_scripts]\n" + text)  # nothing of ours: none of our business
    assert all(p.distribution != "torn" for p in site.manager().plugins)


def test_an_entry_point_may_name_extras_and_an_object(site):
    module = site.add("chip", "class Window:\n    @staticmethod\n    @hookimpl\n"
                      "    def deepinfer_provide():\n        return []\n")  # fmt: skip
    file = site.folder / "chip-1.0.dist-info" / "entry_points.txt"
    file.write_text(f"[deepinfer.v1]\nchip = {module}:Window [gpu]\n")
    assert state(site.manager(), "chip") == ("ready", "")


def test_a_disabled_plugin_is_not_imported(site):
    module = site.add("chip", "raise RuntimeError\n")
    for name in ("chip", "Chip"):  # by entry point; by distribution, as registries compare
        assert state(site.manager(disable=(name,)), "chip")[0] == "disabled"
    assert module not in sys.modules
    with pytest.raises(UnknownPluginError, match="disabled"):
        site.manager(disable=("chip",)).resolve(wants("chip"))


# --- broken windows --------------------------------------------------------------------------

BROKEN = {
    "import error": ("import nowhere_at_all\n", "nowhere_at_all"),
    "exit": ("import sys\nsys.exit(3)\n", "SystemExit"),
    "syntax": ("def (:\n", "SyntaxError"),
    "misspelt hook": ("@hookimpl\ndef deepinfer_provides(api): return []\n", "deepinfer_provides"),
    "unknown argument": (
        "@hookimpl\ndef deepinfer_provide(api, gpu): return []\n",
        "gpu",
    ),
    "no mark": ("def deepinfer_provide(api): return []\n", "no @hookimpl"),
    "no hook": ("x = 1\n", "implements no hook"),
    "provide raises": ("@hookimpl\ndef deepinfer_provide(): raise KeyError('oops')\n", "oops"),
    "no spec": ("@hookimpl\ndef deepinfer_provide(): return ['cuda']\n", "is no Spec"),
    "bad load path": (sells('BackendSpec(name="x", load="nothing")'), "must read"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_window_stays_in_its_own_record(site, caplog, case):
    window, trace = BROKEN[case]
    site.add("bad", window)
    site.add("good", sells(backend("good", "priority=99")))
    manager = site.manager()
    assert state(manager, "bad")[0] == "broken"
    assert state(manager, "good")[0] == "ready"

    with caplog.at_level(logging.DEBUG, logger="deepinfer"):
        for _ in range(2):  # not asked for: one warning, however often it is resolved
            assert manager.resolve(wants()).get("backend").name == "good"
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "plugins doctor bad" in caplog.text
    assert caplog.records[0].name == "deepinfer.plugins"

    with pytest.raises(PluginError, match=trace) as caught:  # asked for: its traceback
        manager.resolve(wants("bad"))
    assert "Traceback" in str(caught.value)


def test_an_unknown_name_shows_the_near_ones_and_who_may_be_its_broken_home(site):
    site.add("bad", "import nowhere_at_all\n")
    with pytest.raises(UnknownPluginError, match="Did you mean 'reference'") as caught:
        site.manager().resolve(wants("referense"))
    assert "nowhere_at_all" in str(caught.value)


def test_a_plugin_may_take_fewer_arguments_than_the_hook_offers(site):
    site.add(
        "small",
        "@hookimpl\ndef deepinfer_provide():\n    yield PolicySpec(name='p', load='a:b')\n",
    )
    assert "p" in {o.spec.name for o in site.manager().offers("policy")}


# --- probes ----------------------------------------------------------------------------------

PROBES = """
import time
def raises(): raise OSError("no driver")
def hangs(): time.sleep(3)
def exits(): raise SystemExit(1)
def wrong(): return False
def absent(): return "no such device here"
"""


@pytest.mark.parametrize(
    ("name", "reason"),
    [("raises", "no driver"), ("hangs", "did not answer"), ("exits", "SystemExit"),
     ("wrong", "neither None nor a reason")],
)  # fmt: skip
def test_a_broken_probe(site, caplog, name, reason):
    specs = backend("bad", f"priority=99, probe={name}"), backend("ok", "priority=50")
    site.add("chip", PROBES + sells(*specs))
    manager = site.manager(probe_seconds=0.2)
    start = time.monotonic()
    assert manager.resolve(wants()).get("backend").name == "ok"
    assert time.monotonic() - start < 2.5
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert reason in caplog.text
    with pytest.raises(PluginError, match=reason) as caught:
        manager.resolve(wants("bad"))
    assert name == "wrong" or f"in {name}" in str(caught.value)  # where it raised, or hangs
    [hung] = [t for t in threading.enumerate() if "probe-bad" in t.name] or [None]
    if hung is not None:
        hung.join()


def test_an_unusable_spec_is_no_fault_and_gives_its_reason_when_asked_for(site, caplog):
    site.add("chip", PROBES + sells(backend("chip", "priority=99, probe=absent")))
    manager = site.manager()
    assert manager.resolve(wants()).get("backend").name in ("reference", "cpu")
    assert not caplog.records
    with pytest.raises(PluginError, match="no such device here"):
        manager.resolve(wants("chip"))


def test_a_probe_is_asked_once_and_not_at_all_when_another_is_named(site):
    site.add(
        "chip",
        "calls = []\ndef count(): calls.append(1)\n"
        + sells(backend("chip", "priority=99, probe=count")),
    )
    manager = site.manager()
    window = sys.modules[f"{site.prefix}_chip"]
    manager.resolve(wants("reference"))
    assert window.calls == []
    manager.resolve(wants())
    manager.resolve(wants())
    assert window.calls == [1]


# --- choice and negotiation --------------------------------------------------------------------


def test_equal_priorities_are_an_error_that_names_both(site):
    site.add("left", sells(backend("left", "priority=70")))
    site.add("right", sells(backend("right", "priority=70")))
    manager = site.manager()
    with pytest.raises(PluginError, match="same priority, 70") as caught:
        manager.resolve(wants())
    assert "'left'" in str(caught.value)
    assert "'right'" in str(caught.value)
    assert manager.resolve(wants("left")).get("backend").name == "left"


def test_two_plugins_that_sell_one_name_are_refused(site):
    site.add("mine", sells(backend("reference")))
    with pytest.raises(PluginError, match=r"deepinfer-core.* and .*mine.* both sell the backend"):
        site.manager().resolve(wants("reference"))


def test_missing_capabilities_are_refused_all_at_once(site):
    site.add(
        "spec",
        sells('PolicySpec(name="greedy", load="a:b", needs=frozenset({"backend:taps", "json"}))')
        + "@hookimpl\ndef deepinfer_check(config, chosen):\n"
        "    return ['It is ' + config + '.'] + ['No ' + k for k in chosen]\n",
    )
    site.add("rich", sells(backend("rich", "priority=-9, offers=frozenset({'fp8'})")))
    wanted = Wanted(
        kinds={"backend": "reference", "policy": "greedy"}, needs=frozenset({"fp8", "invariant"})
    )
    with pytest.raises(ConfigError) as caught:
        site.manager().resolve(wanted, "raining")
    message = str(caught.value)
    for part in ("'fp8'", "'backend:taps'", "'json'", "It is raining.", "No policy", "'rich'"):
        assert part in message
    assert "needs 'invariant'" not in message


def test_a_qualified_need_is_not_met_by_another_kind(site):
    site.add("p", sells('PolicySpec(name="p", load="a:b", offers=frozenset({"fp8"}))'))
    kinds = {"backend": "reference", "policy": "p"}
    manager = site.manager()
    manager.resolve(Wanted(kinds=kinds, needs=frozenset({"fp8"})))
    with pytest.raises(ConfigError, match="backend:fp8"):
        manager.resolve(Wanted(kinds=kinds, needs=frozenset({"backend:fp8"})))


def test_a_device_rules_out_backends_of_others(site):
    site.add("npu", sells(backend("npu", 'priority=99, device_type="npu"')))
    manager = site.manager()
    for device, name in (("npu", "npu"), ("cpu", None)):
        chosen = manager.resolve(Wanted(kinds={"backend": None}, device=device)).get("backend")
        assert (chosen.name == "npu") == (name == "npu")
    with pytest.raises(ConfigError, match="runs on 'npu'"):
        manager.resolve(Wanted(kinds={"backend": "npu"}, device="cpu"))
    with pytest.raises(PluginError, match="No backend can run here on device 'cuda'"):
        manager.resolve(Wanted(kinds={"backend": None}, device="cuda"))


def test_a_check_that_raises_counts_only_against_a_plugin_that_was_chosen(site, caplog):
    check = "@hookimpl\ndef deepinfer_check(): raise KeyError('in check')\n"
    site.add("chip", sells(backend("chip")) + check)
    manager = site.manager()
    manager.resolve(wants("reference"))
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    with pytest.raises(PluginError, match="in check"):
        manager.resolve(wants("chip"))


def test_a_plugin_may_choose_but_not_against_the_users_word(site):
    site.add(
        "judge",
        sells(backend("low", "priority=-5"))
        + "@hookimpl\ndef deepinfer_choose(kind, candidates, config):\n"
        "    return min(candidates, key=lambda s: s.priority) if kind == 'backend' else None\n",
    )
    manager = site.manager()
    assert manager.resolve(wants()).get("backend").name == "low"
    assert manager.resolve(wants("reference")).get("backend").name == "reference"


@pytest.mark.parametrize(("body", "text"), [("return 3", "no candidate"), ("1/0", "ZeroDivision")])
def test_a_choice_that_is_none_of_the_candidates(site, body, text):
    site.add("judge", sells() + f"@hookimpl\ndef deepinfer_choose(candidates): {body}\n")
    with pytest.raises(PluginError, match=text):
        site.manager().resolve(wants())


def test_models_are_chosen_by_architecture(site):
    site.add("m", sells('ModelSpec(name="tiny", load="a:b", architectures=("TinyForCausalLM",))'))
    manager = site.manager()
    for architecture, name in (("TinyForCausalLM", "tiny"), ("Qwen3ForCausalLM", "qwen3")):
        wanted = Wanted(kinds={}, architectures=(architecture,))
        assert manager.resolve(wanted).get("model").name == name
    named = Wanted(kinds={"model": "tiny"}, architectures=("OtherForCausalLM",))
    assert manager.resolve(named).get("model").name == "tiny"


def test_an_unknown_architecture_shows_the_known_and_the_near_ones(site):
    with pytest.raises(ModelLoadError) as caught:
        site.manager().resolve(Wanted(kinds={}, architectures=("Qwen3NextForCausalLM",)))
    message = str(caught.value)
    assert "Qwen3NextForCausalLM" in message
    assert "Nearest: Qwen3ForCausalLM" in message
    assert "MistralForCausalLM" in message.partition("Known:")[2]


def test_the_engines_configuration_says_what_it_wants():
    from deepinfer.config import EngineConfig

    config = EngineConfig(model="x", backend="reference", batch_invariant=True, device="cpu")
    wanted = Wanted.by(config, ["LlamaForCausalLM"])
    assert wanted.needs == {"backend:invariant"}
    resolution = PluginManager(path=[]).resolve(wanted, config)
    kinds = {c.kind: c.name for c in resolution.chosen}
    assert kinds == {
        "backend": "reference", "policy": "fcfs", "executor": "local", "sampler": "gumbel",
        "model": "llama",
    }  # fmt: skip


def test_observers_of_a_failing_plugin_are_left_out_with_one_warning(site, caplog):
    watch = "@hookimpl\ndef deepinfer_observers(config): {}\n"
    site.add("good", sells() + watch.format("return [config]"))
    site.add("bad", sells() + watch.format("raise KeyError('in observers')"))
    manager = site.manager()
    assert manager.observers("me") == ["me"]
    assert manager.observers("me") == ["me"]
    assert [r.levelname for r in caplog.records] == ["WARNING"]


def test_two_managers_share_nothing(site):
    site.add("chip", sells(backend("chip")))
    one, two = site.manager(), site.manager(disable=("chip",))
    assert one.resolve(wants("chip")).get("backend").name == "chip"
    with pytest.raises(PluginError):
        two.resolve(wants("chip"))


# --- the resolution in other processes ---------------------------------------------------------


def chip_resolution(site: Site) -> Resolution:
    site.add("chip", sells(backend("chip")))
    return site.manager().resolve(
        Wanted(kinds={"backend": "chip", "policy": None}, architectures=("LlamaForCausalLM",))
    )


def test_a_resolution_survives_pickle_and_names_its_parts(site):
    resolution = chip_resolution(site)
    assert pickle.loads(pickle.dumps(resolution)) == resolution
    assert resolution.all("grammar") == ()
    with pytest.raises(PluginError, match="No grammar was asked for"):
        resolution.get("grammar")
    with pytest.raises(PluginError, match="no part 'worker'"):
        resolution.load("backend", "worker")
    with pytest.raises(FrozenInstanceError):
        resolution.chosen = ()  # type: ignore[misc]


def test_a_load_path_that_fails_names_the_choice(site):
    site.add("chip", sells('BackendSpec(name="chip", load="nowhere_at_all:X")'))
    resolution = site.manager().resolve(wants("chip"))
    with pytest.raises(PluginError, match=r"chip 1\.0 was chosen.*nowhere_at_all"):
        resolution.load("backend")


def test_several_stores_keep_their_order(site):
    store = 'StoreSpec(name="{0}", load="json:JSONDecoder", worker="json:JSONEncoder")'
    site.add(
        "tiers",
        "from deepinfer.api import StoreSpec\n" + sells(store.format("disk"), store.format("host")),
    )
    resolution = site.manager().resolve(Wanted(kinds={"store": ("host", "disk")}))
    assert [c.name for c in resolution.all("store")] == ["host", "disk"]
    from json import JSONEncoder

    assert resolution.load("store", "worker") is JSONEncoder


def test_no_names_are_no_stores(site):
    assert site.manager().resolve(Wanted(kinds={"store": ()})).all("store") == ()


def test_what_is_not_chosen_is_not_imported(site):
    for name in ("left", "right"):
        (site.folder / f"{site.prefix}_{name}_backend.py").write_text("class Backend: pass\n")
        load = f"{site.prefix}_{name}_backend:Backend"
        site.add(name, sells(f'BackendSpec(name="{name}", load="{load}", priority=80)'))
    resolution = site.manager().resolve(wants("left"))
    assert not {m for m in sys.modules if m.endswith("_backend") and m.startswith(site.prefix)}
    resolution.load("backend")
    assert f"{site.prefix}_left_backend" in sys.modules
    assert f"{site.prefix}_right_backend" not in sys.modules


def test_a_spawned_child_has_the_same_set_or_stops_with_both_lists(site):
    resolution = chip_resolution(site)
    for want, code in ((resolution, 0), (_older(resolution), 1)):
        child = multiprocessing.get_context("spawn").Process(target=want.verify_same)
        child.start()
        child.join(60)
        assert child.exitcode == code


def test_a_fresh_interpreter_loads_what_the_parent_chose(site):
    program = (
        "import pickle, sys\nr = pickle.load(sys.stdin.buffer)\nr.verify_same()\n"
        "print(r.load('backend').__name__, [m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps(chip_resolution(site)),
        env={**os.environ, "PYTHONPATH": str(site.folder)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.decode().strip() == "JSONDecoder []", done.stderr.decode()


def test_other_versions_are_shown_side_by_side(site):
    resolution = chip_resolution(site)
    resolution.verify_same(path=[str(site.folder)])
    with pytest.raises(PluginError, match=r"There: chip 0\.9, .*Here: chip 1\.0, "):
        _older(resolution).verify_same(path=[str(site.folder)])
    with pytest.raises(PluginError, match="chip not installed"):
        resolution.verify_same(path=[])
    with pytest.raises(PluginError, match=r"There: .*deepinfer-core 0\.0\.1"):
        Resolution((), core="0.0.1").verify_same()


def _older(resolution: Resolution) -> Resolution:
    return Resolution(
        tuple(
            replace(c, version="0.9") if c.distribution == "chip" else c for c in resolution.chosen
        )
    )


# --- hygiene -----------------------------------------------------------------------------------


def test_opening_all_windows_loads_nothing_heavy(site):
    site.add("chip", sells(backend("chip", "priority=99")))
    program = (
        "import sys\nfrom deepinfer.plugins import PluginManager, Wanted\n"
        "r = PluginManager().resolve(Wanted(kinds={'backend': 'chip', 'sampler': None}))\n"
        "import deepinfer.builtin as b\nb.native_kernels()\n"
        "heavy = ('torch', 'numpy', 'pydantic', 'deepinfer.native.loader', 'deepinfer.ops')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(site.folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_a_model_spec_is_told_apart_by_type():
    spec = ModelSpec(name="m", load="a:b", architectures=("X",))
    assert (spec.kind, spec.priority, spec.probe()) == ("model", 0, None)


def test_a_disabled_name_that_nothing_has_is_refused(tmp_path):
    """A slip of the pen would leave the plugin in; core's own rooms cannot be left out."""
    for name in ("nosuch", "core"):
        with pytest.raises(UnknownPluginError, match=f"disable_plugins names {name}"):
            discover([name], path=[str(tmp_path)])
