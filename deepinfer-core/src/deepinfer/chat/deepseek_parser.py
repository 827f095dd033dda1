"""What DeepSeek-V4 and V4.1 answer, taken apart by ``deepseek-recipe``.

Where you are: behind ``RenderedChat.parser``. The recipe streams; here its chunks become pieces.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from deepinfer.chat.interface import ChatPiece


class DeepseekParser:
    """A parser for one answer.

    Args:
        recipe: the package.
        request: the converted request, which knows where the answer begins and whether calls are
            looked for.
    """

    def __init__(self, recipe: Any, request: Any) -> None:
        generator = recipe.ChatCompletionRequest.chunk_generator(request, "answer", "model")
        self._chunk = recipe.InferenceChunk
        self._reasons = recipe.InferenceFinishReason
        self._stream = recipe.StreamProcessor(generator, request.parsing_options)
        self._stream.push(self._chunk.ready())
        self._finish_reason: str | None = None

    @property
    def finish_reason(self) -> str | None:
        return self._finish_reason

    def feed(self, text: str) -> list[ChatPiece]:
        return list(_pieces(self._stream.push(self._chunk.text(text))))

    def finish(self, reason: str) -> list[ChatPiece]:
        end = self._reasons.Stop if reason == "stop" else self._reasons.Length
        last = [*self._stream.push(self._chunk.finish(end)), *self._stream.finish()]
        ends = [_choice(chunk).get("finish_reason") for chunk in last]
        if "tool_calls" in ends:
            self._finish_reason = "tool_calls"
        return list(_pieces(last))


def _choice(chunk: Any) -> dict[str, Any]:
    choices = json.loads(chunk.to_json())["choices"]
    return choices[0] if choices else {}


def _pieces(chunks: Iterable[Any]) -> Iterator[ChatPiece]:
    for chunk in chunks:
        delta = _choice(chunk).get("delta", {})
        if delta.get("reasoning_content"):
            yield ChatPiece("reasoning", delta["reasoning_content"])
        if delta.get("content"):
            yield ChatPiece("content", delta["content"])
        for call in delta.get("tool_calls") or ():
            function = call.get("function", {})
            yield ChatPiece(
                "tool_call",
                function.get("arguments") or "",
                call["index"],
                call.get("id") or "",
                function.get("name") or "",
            )
