"""The front door: LLM and AsyncLLM."""
