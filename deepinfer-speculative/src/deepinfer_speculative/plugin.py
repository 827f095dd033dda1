"""The window: what ``speculative=…`` can name. Standard library and ``deepinfer.api`` only."""

from __future__ import annotations

from typing import Final

from deepinfer.api import Spec, SpeculatorSpec, hookimpl

PLANNER: Final = "deepinfer_speculative.planner:Planner"
RATIO: Final = "deepinfer_speculative.ratio:RatioVerifier"
PLANNING: Final = ("costs", "profile_seconds", "min_gain", "walk")
"""Options of the planner, which every method has."""
CALIBRATE: Final = "deepinfer_speculative.calibrate:calibrate"
SURE: Final = ("draft_sampling", "calibration")
"""Options of drafts that have a distribution, and confidences."""
DRAWING: Final = (*SURE, "draft_candidates")


@hookimpl
def deepinfer_provide() -> list[Spec]:
    """One speculator for each way to draft; planner and rules are the same."""
    return [
        SpeculatorSpec(
            name="ngram",
            planner=PLANNER,
            drafter="deepinfer_speculative.ngram:NgramDrafter",
            verifier=RATIO,
            options=(*PLANNING, "prompt_lookup_max", "prompt_lookup_min"),
        ),
        SpeculatorSpec(
            name="dspark",
            planner=PLANNER,
            drafter="deepinfer_speculative.dspark.drafter:DSparkDrafter",
            verifier=RATIO,
            calibrate=CALIBRATE,
            options=(*PLANNING, *DRAWING, "draft_weights"),
            architectures=("Qwen3DSparkModel", "LlamaDSparkModel"),
        ),
        SpeculatorSpec(
            name="dspark-demo",
            planner=PLANNER,
            drafter="deepinfer_speculative.dspark.shipped:ShippedDrafter",
            verifier=RATIO,
            calibrate=CALIBRATE,
            options=(*PLANNING, *DRAWING, "draft_weights"),
        ),
        SpeculatorSpec(
            name="eagle3",
            planner=PLANNER,
            drafter="deepinfer_speculative.eagle3.drafter:Eagle3Drafter",
            verifier=RATIO,
            options=(*PLANNING, *SURE),
            calibrate=CALIBRATE,
            architectures=(
                "LlamaForCausalLMEagle3",
                "Eagle3LlamaForCausalLM",
                "Eagle3Speculator",
                "Eagle3DraftModel",
            ),
        ),
        SpeculatorSpec(
            name="mtp",
            planner=PLANNER,
            drafter="deepinfer_speculative.dspark.v41:CarriedDrafter",
            verifier=RATIO,
            options=(*PLANNING, *DRAWING),
            carried=("dspark_block_size",),
            calibrate=CALIBRATE,
        ),
    ]
