"""Who speculates: from ``EngineConfig.speculative`` to a speculator's name, and to its planner.

Where you are: beside ``assemble``. The name is found before plugins are chosen (by the user's word,
by the draft checkpoint's architecture, or because the target carries a draft); the planner is
opened when the ranks run. The ranks open the drafter: ``worker.drafting``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from deepinfer import settings
from deepinfer.api.specs import SpeculatorSpec
from deepinfer.api.speculative import PlannerContext, StepShape
from deepinfer.errors import ConfigError, UnsupportedError
from deepinfer.resolution import Named

if TYPE_CHECKING:
    from deepinfer.api.executor import Executor, ModelFacts
    from deepinfer.api.speculative import DraftPlanner
    from deepinfer.config import EngineConfig, SpeculativeConfig
    from deepinfer.plugins import PluginManager, Resolution

_INSTALL = "Install the distribution deepinfer-speculative."


def speculator_name(
    manager: PluginManager, config: EngineConfig, raw: Mapping[str, Any]
) -> str | None:
    """The speculator that a configuration means for a target with this config.json; None: none.

    Raises:
        ConfigError: there is none, or it lacks an option or the rule that was asked for.
    """
    asked = config.speculation()
    if asked is None:
        return None
    specs = [cast(SpeculatorSpec, offer.spec) for offer in manager.offers(SpeculatorSpec.kind)]
    if not specs:
        raise UnsupportedError(
            "Speculative decoding was asked for, and no plugin here brings any.",
            setting="speculative",
            next_step=_INSTALL,
        )
    spec = _spec_of(asked, specs, raw)
    _check(asked, spec)
    return spec.name


def _spec_of(
    asked: SpeculativeConfig, specs: Sequence[SpeculatorSpec], raw: Mapping[str, Any]
) -> SpeculatorSpec:
    name = asked.method or asked.model
    for spec in specs:
        if spec.name == name:
            return spec
    known = ", ".join(spec.name for spec in specs)
    if asked.method is not None:
        near = difflib.get_close_matches(asked.method, [spec.name for spec in specs], 1)
        raise ConfigError(
            f"speculative: there is no method {asked.method!r}."
            + "".join(f" Did you mean {one!r}?" for one in near),
            setting="speculative",
            next_step=f"Known: {known}.",
        )
    if asked.model is not None:
        return _reader(asked.model, specs)
    text = raw.get("text_config")
    fields = {*raw, *(text if isinstance(text, Mapping) else ())}
    carried = [spec for spec in specs if fields & set(spec.carried)]
    if carried:
        return max(carried, key=lambda spec: spec.priority)
    variable = "DEEPINFER_ENABLE_MTP_VARLEN"
    who = f"{variable}=1" if settings.read(variable) else "speculative"
    meant = [
        f" Did you mean {near[0]!r} by {name!r}?"
        for name in sorted(asked.options)
        if (near := difflib.get_close_matches(name.lower(), type(asked).model_fields, 1))
    ]
    raise ConfigError(
        f"{who} asks for the draft that the checkpoint carries, and this one carries none."
        + "".join(meant),
        setting=variable if settings.read(variable) else "speculative",
        next_step=f"Name one: speculative=… with a draft checkpoint or one of {known}.",
    )


def _reader(model: str, specs: Sequence[SpeculatorSpec]) -> SpeculatorSpec:
    """Who reads a draft checkpoint, by the architecture in its config.json."""
    from deepinfer.models.checkpoint import open_checkpoint
    from deepinfer.models.registry import architectures_of
    from deepinfer.models.source import resolve

    raw = open_checkpoint(resolve(model, weights=False, setting="speculative"), "dummy").config
    mine = architectures_of(raw)
    fit = [spec for spec in specs if set(spec.architectures) & set(mine)]
    if fit:
        return max(fit, key=lambda spec: spec.priority)
    known = ", ".join(name for spec in specs for name in spec.architectures)
    raise ConfigError(
        f"No plugin here reads a draft of the architecture {', '.join(mine)} (model={model}).",
        setting="speculative",
        next_step=f"Known: {known or 'none'}.",
    )


def _check(asked: SpeculativeConfig, spec: SpeculatorSpec) -> None:
    """Options that the method does not have, and a rule that it does not keep, by name."""
    problems = []
    for name in sorted(set(asked.options) - set(spec.options)):
        near = difflib.get_close_matches(name, [*spec.options, *type(asked).model_fields], 1)
        hint = "".join(f" (did you mean {one!r}?)" for one in near)
        problems.append(f"method {spec.name!r} has no option {name!r}{hint}")
    if asked.acceptance == "ratio" and not spec.verifier:
        problems.append(f"method {spec.name!r} does not have acceptance='ratio'")
    if problems:
        raise ConfigError(
            f"speculative: {'; '.join(problems)}.",
            setting="speculative",
            next_step=f"Its options: {', '.join(spec.options) or 'none'}.",
        )


def open_planner(
    config: EngineConfig, resolution: Resolution, executor: Executor, facts: ModelFacts
) -> DraftPlanner | None:
    """The chosen planner, which may time steps on the ranks now; None where nobody speculates."""
    asked = config.speculation()
    if asked is None or not facts.draft_len:
        return None

    def measure(shapes: Sequence[StepShape]) -> list[float]:
        per_rank: list[list[float]] = executor.call("measure", shapes)
        return [max(times) for times in zip(*per_rank, strict=True)]

    chosen = resolution.get(SpeculatorSpec.kind)
    parts = (facts.fingerprint, facts.backend, facts.dtype, facts.page_size, config.quantization)
    threads, device = config.num_threads, executor.call("device")[0]
    planner = chosen.load_part("planner")(
        PlannerContext(
            method=chosen.name,
            mode=cast(Literal["static", "cap", "adaptive"], asked.mode),
            acceptance=asked.acceptance,
            draft_len=facts.draft_len,
            options=asked.options,
            max_num_seqs=config.max_num_seqs,
            max_tokens=config.max_num_batched_tokens or facts.step_tokens,
            identity=repr((*parts, threads, device, facts.kv.layout, chosen.name, chosen.version)),
            cache_dir=settings.cache_dir() / "speculative",
            measure=measure,
            graph_rows=facts.graph_rows,
        )
    )
    named: Any = Named(chosen, planner, "choose", "observe")
    return cast("DraftPlanner", named)
