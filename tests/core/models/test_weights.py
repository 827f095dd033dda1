"""Loading by rules: joins, rounding, sharing, memory, and checkpoints that do not fit."""

import logging
from pathlib import Path

import pytest
import torch
from deepinfer.api.backend import OpContext
from deepinfer.api.model import WeightRule
from deepinfer.errors import ModelLoadError
from deepinfer.models.weights import join, load_weights
from deepinfer.ops.backend import ReferenceBackend, build_ops

CTX = OpContext(dtype=torch.float32, device=torch.device("cpu"))


class Shelf:
    """A checkpoint in memory that counts what was read."""

    def __init__(self, **tensors):
        self.tensors = tensors
        self.read = []

    def names(self):
        return tuple(self.tensors)

    def shape(self, name):
        return tuple(self.tensors[name].shape)

    def file(self, name):
        return Path("shelf")

    def storage(self, name):
        return "F32"

    def tensor(self, name, dtype, *, round_to=None):
        self.read.append(name)
        return self.tensors[name].to(round_to or dtype).to(dtype, copy=True)


class Store:
    """A model that keeps what it is given."""

    def __init__(self):
        self.parameters = {}

    def load(self, parameter, value):
        self.parameters[parameter] = value


def rule(parameter, sources, shapes, **more):
    given = {"uses": (), **more}
    return WeightRule(parameter=parameter, sources=sources, shapes=shapes, **given)


def load(shelf, *rules, ops=None, **how):
    store = Store()
    ops = ops or build_ops(ReferenceBackend(), CTX)
    size = load_weights(store, rules, shelf, ops, how.pop("dtype", torch.float32), **how)
    return store.parameters, size


def test_rows_are_joined_in_order():
    shelf = Shelf(a=torch.ones(2, 3), b=2 * torch.ones(1, 3))
    parameters, size = load(shelf, rule("ab", ("a", "b"), ((2, 3), (1, 3))))
    assert parameters["ab"].tolist() == [[1.0] * 3, [1.0] * 3, [2.0] * 3]
    assert size == 9 * 4


def test_stacks_and_views():
    shelf = Shelf(a=torch.zeros(2, 3), b=torch.ones(2, 3))
    shapes = ((2, 3), (2, 3))
    stacked = join(rule("s", ("a", "b"), shapes, stack=True), shelf, torch.float32, None)
    viewed = join(rule("v", ("a", "b"), shapes, view=(2, 2, 3)), shelf, torch.float32, None)
    assert stacked.shape == (2, 2, 3) and torch.equal(stacked, viewed)


def test_values_are_rounded_before_they_are_widened():
    shelf = Shelf(a=torch.tensor([1.001]))
    parameters, _ = load(shelf, rule("a", ("a",), ((1,),)), round_to=torch.bfloat16)
    assert parameters["a"].dtype == torch.float32 and parameters["a"].item() == 1.0


def test_optional_rules_may_be_absent_and_half_of_one_may_not():
    optional = rule("b", ("b", "c"), ((1,), (1,)), optional=True)
    assert load(Shelf(a=torch.ones(1)), optional) == ({}, 0)
    with pytest.raises(ModelLoadError, match="no tensor 'c'"):
        load(Shelf(b=torch.ones(1)), optional)


def test_a_missing_tensor_is_named_before_anything_is_read():
    shelf = Shelf(a=torch.ones(1))
    with pytest.raises(ModelLoadError) as why:
        load(shelf, rule("a", ("a",), ((1,),)), rule("x", ("x", "y"), ((2, 2), (1, 2))))
    assert "no tensor 'x' (expected shape [2, 2]); 1 more misfits." in str(why.value)
    assert shelf.read == []


def test_a_misshapen_tensor_is_named_with_both_shapes():
    with pytest.raises(ModelLoadError, match=r"'a' with shape \[3, 2\], expected \[2, 3\]"):
        load(Shelf(a=torch.ones(3, 2)), rule("a", ("a",), ((2, 3),)))


def test_unused_tensors_are_reported_at_debug_level(caplog):
    shelf = Shelf(a=torch.ones(1), extra=torch.ones(1))
    shelf.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(1)
    with caplog.at_level(logging.DEBUG, "deepinfer.models.weights"):
        load(shelf, rule("a", ("a",), ((1,),)))
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert record.getMessage() == "1 checkpoint tensors are not used: extra"


def test_prepared_weights_are_counted():
    ops = build_ops(
        ReferenceBackend(), OpContext(dtype=CTX.dtype, device=CTX.device, quantization="int8")
    )
    shelf = Shelf(w=torch.randn(8, 64))
    parameters, size = load(shelf, rule("w", ("w",), ((8, 64),), uses=("linear",)), ops=ops)
    assert size == parameters["w"].nbytes == 8 * 64 + 8 * 2 * 2


def test_a_wrong_parameter_name_is_an_error():
    from deepinfer.layers import Linear, assign

    layer = Linear(build_ops(ReferenceBackend(), CTX))
    assign(layer, "weight", 1)
    with pytest.raises(AttributeError, match="no parameter 'wieght'"):
        assign(layer, "wieght", 1)
