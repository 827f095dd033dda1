"""Structured output, core's part: what a request asks for. Grammars are a plugin's."""
