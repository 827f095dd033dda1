"""Conversations to prompts, and answers back to messages.

Where you are: ``LLM.chat`` and the server come here. ``interface`` says what a chat format is;
``template`` is the common one, a Jinja template that came with the model; ``deepseek`` is for
models that came with code instead. ``choose`` picks, ``encode`` makes ids of what was rendered.
"""

from deepinfer.chat.choose import chat_format
from deepinfer.chat.encode import prompt_ids
from deepinfer.chat.interface import (
    ChatFormat,
    ChatImage,
    ChatMessage,
    ChatOptions,
    ChatPiece,
    Message,
    OutputParser,
    RenderedChat,
    ToolCall,
)
from deepinfer.chat.messages import ROLES, check_messages
from deepinfer.chat.template import TemplateFormat

__all__ = [
    "ROLES",
    "ChatFormat",
    "ChatImage",
    "ChatMessage",
    "ChatOptions",
    "ChatPiece",
    "Message",
    "OutputParser",
    "RenderedChat",
    "TemplateFormat",
    "ToolCall",
    "chat_format",
    "check_messages",
    "prompt_ids",
]
