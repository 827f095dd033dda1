"""Every error that DeepInfer raises on purpose.

Each carries a stable ``code``, the ``setting`` or field at fault where there is one, and the
``next_step`` that usually helps. Standard library only: any room may import this file.
"""

from __future__ import annotations


class DeepInferError(Exception):
    """Base of all errors raised on purpose.

    Args:
        message: what happened and where, one sentence.
        setting: the argument, field or file that is at fault, if one is.
        next_step: what the reader can do about it.
    """

    code = "error"

    def __init__(
        self, message: str, *, setting: str | None = None, next_step: str | None = None
    ) -> None:
        self.message = message
        self.setting = setting
        self.next_step = next_step
        super().__init__(message if next_step is None else f"{message} {next_step}")


class ConfigError(DeepInferError, ValueError):
    """An engine argument or an environment variable that cannot be honoured."""

    code = "config"


class InvalidRequestError(DeepInferError, ValueError):
    """A prompt or a sampling parameter that cannot be honoured; only its own request fails."""

    code = "invalid_request"


class UnsupportedError(ConfigError):
    """Something that is known and refused by name because it is not built (yet, or here)."""

    code = "unsupported"


class ModelNotFoundError(DeepInferError, FileNotFoundError):
    """No model lies at the path, hub id or source that was named."""

    code = "model_not_found"


class ModelLoadError(DeepInferError):
    """A checkpoint exists and cannot be loaded: cut short, misshaped, unknown architecture."""

    code = "model_load"


class TokenizerError(DeepInferError):
    """A tokenizer or a chat template is missing or cannot be read."""

    code = "tokenizer"


class PluginError(DeepInferError):
    """A plugin is broken, ambiguous or absent."""

    code = "plugin"


class UnknownPluginError(PluginError, ConfigError):
    """An argument names a plugin, or something of one, that is not here or was disabled."""


class KVCacheTooSmallError(ConfigError):
    """The KV cache cannot hold a single request of the allowed length."""

    code = "kv_cache_too_small"


class ModelFaultError(DeepInferError):
    """The model produced logits that no token can be drawn from (NaN, or nothing allowed)."""

    code = "model_fault"


class DeviceLostError(DeepInferError):
    """The device failed in a way after which this process cannot use it; ``__cause__``: how."""

    code = "device_lost"


class EngineDeadError(DeepInferError):
    """The engine stopped after an error of its own; ``__cause__`` holds it."""

    code = "engine_dead"


class EngineClosedError(DeepInferError):
    """A call on an engine after ``close()``."""

    code = "engine_closed"


def shown(value: object, most: int = 80) -> str:
    """A value as messages quote it: cut where it is long, for nobody reads 5,000 characters."""
    try:
        text = repr(value)
    except Exception:  # whatever a stranger's repr does; numbers of some length have none
        return f"<{type(value).__name__}>"
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"
