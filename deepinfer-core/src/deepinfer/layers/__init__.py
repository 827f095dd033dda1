"""Layers: ops with parameters and parallelism."""
