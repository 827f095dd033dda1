"""Structured output, core's part: what a request asks for, and what a cut-off result lacks.

The grammars are a plugin's (``deepinfer-structured``).
"""

from deepinfer.structured.unfinished import BrokenTextError, Open, Partial, partial

__all__ = ["BrokenTextError", "Open", "Partial", "partial"]
