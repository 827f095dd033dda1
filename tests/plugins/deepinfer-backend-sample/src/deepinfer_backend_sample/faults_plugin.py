"""The window of the faulty twins: test material for the conformance kit, never for use."""

from __future__ import annotations

from deepinfer.api import BackendSpec, Spec, hookimpl

from deepinfer_backend_sample.plugin import can_run

FAULTS = {
    "sample-wrong-tie": "WrongTie",
    "sample-neighbour": "Neighbour",
    "sample-spill": "Spill",
    "sample-leak": "Leak",
    "sample-deaf": "Deaf",
    "sample-modest": "Modest",
}


@hookimpl
def deepinfer_provide() -> list[Spec]:
    """A backend for each fault, with priorities that no choice without a name falls to."""
    backends = [
        BackendSpec(
            name=name,
            load=f"deepinfer_backend_sample.faults:{attribute}Backend",
            device_type="cpu",
            priority=-100 - i,
            probe=can_run,
        )
        for i, (name, attribute) in enumerate(FAULTS.items())
    ]
    absent = BackendSpec(
        name="sample-absent",
        load="deepinfer_backend_sample.nowhere:Backend",
        priority=-200,
        probe=lambda: "its device is not in this machine",
    )
    return [*backends, absent]
