"""The shop window: what a plugin says it sells, before any of it is imported.

A plugin's ``plugin.py`` returns these specs from ``deepinfer_provide``; core reads them, probes
them, chooses among them, and only then imports what stands behind ``load``. Standard library
only, so a window stays light on a machine that lacks the plugin's platform.

Growth: within one major version of the API, fields are only added and always have a default.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final

API_VERSION: Final = (1, 0)
"""(major, minor). The major is also the entry-point group: ``deepinfer.v1``."""

_LOAD_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def usable() -> str | None:
    """The default probe: runs anywhere."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One thing that a plugin can do. Use a subclass: its ``kind`` says for which room.

    Attributes:
        name: what users write in the configuration; unique within its kind.
        load: ``package.module:attribute``, imported when chosen, in each process that needs it.
        priority: the highest usable one is taken when the configuration names none. Core's own
            rooms lie between 0 and 10; two equal highest priorities are an error, not a coin toss.
        probe: returns None, or one sentence why this cannot run here. It is called with a time
            limit and must not raise, wait, print, or import a heavy library: look with
            ``importlib.util.find_spec`` or ``ctypes``. One that raises or hangs is a broken plugin.
        offers: capabilities that it keeps ("invariant", "int8", "taps", "json", "regex", ...).
        needs: capabilities that something chosen must offer for this to work. ``"invariant"``
            asks it of any chosen spec, ``"backend:invariant"`` of the chosen spec of that kind.
    """

    kind: ClassVar[str] = ""

    name: str
    load: str
    priority: int = 0
    probe: Callable[[], str | None] = usable
    offers: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not self.kind:
            raise ValueError(f"{type(self).__name__} has no kind: use a subclass of Spec.")
        if not self.name:
            raise ValueError(f"A {type(self).__name__} needs a name.")
        for part, path in self.parts().items():
            if not _LOAD_PATH.fullmatch(path):
                raise ValueError(
                    f"{type(self).__name__} {self.name!r}: {part}={path!r} must read "
                    "'package.module:attribute'."
                )

    def parts(self) -> dict[str, str]:
        """Every load path by the name of its field; most specs have the one."""
        return {"load": self.load}


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSpec(Spec):
    """A ``deepinfer.api.backend.Backend`` class: ops for one kind of device.

    Attributes:
        device_type: its ``torch.device`` type; a configured device rules the others out.
        doctor: a function without arguments that examines driver, device and kernels;
            ``deepinfer doctor`` calls it where the backend can run. It yields (mark, sentence, what
            to do next or ""); marks are ``ok``, ``note`` and ``FAIL``, which needs repair.
    """

    kind: ClassVar[str] = "backend"

    device_type: str = "cpu"
    doctor: str = ""

    def parts(self) -> dict[str, str]:
        return {"load": self.load, **({"doctor": self.doctor} if self.doctor else {})}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(Spec):
    """A ``ModelAdapter`` class.

    Attributes:
        architectures: names in a checkpoint's ``architectures`` that it reads.
    """

    kind: ClassVar[str] = "model"

    architectures: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec(Spec):
    """A scheduling ``Policy`` class: order, victim, budget. Brain side: no torch behind it."""

    kind: ClassVar[str] = "policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSpec(Spec):
    """A ``Sampler`` class: one id per row of logits."""

    kind: ClassVar[str] = "sampler"


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec(Spec):
    """A ``GrammarBackend`` class; ``offers`` names what it can enforce ("json", "regex", ...)."""

    kind: ClassVar[str] = "grammar"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculatorSpec(Spec):
    """Speculative decoding, in parts with a load path each; ``load`` stays unused.

    Attributes:
        planner: the ``DraftPlanner`` (brain side: no torch behind it).
        drafter: the ``Drafter`` (rank side).
        verifier: the ``Verifier`` of the ratio rule (rank side), called with a
            ``VerifierContext``; empty where only core's equality rule is kept.
        options: names of further options (``speculative={"method": …, NAME: …}``) that it takes;
            core refuses others by name.
        architectures: of draft checkpoints (``model=``) that it reads.
        carried: fields of a target's config.json; a target that has one carries this draft with
            it, so that it is found without a name.
        calibrate: an ``api.calibration.Calibrate``, where confidences can be calibrated; then
            ``options`` has ``calibration``, and its value ``off`` gives raw confidences.
    """

    kind: ClassVar[str] = "speculator"

    load: str = ""
    planner: str
    drafter: str
    verifier: str = ""
    options: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    calibrate: str = ""

    def parts(self) -> dict[str, str]:
        parts = {"planner": self.planner, "drafter": self.drafter}
        more = {"verifier": self.verifier, "calibrate": self.calibrate}
        return parts | {name: path for name, path in more.items() if path}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpec(Spec):
    """A KV tier or peer: ``load`` is the ``KVStore`` (brain side).

    Attributes:
        worker: the ``StoreWorker`` that moves one rank's pages (rank side).
    """

    kind: ClassVar[str] = "store"

    worker: str

    def parts(self) -> dict[str, str]:
        return {"load": self.load, "worker": self.worker}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorSpec(Spec):
    """An ``Executor`` class: where the ranks run and how plans reach them."""

    kind: ClassVar[str] = "executor"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommSpec(Spec):
    """A ``Communicator`` class.

    Attributes:
        device_types: ``torch.device`` types whose tensors it carries.
    """

    kind: ClassVar[str] = "comm"

    device_types: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec(Spec):
    """A ``Router`` class: which replica takes a request. Brain side: no torch behind it."""

    kind: ClassVar[str] = "router"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeSpec(Spec):
    """A :class:`deepinfer.recipes.Recipe` class, made with its options as keywords.

    Attributes:
        about: one line for lists.
    """

    kind: ClassVar[str] = "recipe"

    about: str = ""
