"""Structured output for DeepInfer: specs are compiled to grammars, grammars fill token masks."""
