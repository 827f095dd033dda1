"""What an engine asks of the plugins, and the frozen answer that every process loads from.

The parent resolves once (``plugins.PluginManager.resolve``); workers get the ``Resolution`` by
pickle, call ``verify_same`` and import by path, so every process runs the same set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepinfer.discovery import CORE, CORE_VERSION, import_path, installed_version
from deepinfer.errors import DeepInferError, PluginError

if TYPE_CHECKING:
    from deepinfer.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What an engine asks for.

    Attributes:
        kinds: kind -> a name, several names (tiers, in order; none is none), or None for the best
            usable one.
        architectures: of the checkpoint; if given, a ``model`` that reads one of them is chosen.
        optional: kinds that an engine goes without where nothing usable is installed.
        device: a ``torch.device`` type; only backends for it are candidates.
        needs: capabilities that the configuration insists on: "invariant", "backend:int8", ...
    """

    kinds: Mapping[str, str | Sequence[str] | None]
    architectures: Sequence[str] = ()
    optional: frozenset[str] = frozenset()
    device: str | None = None
    needs: frozenset[str] = frozenset()

    @classmethod
    def by(
        cls, config: EngineConfig, architectures: Sequence[str], speculator: str | None = None
    ) -> Wanted:
        """What a configuration wants for a checkpoint of these architectures, and the speculator
        where it speculates.
        """
        return cls(
            kinds={
                "backend": config.backend,
                "policy": config.scheduling_policy,
                "executor": config.executor,
                "sampler": None,
                **({} if speculator is None else {"speculator": speculator}),
                "grammar": config.grammar_backend,
            },
            optional=frozenset({"grammar"}),
            architectures=tuple(architectures),
            device=config.device,
            needs=frozenset(f"backend:{need}" for need in config.needs()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """One chosen spec as names only. ``load`` is the first of its ``parts`` (field -> path).

    ``plugin`` is its entry point's name, under which ``plugin_config`` speaks to it.
    """

    kind: str
    name: str
    plugin: str
    distribution: str
    version: str
    load: str
    parts: Mapping[str, str]
    offers: frozenset[str] = frozenset()

    def load_part(self, part: str | None = None) -> Any:
        """Import what stands behind ``load``, or behind another part ("worker", "drafter")."""
        if part is not None and part not in self.parts:
            raise PluginError(f"{self} has no part {part!r}; it has {', '.join(self.parts)}.")
        path = self.load if part is None else self.parts[part]
        try:
            return import_path(path)
        except Exception as why:
            raise PluginError(f"{self} was chosen, but {path} failed with {why!r}.") from why

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} of {self.distribution} {self.version}"


class Named:
    """What a plugin has made, whose errors say whose they are: those of the methods ``calls``."""

    def __init__(self, chosen: Chosen, made: Any, *calls: str) -> None:
        self._made = made
        for call in calls:
            setattr(self, call, self._naming(chosen, call))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)

    def _naming(self, chosen: Chosen, call: str) -> Callable[..., Any]:
        def asked(*args: Any) -> Any:
            try:
                return getattr(self._made, call)(*args)
            except (DeepInferError, MemoryError):
                raise
            except Exception as why:
                if type(why).__name__ == "OutOfMemoryError":  # torch's, which is not loaded here
                    raise
                raise PluginError(f"{chosen} raised {why!r} in {call}.") from why

        return asked


@dataclass(frozen=True, slots=True)
class Resolution:
    """The choice, made once by the parent; the other processes load from it and decide nothing.

    ``core`` is the version of the parent's core, which travels with the choice.
    """

    chosen: tuple[Chosen, ...]
    core: str = CORE_VERSION

    def all(self, kind: str) -> tuple[Chosen, ...]:
        """Every choice of a kind in the configured order; empty where none was asked for."""
        return tuple(c for c in self.chosen if c.kind == kind)

    def get(self, kind: str) -> Chosen:
        """The first choice of a kind; PluginError where none was asked for."""
        for choice in self.all(kind):
            return choice
        kinds = ", ".join(dict.fromkeys(c.kind for c in self.chosen))
        raise PluginError(f"No {kind} was asked for when plugins were chosen, only {kinds}.")

    def load(self, kind: str, part: str | None = None) -> Any:
        """Import what stands behind the first choice of a kind (or behind one of its parts)."""
        return self.get(kind).load_part(part)

    def versions(self) -> dict[str, str]:
        """Distribution -> version of core and of everything chosen."""
        return {CORE: self.core} | {c.distribution: c.version for c in self.chosen}

    def verify_same(self, path: Sequence[str] | None = None) -> None:
        """Stop a process that finds other versions, with both lists; reads metadata only."""
        there = self.versions()
        here = {name: installed_version(name, path) for name in there}
        if there != here:
            raise PluginError(
                "This process finds other plugins than the one that started it. "
                f"There: {_versions(there)}. Here: {_versions(here)}.",
                next_step="Start all processes from the same environment.",
            )


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
