"""All that a plugin may import: specs, hooks, types and protocols. No torch, no numpy.

The signatures here are the contract of API major 1: within it, arguments and fields are only
added (``tests/house`` holds a snapshot).
"""

from deepinfer.api.backend import (
    Backend,
    BackendFacts,
    Device,
    Future,
    Impl,
    OpContext,
    OutputFuture,
)
from deepinfer.api.executor import Executor, ModelFacts
from deepinfer.api.grammar import Grammar, GrammarBackend
from deepinfer.api.hookspecs import hookimpl, hookspec
from deepinfer.api.kv import KVGroup, KVSpec, KVStore, Lookup, PageKey, Transfer
from deepinfer.api.model import DeviceBatch, KVPools, Model, ModelAdapter, Taps, WeightRule
from deepinfer.api.observer import Observer
from deepinfer.api.ops import OP_NAMES
from deepinfer.api.parallel import Communicator, ParallelContext
from deepinfer.api.plan import (
    Admit,
    BatchPlan,
    Delta,
    Fault,
    FinishReason,
    LogprobRows,
    Request,
    RequestMetrics,
    Row,
    RowBlock,
    RowInputs,
    RowParams,
    StepOutput,
    StepStats,
    TokenLogprob,
)
from deepinfer.api.policy import Budget, Policy, StepFacts, View
from deepinfer.api.router import ReplicaStats, Router, RouteView
from deepinfer.api.sampler import Sampler, SampleRows
from deepinfer.api.specs import (
    API_VERSION,
    BackendSpec,
    CommSpec,
    ExecutorSpec,
    GrammarSpec,
    ModelSpec,
    PolicySpec,
    RouterSpec,
    SamplerSpec,
    Spec,
    SpeculatorSpec,
    StoreSpec,
)
from deepinfer.api.speculative import Drafter, DraftPlanner, Drafts, Verifier

__all__ = [
    "API_VERSION",
    "OP_NAMES",
    "Admit",
    "Backend",
    "BackendFacts",
    "BackendSpec",
    "BatchPlan",
    "Budget",
    "CommSpec",
    "Communicator",
    "Delta",
    "Device",
    "DeviceBatch",
    "DraftPlanner",
    "Drafter",
    "Drafts",
    "Executor",
    "ExecutorSpec",
    "Fault",
    "FinishReason",
    "Future",
    "Grammar",
    "GrammarBackend",
    "GrammarSpec",
    "Impl",
    "KVGroup",
    "KVPools",
    "KVSpec",
    "KVStore",
    "LogprobRows",
    "Lookup",
    "Model",
    "ModelAdapter",
    "ModelFacts",
    "ModelSpec",
    "Observer",
    "OpContext",
    "OutputFuture",
    "PageKey",
    "ParallelContext",
    "Policy",
    "PolicySpec",
    "ReplicaStats",
    "Request",
    "RequestMetrics",
    "RouteView",
    "Router",
    "RouterSpec",
    "Row",
    "RowBlock",
    "RowInputs",
    "RowParams",
    "SampleRows",
    "Sampler",
    "SamplerSpec",
    "Spec",
    "SpeculatorSpec",
    "StepFacts",
    "StepOutput",
    "StepStats",
    "StoreSpec",
    "Taps",
    "TokenLogprob",
    "Transfer",
    "Verifier",
    "View",
    "WeightRule",
    "hookimpl",
    "hookspec",
]
