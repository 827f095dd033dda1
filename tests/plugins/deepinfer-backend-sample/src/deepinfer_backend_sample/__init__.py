"""A small third-party backend for DeepInfer. The window is ``plugin``."""
