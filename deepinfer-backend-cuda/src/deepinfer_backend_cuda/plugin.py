"""The window: one backend for ``--device cuda``. Standard library and ``deepinfer.api`` only."""

from __future__ import annotations

from deepinfer.api import BackendSpec, Spec, hookimpl

from deepinfer_backend_cuda.probe import why_not


@hookimpl
def deepinfer_provide() -> list[Spec]:
    """Above core's CPU backends in priority: where a GPU can be used, it is."""
    return [
        BackendSpec(
            name="cuda",
            load="deepinfer_backend_cuda.backend:CudaBackend",
            device_type="cuda",
            priority=20,
            probe=why_not,
            offers=frozenset({"invariant", "fp8"}),
            doctor="deepinfer_backend_cuda.doctor:examine",
        )
    ]
