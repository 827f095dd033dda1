"""Graphs as a GPU has them, on a CPU: recording runs nothing, and a replay runs no Python.

A tape holds what a function launched: torch's calls, and an engine's ops as one call each. While it
is recorded all memory stays as it was. A replay makes the same calls on the same tensors, so that
what the host knew is frozen; what the tape makes holds nonsense before its first replay. Calls that
wait for the host are refused, and copies from it.
"""

import dataclasses
import gc
import threading
from contextlib import ExitStack
from unittest.mock import patch

import torch
import torch._dynamo  # what torch imports late must not be taped
from deepinfer.ops.backend import CPUDevice
from deepinfer.ops.reference.attention import plan_attention
from deepinfer.ops.table import OpSet, table
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2"}
HOST = {name: torch for name in ("tensor", "as_tensor", "from_numpy")}
HOST |= {name: torch.Tensor for name in ("tolist", "numpy", "cpu")}


class Tape(TorchDispatchMode):
    """Calls in order: function, args, kwargs, what it returned, and rows that it tapped."""

    recording = None

    def __init__(self):
        super().__init__()
        self.calls, self.inside = [], False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.inside:  # of an op
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        masks = tensors(args[1:2]) if name in ("index", "index_put_") else ()
        if name in WAITS or any(mask.dtype == torch.bool for mask in masks):
            raise RuntimeError(f"{name} waits for the host")
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out, None))
        return out

    def op(self, fn, args, kwargs):
        self.inside = True
        try:
            out = fn(*args, **kwargs)
        finally:
            self.inside = False
        taps = next((arg for arg in args if hasattr(arg, "hidden")), None)
        rows = None if taps is None else (taps, dict(taps.hidden))
        self.calls.append((fn, args, kwargs, out, rows))
        return out

    def replay(self):
        for func, args, kwargs, out, rows in self.calls:
            write(out, func(*args, **kwargs))
            if rows is not None:
                taps, hidden = rows
                write(hidden, taps.hidden)
                taps.hidden.update(hidden)

    def spoil(self, kept):
        """Nonsense into all that the calls made; ``kept``: storages that were there before."""
        made = {}
        for _, args, kwargs, out, rows in self.calls:
            for tensor in tensors([args, kwargs]):  # a number, say, that a call was given
                if address(tensor) not in made:
                    kept.add(address(tensor))
            made |= {address(t): t for t in tensors([out, rows and rows[1]]) if t.numel()}
        for at, tensor in made.items():
            if at not in kept:
                content(tensor).fill_(0x5A)


def tensors(tree):
    """All in it, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from tensors([tree[key] for key in sorted(tree, key=str)])
    elif isinstance(tree, (tuple, list)):
        for part in tree:
            yield from tensors(part)
    elif dataclasses.is_dataclass(tree):
        yield from tensors([getattr(tree, field.name) for field in dataclasses.fields(tree)])


def write(mine, again):
    """A call's new results to where the recorded ones are."""
    for to, new in zip(tensors(mine), tensors(again), strict=True):
        assert to.shape == new.shape, "shapes stand"
        if to.numel() and to.data_ptr() != new.data_ptr():
            to.copy_(new)


def address(tensor):
    return tensor.untyped_storage().data_ptr()


def content(tensor):
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def record(fn):
    """What ``api.backend.Device`` says of ``record``."""
    there = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.numel()]
    before = {address(tensor): (content(tensor), content(tensor).clone()) for tensor in there}
    tape = Tape.recording = Tape()
    try:
        with ExitStack() as stack:
            for name, owner in HOST.items():
                stack.enter_context(patch.object(owner, name, refused(name, getattr(owner, name))))
            stack.enter_context(tape)
            out = fn()
    finally:
        Tape.recording = None
        for now, then in before.values():
            now.copy_(then)
    tape.spoil(set(before))

    def replay():
        tape.replay()
        return out

    return replay


def refused(name, right):
    """On the thread that records: the engine's reads the step before meanwhile."""
    here = threading.get_ident()

    def call(*args, **kwargs):
        if threading.get_ident() == here and not Tape.recording.inside:
            raise RuntimeError(f"{name} is a copy between host and device")
        return right(*args, **kwargs)

    return call


@dataclasses.dataclass
class Plan:
    """Of ``plan_attention``; lengths are looked at when they are read, as kernels do it."""

    block_table: torch.Tensor
    kv_lengths: torch.Tensor
    cu_q: torch.Tensor
    page_size: int

    def __getattr__(self, name):
        if name not in ("singles", "single_rows", "chunks"):
            raise AttributeError(name)
        return getattr(
            plan_attention(self.block_table, self.kv_lengths, self.cu_q, self.page_size), name
        )

    @staticmethod
    def made(block_table, kv_lengths, cu_q, page_size):
        return Plan(block_table.long().clone(), kv_lengths.clone(), cu_q.clone(), page_size)


def install(monkeypatch):
    """CPU devices that are opened from here on record so, with backend ``reference``."""
    right, counts = OpSet.__init__, {"recorded": 0, "replays": 0}

    def init(ops, *args, **kwargs):
        right(ops, *args, **kwargs)
        for name in table():
            setattr(ops, name, taped(Plan.made if name == "plan_attention" else getattr(ops, name)))

    def taped(fn):
        def call(*args, **kwargs):
            tape = Tape.recording
            alone = tape is None or tape.inside
            return fn(*args, **kwargs) if alone else tape.op(fn, args, kwargs)

        return call

    def counted(device, fn):
        replay = record(fn)
        counts["recorded"] += 1

        def again():
            counts["replays"] += 1
            return replay()

        return again

    monkeypatch.setattr(OpSet, "__init__", init)
    monkeypatch.setattr(CPUDevice, "record", counted, raising=False)
    return counts
