"""Triton kernels, one file for each family. A kernel's reduction order is in its docstring."""
