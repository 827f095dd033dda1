"""The rules of choice, as pure functions over offers: who fits, who wins, what is missing.

The reader stands inside ``PluginManager.resolve``: probes have been answered elsewhere, and
everything here is decided from specs alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from deepinfer.api.specs import BackendSpec, ModelSpec, Spec
from deepinfer.discovery import Plugin
from deepinfer.errors import ConfigError, PluginError
from deepinfer.resolution import Chosen, Wanted


class Offer(NamedTuple):
    """A spec and the plugin that sells it."""

    spec: Spec
    plugin: Plugin

    def __str__(self) -> str:
        return f"{self.spec.kind} {self.spec.name!r} of {self.plugin}"


def orders(wanted: Wanted) -> list[tuple[str, Sequence[str] | None]]:
    """Each wanted kind with the names asked for; None asks for the best usable one."""
    kinds = dict(wanted.kinds)
    if wanted.architectures:
        kinds.setdefault(ModelSpec.kind, None)
    return [(kind, [n] if isinstance(n, str) else n) for kind, n in kinds.items()]


def unambiguous(offers: Sequence[Offer]) -> Sequence[Offer]:
    """The same offers of one kind; two with one name are refused, both owners named."""
    for one, two in pairwise(offers):
        if one.spec.name == two.spec.name:
            raise PluginError(
                f"{one.plugin} and {two.plugin} both sell the {one.spec.kind} {one.spec.name!r}.",
                setting=one.spec.kind,
                next_step="Uninstall or disable one of them.",
            )
    return offers


def fitting(offers: Sequence[Offer], wanted: Wanted) -> list[Offer]:
    """Backends for the wanted device, models for the wanted architecture; all of other kinds."""
    return [offer for offer in offers if _fits(offer.spec, wanted)]


def on_device(offer: Offer, wanted: Wanted) -> Offer:
    """The same offer; a backend named beside a device that is not its own is refused."""
    if isinstance(offer.spec, BackendSpec) and wanted.device not in (None, offer.spec.device_type):
        raise ConfigError(
            f"device={wanted.device!r} was asked for, and the {offer} runs on "
            f"{offer.spec.device_type!r}.",
            setting="device",
            next_step="Leave one of the two out.",
        )
    return offer


def _fits(spec: Spec, wanted: Wanted) -> bool:
    if isinstance(spec, BackendSpec) and wanted.device is not None:
        return spec.device_type == wanted.device
    if isinstance(spec, ModelSpec) and wanted.architectures:
        return not set(wanted.architectures).isdisjoint(spec.architectures)
    return True


def unread(offers: Sequence[Offer], architectures: Sequence[str]) -> str:
    known = sorted(
        {a for o in offers if isinstance(o.spec, ModelSpec) for a in o.spec.architectures}
    )
    near = [n for a in architectures for n in difflib.get_close_matches(a, known, n=2)]
    hint = f" Nearest: {listed(near)}." if near else ""
    return (
        f"No plugin here reads the architecture {listed(architectures)}.{hint}"
        f" Known: {listed(known)}."
    )


def highest(kind: str, offers: Sequence[Offer]) -> Offer:
    best = max(offer.spec.priority for offer in offers)
    ties = [offer for offer in offers if offer.spec.priority == best]
    if len(ties) > 1:
        raise PluginError(
            f"{' and '.join(map(str, ties))} have the same priority, {best}.",
            setting=kind,
            next_step=f"Name one {kind} in the configuration.",
        )
    return ties[0]


def missing(
    chosen: Sequence[Offer], required: frozenset[str], installed: Sequence[Offer]
) -> list[str]:
    """A sentence for each capability that is needed and that nothing chosen keeps."""
    asks = [("The configuration", need) for need in sorted(required)]
    asks += [(f"The {offer}", need) for offer in chosen for need in sorted(offer.spec.needs)]
    return [
        f"{who} needs {need!r}: {_held(need, chosen)}; {_elsewhere(need, installed)}."
        for who, need in asks
        if not any(_keeps(offer.spec, need) for offer in chosen)
    ]


def _keeps(spec: Spec, need: str) -> bool:
    kind, _, capability = need.rpartition(":")
    return capability in spec.offers and kind in ("", spec.kind)


def _held(need: str, chosen: Sequence[Offer]) -> str:
    kind = need.rpartition(":")[0]
    asked = [offer.spec for offer in chosen if kind in ("", offer.spec.kind)]
    held = [f"{s.kind} {s.name!r} offers {listed(sorted(s.offers))}" for s in asked if s.offers]
    return "; ".join(held) or f"no chosen {kind or 'spec'} offers anything"


def _elsewhere(need: str, offers: Sequence[Offer]) -> str:
    others = [f"{o.spec.kind} {o.spec.name!r}" for o in offers if _keeps(o.spec, need)]
    return f"installed and offering it: {listed(others)}"


def as_chosen(offer: Offer) -> Chosen:
    parts = offer.spec.parts()
    return Chosen(
        kind=offer.spec.kind,
        name=offer.spec.name,
        plugin=offer.plugin.name,
        distribution=offer.plugin.distribution,
        version=offer.plugin.version,
        load=next(iter(parts.values())),
        parts=parts,
        offers=offer.spec.offers,
    )


def lines(head: str, items: Sequence[str]) -> str:
    return "\n- ".join([head, *items])


def listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
