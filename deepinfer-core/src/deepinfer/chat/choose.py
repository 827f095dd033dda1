"""Which chat format a model gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.chat.deepseek import GENERATIONS, DeepseekFormat
from deepinfer.chat.interface import ChatFormat
from deepinfer.chat.template import TemplateFormat
from deepinfer.errors import TokenizerError

if TYPE_CHECKING:
    from deepinfer.tokenizer import Tokenizer


def chat_format(
    tokenizer: Tokenizer, template: str | None = None, architecture: str | None = None
) -> ChatFormat:
    """The format of a model: the given template, else its family's, else its tokenizer's.

    Raises:
        TokenizerError: there is no template, it is not valid Jinja, or the family's format needs
            a package that is not installed.
    """
    generation = GENERATIONS.get(architecture or "")
    if template is None and generation is not None:
        return DeepseekFormat(generation, tokenizer.name)
    templates = {"default": template} if template is not None else tokenizer.chat_templates
    if not templates:
        raise TokenizerError(
            f"{tokenizer.name} came without a chat template (a base model, perhaps).",
            setting="chat_template",
            next_step="Use generate() with a text prompt, or pass a chat template.",
        )
    return TemplateFormat(templates, tokenizer.special_tokens, tokenizer.name)
