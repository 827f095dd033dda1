"""Groups of ranks. This version knows groups of one."""

from deepinfer.parallel.context import single
from deepinfer.parallel.solo import SoloCommunicator

__all__ = ["SoloCommunicator", "single"]
