"""DeepInfer on NVIDIA GPUs. The window is ``plugin``; nothing here imports torch before it."""
