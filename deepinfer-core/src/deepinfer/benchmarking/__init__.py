"""Measuring DeepInfer beside its peers: same prompts, same threads, interleaved rounds."""
