"""``POST /v1/generate``: the published call. ``prompt`` in, ``text`` out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deepinfer.errors import InvalidRequestError
from deepinfer.sampling_params import SamplingParams
from deepinfer.server.errors import error_body
from deepinfer.server.exchange import event
from deepinfer.server.schemas import GenerateBody
from deepinfer.server.service import Asked, Run, Service
from deepinfer.server.tools import id_logprobs, usage

if TYPE_CHECKING:
    from deepinfer.entrypoints.outputs import CompletionOutput, RequestOutput

_NOT_SAMPLING = ("prompt", "model", "stream", "structured_output", "so_args", "logit_bias")


class Generate:
    """The dialect. Without ``max_tokens`` a text runs to its own end or the context's."""

    prefix = "gen-"

    def asked(self, body: dict[str, Any], service: Service) -> Asked:
        wish = GenerateBody.read(body)
        service.check_model(wish.model)
        said = wish.said()
        given = {k: v for k, v in said.items() if k not in _NOT_SAMPLING}
        if "logit_bias" in said:
            given["logit_bias"] = {int(k): v for k, v in said["logit_bias"].items()}
        rule = _one_rule(said)
        if rule is not None:
            given["so_args"] = rule
        kind = "delta" if wish.stream else "final_only"
        base = service.llm.get_default_sampling_params().model_dump(exclude_unset=True)
        params = SamplingParams(**{**base, "max_tokens": None, **given, "output_kind": kind})
        return Asked(
            params=params,
            writer=lambda run: GenerateWriter(run, service.names[0]),
            prompts=[wish.prompt],
            stream=bool(wish.stream),
            ignored=wish.ignored(),
        )


def _one_rule(said: dict[str, Any]) -> dict[str, Any] | None:
    """``structured_output``, or ``so_args``, which is the same thing under the library's name."""
    one, two = said.get("structured_output"), said.get("so_args")
    if None not in (one, two) and one != two:
        raise InvalidRequestError(
            "structured_output and so_args name the same thing and differ.",
            setting="structured_output",
            next_step="Give one of them.",
        )
    rule: dict[str, Any] | None = two if one is None else one
    return rule


class GenerateWriter:
    """Its answers: ``text`` of the first sample, and all of them under ``outputs``."""

    def __init__(self, run: Run, model: str) -> None:
        self._run = run
        self._model = model

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        samples = [_sample(out) for out in outputs[0].outputs]
        first = {k: samples[0][k] for k in ("text", "finish_reason", "stop_reason")}
        more = {"outputs": samples} if len(samples) > 1 or "logprobs" in samples[0] else {}
        about = {"id": self._run.id, "model": self._model}
        return {**about, **first, **more, "usage": usage(self._run)}

    def begin(self) -> list[str]:
        return []

    def news(self, number: int, output: RequestOutput) -> list[str]:
        said = (out for out in output.outputs if out.text or out.finish_reason or out.logprobs)
        return [event({"id": self._run.id, **_sample(out)}) for out in said]

    def end(self) -> list[str]:
        return [event({"id": self._run.id, "usage": usage(self._run)}), event("[DONE]")]

    def failed(self, error: BaseException) -> list[str]:
        return [event(error_body(error)), event("[DONE]")]


def _sample(out: CompletionOutput) -> dict[str, Any]:
    found: dict[str, Any] = {
        "index": out.index,
        "text": out.text,
        "finish_reason": out.finish_reason,
        "stop_reason": out.stop_reason,
    }
    if out.logprobs is not None:
        found["logprobs"] = id_logprobs(out)
    return found
