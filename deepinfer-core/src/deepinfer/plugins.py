"""The choice among what plugins sell: every engine has a ``PluginManager`` of its own.

The reader stands between configuration and engine. ``discovery`` found and judged what is
installed; here the windows are opened, probed, chosen from and checked, and the answer leaves as
a ``Resolution``. Nothing here runs in a step, and there is no global manager.
"""

from __future__ import annotations

import difflib
import logging
import traceback
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from deepinfer.api.specs import ModelSpec
from deepinfer.choice import (
    Offer,
    as_chosen,
    fitting,
    highest,
    lines,
    listed,
    missing,
    on_device,
    orders,
    unambiguous,
    unread,
)
from deepinfer.discovery import Availability, Plugin, discover, new_pluggy, opened, probe
from deepinfer.errors import ConfigError, ModelLoadError, PluginError, UnknownPluginError
from deepinfer.resolution import Chosen, Resolution, Wanted

__all__ = ["Chosen", "Offer", "PluginManager", "Resolution", "Wanted"]

logger: Final = logging.getLogger(__name__)


class PluginManager:
    """The plugins of one engine; two managers share nothing.

    Args:
        disable: plugins that stay out, by entry-point or distribution name.
        path: where to look for metadata instead of ``sys.path``.
        probe_seconds: how long one probe may take.
    """

    def __init__(
        self,
        *,
        disable: Iterable[str] = (),
        path: Sequence[str] | None = None,
        probe_seconds: float = 5.0,
    ) -> None:
        self._registry = new_pluggy()
        self._probe_seconds = probe_seconds
        self._probed: dict[tuple[str, str, str], Availability] = {}
        self._warned: set[str] = set()
        self.plugins = tuple(opened(p, self._registry) for p in discover(disable, path))

    def offers(self, kind: str | None = None) -> list[Offer]:
        """What the open windows sell (of one kind), in order of kind and name."""
        every = [Offer(spec, plugin) for plugin in self.plugins for spec in plugin.specs]
        wanted = [offer for offer in every if kind in (None, offer.spec.kind)]
        return sorted(wanted, key=lambda offer: (offer.spec.kind, offer.spec.name))

    def available(self, offer: Offer) -> Availability:
        """The probe's answer; it is asked once per manager."""
        key = (offer.plugin.name, offer.spec.kind, offer.spec.name)
        if key not in self._probed:
            self._probed[key] = probe(offer.spec, self._probe_seconds)
        return self._probed[key]

    def resolve(self, wanted: Wanted, config: Any = None) -> Resolution:
        """Choose, compare capabilities, ask every ``deepinfer_check``.

        Args:
            wanted: what the engine asks for.
            config: handed to the hooks as it is.

        Raises:
            PluginError: what was asked for is broken, ambiguous or cannot run here.
            UnknownPluginError: nothing here has a name that was asked for.
            ModelLoadError: nobody reads the checkpoint's architecture.
            ConfigError: capabilities are missing or plugins object; all sentences at once.
        """
        self._refuse_duplicates()
        chosen = [
            offer
            for kind, names in orders(wanted)
            for offer in self._choose(kind, names, wanted, config)
        ]
        problems = [
            *missing(chosen, wanted.needs, self.offers()),
            *self._objections(chosen, config),
        ]
        if problems:
            raise ConfigError(lines("This combination cannot be kept:", problems))
        self._warn_of_faults()
        return Resolution(tuple(as_chosen(offer) for offer in chosen))

    def observers(self, config: Any = None) -> list[object]:
        """All plugins' observers. A plugin that fails here is warned of and left out."""
        found: list[object] = []
        for plugin in self._ready():
            answers, trace = self._ask(plugin, "deepinfer_observers", {"config": config})
            found += answers
            if trace:
                self._warn(plugin, f"its deepinfer_observers raised: {_last(trace)}")
        return found

    def _choose(
        self, kind: str, names: Sequence[str] | None, wanted: Wanted, config: Any
    ) -> list[Offer]:
        """An offer for each name, or the best usable one where names are left open."""
        offers = unambiguous(self.offers(kind))
        if names is not None:
            named = [self._named(kind, name, offers) for name in names]
            return [self._pick(kind, [on_device(o, wanted)], config) for o in named]
        fit = fitting(offers, wanted)
        if not fit and kind == ModelSpec.kind:
            raise ModelLoadError(lines(unread(offers, wanted.architectures), self._faults()))
        able = [offer for offer in fit if self.available(offer).state == "usable"]
        if not able and kind in wanted.optional:
            return []
        if not able:
            reasons = [f"{offer}: {self.available(offer).reason}." for offer in fit]
            where = f" on device {wanted.device!r}" if wanted.device else ""
            items = [*(reasons or [f"No plugin here has a {kind} for it."]), *self._faults()]
            raise PluginError(lines(f"No {kind} can run here{where}.", items), setting=kind)
        return [self._pick(kind, able, config)]

    def _named(self, kind: str, name: str, offers: Sequence[Offer]) -> Offer:
        """The offer that the configuration names; its fault is the user's business at once."""
        for offer in offers:
            if offer.spec.name == name:
                return self._insist(offer)
        for plugin in self.plugins:
            if plugin.name == name and plugin.state != "ready":
                disabled = plugin.state == "disabled"
                error = UnknownPluginError if disabled else PluginError
                raise error(_fault(plugin), setting=kind, next_step=_doctor(plugin))
        known = [offer.spec.name for offer in offers]
        near = "".join(f"Did you mean {n!r}? " for n in difflib.get_close_matches(name, known, 1))
        head = f"No plugin here has a {kind} called {name!r}. {near}Known: {listed(known)}."
        raise UnknownPluginError(lines(head, self._faults()), setting=kind)

    def _insist(self, offer: Offer) -> Offer:
        answer = self.available(offer)
        if answer.state == "broken":
            raise PluginError(
                f"The {offer} was asked for and is broken: {answer.reason}.\n{answer.trace}",
                setting=offer.spec.kind,
                next_step=_doctor(offer.plugin),
            )
        if answer.state == "unusable":
            raise PluginError(
                f"The {offer} was asked for and cannot run here: {answer.reason}.",
                setting=offer.spec.kind,
                next_step="Name another, or none to take the best usable one.",
            )
        return offer

    def _pick(self, kind: str, offers: Sequence[Offer], config: Any) -> Offer:
        """One of several usable offers: plugins may say; core's own answer comes last."""
        candidates = [offer.spec for offer in offers]
        try:
            answer = self._registry.hook.deepinfer_choose(
                kind=kind, candidates=candidates, config=config
            )
        except Exception as why:
            raise PluginError(f"A plugin's deepinfer_choose for {kind} raised {why!r}.") from why
        if answer is None:
            return highest(kind, offers)
        for offer in offers:
            if offer.spec is answer:
                return offer
        raise PluginError(
            f"A plugin's deepinfer_choose for {kind} returned {answer!r}, which is no candidate."
        )

    def _objections(self, chosen: Sequence[Offer], config: Any) -> list[str]:
        """All plugins' sentences; an exception counts only against a plugin that was chosen."""
        specs = MappingProxyType({offer.spec.kind: offer.spec for offer in reversed(chosen)})
        sentences: list[str] = []
        for plugin in self._ready():
            answers, trace = self._ask(
                plugin, "deepinfer_check", {"config": config, "chosen": specs}
            )
            sentences += map(str, answers)
            if trace and any(offer.plugin is plugin for offer in chosen):
                raise PluginError(f"The deepinfer_check of {plugin} raised.\n{trace}")
            if trace:
                self._warn(plugin, f"its deepinfer_check raised: {_last(trace)}")
        return sentences

    def _ask(
        self, plugin: Plugin, hook: str, arguments: Mapping[str, Any]
    ) -> tuple[list[Any], str]:
        """One plugin's answers to a hook of many results, and its traceback if it raised."""
        everybody = self._registry.list_name_plugin()
        others = [window for name, window in everybody if name != plugin.name]
        try:
            results = self._registry.subset_hook_caller(hook, others)(**arguments)
            return [x for r in results for x in ([r] if isinstance(r, str) else r)], ""
        except Exception:
            return [], traceback.format_exc()

    def _refuse_duplicates(self) -> None:
        reasons = sorted({p.reason for p in self.plugins if p.state == "duplicate"})
        if reasons:
            raise PluginError(
                f"Two plugins have one name: {'; '.join(reasons)}.",
                next_step="Uninstall one of them, or disable it by its distribution's name.",
            )

    def _ready(self) -> list[Plugin]:
        return [plugin for plugin in self.plugins if plugin.state == "ready"]

    def _faults(self) -> list[str]:
        return [_fault(plugin) for plugin in self.plugins if plugin.faulty]

    def _warn_of_faults(self) -> None:
        """What is broken and was not asked for: one warning for each plugin, once."""
        for plugin in self.plugins:
            if plugin.faulty:
                self._warn(plugin, plugin.reason)
        for offer in self.offers():
            answer = self._probed.get((offer.plugin.name, offer.spec.kind, offer.spec.name))
            if answer is not None and answer.state == "broken":
                self._warn(offer.plugin, f"{offer.spec.kind} {offer.spec.name!r}: {answer.reason}")

    def _warn(self, plugin: Plugin, reason: str) -> None:
        if plugin.name not in self._warned:
            self._warned.add(plugin.name)
            logger.warning("%s is left out: %s. %s", plugin, reason, _doctor(plugin))


def _fault(plugin: Plugin) -> str:
    return f"{plugin} cannot be used: {plugin.reason}." + f"\n{plugin.trace}" * bool(plugin.trace)


def _doctor(plugin: Plugin) -> str:
    return f"Run `deepinfer plugins doctor {plugin.name}`."


def _last(trace: str) -> str:
    return trace.strip().rpartition("\n")[2]
