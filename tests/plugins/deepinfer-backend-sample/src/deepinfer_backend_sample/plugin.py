"""The window: what this plugin sells. Standard library and ``deepinfer.api`` only."""

from __future__ import annotations

from importlib.util import find_spec

from deepinfer.api import BackendSpec, Spec, hookimpl


def can_run() -> str | None:
    """None, or why it cannot run here. Looks without importing."""
    missing = [name for name in ("numpy", "torch") if find_spec(name) is None]
    return f"{' and '.join(missing)} is not installed" if missing else None


@hookimpl
def deepinfer_provide() -> list[Spec]:
    """One backend, taken only when asked for: its priority is below those of core's."""
    return [
        BackendSpec(
            name="sample",
            load="deepinfer_backend_sample.backend:SampleBackend",
            device_type="cpu",
            priority=-1,
            probe=can_run,
        )
    ]
