"""Rounds of drafts to calibrate confidences with: a workload, greedy and sampled, all verified.

Where you are: behind ``deepinfer speculative calibrate``. The engine runs here; the method's own
plugin fits and writes (``SpeculatorSpec.calibrate``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from deepinfer.api.calibration import CalibrationContext, DraftRounds
from deepinfer.api.specs import SpeculatorSpec
from deepinfer.entrypoints.llm import LLM
from deepinfer.entrypoints.speculation import speculator_name
from deepinfer.errors import ConfigError
from deepinfer.plugins import PluginManager
from deepinfer.sampling_params import SamplingParams
from deepinfer.testing.speculation import WatchingPlanner, usual_prompts

if TYPE_CHECKING:
    from deepinfer.api.calibration import Calibrate, Calibration
    from deepinfer.config import EngineConfig

WAYS: Final = {"greedy": 0.0, "sampled": 1.0}
"""Temperatures of the requests that each way is made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """``prompts``: texts, or conversations of one turn and more; none: those that ``deepinfer
    verify speculation`` runs. Each is answered ``samples`` times at temperature 1 and once
    greedily, with ``tokens`` at most.
    """

    prompts: Sequence[Any] = ()
    tokens: int = 128
    samples: int = 1


def calibrate(
    config: EngineConfig,
    work: Workload,
    out: Path | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Run the workload with raw confidences, and let the method's plugin fit and write.

    Args:
        out: the file to write; None: beside the draft's weights, where they lie in a folder.

    Raises:
        ConfigError: nothing speculates, the method has nothing to calibrate, there are too few
            rounds or no place for the file.
    """
    spec = _spec(config)
    asked = config.speculation()
    assert asked is not None, "who has a method speculates"
    _check_place(asked.model, spec, out)
    # Raw confidences, and nothing trimmed: what lies behind a round's end would be unknown.
    update = {"mode": "static", "options": {**asked.options, "calibration": "off"}}
    speculative = asked.model_copy(update=update)
    rounds = {}
    with LLM.from_config(config.model_copy(update={"speculative": speculative})) as llm:
        assert llm.assembly.resolution is not None, "an opened engine has chosen its plugins"
        part: Calibrate = llm.assembly.resolution.load(SpeculatorSpec.kind, "calibrate")
        for way, temperature in WAYS.items():
            tell(way)
            rounds[way] = _rounds(llm, work, temperature)
    return part(
        CalibrationContext(
            method=spec.name,
            model=asked.model,
            acceptance=asked.acceptance,
            rounds=rounds,
            out=out,
        )
    )


def _spec(config: EngineConfig) -> SpeculatorSpec:
    """The method that the configuration means, before anything is loaded."""
    from deepinfer.models.checkpoint import open_checkpoint
    from deepinfer.models.source import resolve

    manager = PluginManager(disable=config.disable_plugins)
    source = resolve(config.model, revision=config.revision, weights=False)
    name = speculator_name(manager, config, open_checkpoint(source, "dummy").config)
    if name is None:
        raise ConfigError("There is nothing to calibrate: no speculation.", setting="speculative")
    offers = [cast(SpeculatorSpec, o.spec) for o in manager.offers(SpeculatorSpec.kind)]
    (spec,) = [offer for offer in offers if offer.name == name]
    if not spec.calibrate:
        raise ConfigError(
            f"speculative: method {name!r} has no confidences that could be calibrated.",
            setting="speculative",
        )
    return spec


def _check_place(model: str | None, spec: SpeculatorSpec, out: Path | None) -> None:
    """Before anything runs: whether there is a folder to write to."""
    if out is not None and not out.absolute().parent.is_dir():
        raise ConfigError(
            f"{out} cannot be written: there is no folder {out.absolute().parent}.", setting="out"
        )
    if out is None and (model is None or not Path(model).is_dir()):
        carrying = "the target's checkpoint" if spec.carried else f"the package of {spec.name!r}"
        where = carrying if model is None else model
        raise ConfigError(
            f"The draft lies in {where}, which is no folder of yours to write to.",
            setting="out",
            next_step="Give --out FILE, and name it: --speculative …,calibration=FILE.",
        )


def _rounds(llm: LLM, work: Workload, temperature: float) -> DraftRounds:
    """The whole rounds of one pass over the workload."""
    scheduler = llm.assembly.engine.scheduler
    planner = scheduler.planner
    assert planner is not None, "a speculating engine has a planner"
    scheduler.planner = watching = WatchingPlanner(planner)
    try:
        _run(llm, work, temperature)
    finally:
        scheduler.planner = planner
    whole = [block for block in watching.seen.blocks if block[1] == planner.draft_len]
    return DraftRounds(
        confidence=np.array([b[0] for b in whole]).reshape(len(whole), planner.draft_len),
        accepted=np.array([b[2] for b in whole], np.int64),
    )


def _run(llm: LLM, work: Workload, temperature: float) -> None:
    given = list(work.prompts) or usual_prompts(llm)
    prompts = [prompt for prompt in given for _ in range(work.samples if temperature else 1)]

    def params(count: int) -> list[SamplingParams]:
        return [
            SamplingParams(temperature=temperature, seed=i, max_tokens=work.tokens)
            for i in range(count)
        ]

    def is_talk(prompt: Any) -> bool:
        return isinstance(prompt, list) and isinstance(prompt[0], dict)

    talks = [prompt for prompt in prompts if is_talk(prompt)]
    texts = [prompt for prompt in prompts if not is_talk(prompt)]
    outputs = llm.generate(texts, params(len(texts))) if texts else []
    outputs += llm.chat(talks, params(len(talks))) if talks else []
    for output in outputs:
        if output.error is not None:
            raise output.error
