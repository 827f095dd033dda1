"""Prints which heavy packages came with the window: ``test_window`` runs it."""

import sys

from deepinfer_backend_cuda import plugin

plugin.deepinfer_provide()
print(sorted({"numpy", "torch", "triton"} & set(sys.modules)))
