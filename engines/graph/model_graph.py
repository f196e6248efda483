"""A traced model as data: its operators, their shapes and costs, and their places in the user's source."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from mpi4dl_nb.engines.errors import PlanError, TraceError
from mpi4dl_nb.engines.formatting import FactTable, format_bytes, format_flops
from mpi4dl_nb.engines.plan import OPTIONS, Plan

MODEL, LOSS = "model.", "loss."
"""Prefixes of the names of weights and buffers: of the model's own, and of a loss that is a module."""

WITHOUT_GRADIENT = frozenset(
    {f"aten.{name}_like.default" for name in ("zeros", "ones", "full", "empty", "rand", "randn")}
    | {f"aten.new_{name}.default" for name in ("empty", "zeros", "ones", "full")}
    | {"aten.detach.default"}
)
"""Operators through which no gradient flows to their arguments."""

_ITEM_BYTES = {"complex128": 16, "complex64": 8, "float64": 8, "int64": 8, "float32": 4, "int32": 4}
_ITEM_BYTES |= {"float16": 2, "bfloat16": 2, "int16": 2, "uint64": 8, "uint32": 4, "uint16": 2, "complex32": 4}


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to the value called `name`: an input, a weight, a buffer or the output of a node."""

    name: str


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and data type of a tensor at whole-image size."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.item_bytes

    @property
    def item_bytes(self) -> int:
        """Size of one element in bytes."""
        return _ITEM_BYTES.get(self.dtype, 1)

    def get_sizes(self, axes: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes along some of the axes."""
        return tuple(self.shape[axis] for axis in axes)

    def resize(self, dim: int, size: int) -> TensorSpec:
        """Return the spec with another size along one dimension."""
        shape = list(self.shape)
        shape[dim] = size
        return replace(self, shape=tuple(shape))

    @property
    def sums(self) -> TensorSpec:
        """The same spec in the type that its sums are computed in: float32 for half precision, otherwise unchanged."""
        return replace(self, dtype="float32") if self.is_floating and self.item_bytes == 2 else self

    @property
    def is_floating(self) -> bool:
        """Whether the type is floating or complex, so that the tensor can carry a gradient."""
        return self.dtype.startswith(("float", "bfloat", "complex"))


@dataclass(frozen=True)
class Node:
    """One ATen operator without side effects on its inputs.

    `arguments` follow the operator's schema, with defaults filled in and `Ref`s in place of tensors. `spec` is None if
    the operator has several outputs. `module` is the dotted path of the user's module and `source` the user's line.
    `flops` counts a multiply-add as two. A node that is not `graded` was traced under `torch.no_grad()`: no gradient
    flows back through it.
    """

    name: str
    operator: str
    arguments: Mapping[str, Any]
    spec: TensorSpec | None
    module: str
    source: str
    flops: int
    graded: bool = True

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Names of the values that the node reads, in order."""
        return tuple(find_ref_names(self.arguments))

    @property
    def result(self) -> TensorSpec:
        """Spec of the only output. Raises TraceError if the operator has several."""
        if self.spec is None:
            raise TraceError(f"{self.operator} in {self.where} has several outputs: each has a shape of its own.")
        return self.spec

    @property
    def short_operator(self) -> str:
        """The operator's name without `aten.` and its overload."""
        return self.operator.removeprefix("aten.").split(".")[0]

    @property
    def where(self) -> str:
        """Module and source line, for messages."""
        return f"{self.module or 'the model itself'}, {self.source or 'source unknown'}"


@dataclass(frozen=True, slots=True)
class BatchTotal:
    """A small tensor computed from the labels of all micro-batches of a step, before the first of them runs.

    The values of `source` are summed over the micro-batches and divided `degree` times by their number: 0 gives the sum
    over the whole batch, 1 the mean over its micro-batches. The loss reads the result as `name`.
    """

    name: str
    source: str
    spec: TensorSpec
    degree: int


@dataclass(frozen=True)
class BatchLoss:
    """How the average of the micro-batches' losses becomes the loss of the whole batch.

    `nodes` compute the sources of `totals` from the labels of one micro-batch. `scaled` is set if sums over the batch
    were multiplied by the number of micro-batches. `unknown` explains why the loss has no such form; the graph is then
    unchanged, and each micro-batch has its own loss. `weighed_by` is the source that weights the losses of several
    batches in their mean: "" for equal weights, None if no such source is known.
    `mixes` says where the model itself computes with several images at once, so that its outputs for a micro-batch are
    not those for the whole batch. `apart`: one process can compare with a model only micro-batch by micro-batch.
    """

    nodes: tuple[Node, ...] = ()
    totals: tuple[BatchTotal, ...] = ()
    scaled: bool = False
    unknown: str = ""
    weighed_by: str | None = None
    mixes: str = ""
    apart: bool = False

    @property
    def differs(self) -> bool:
        """Whether the graph computes a different loss for a micro-batch than the loss function does."""
        return bool(self.totals) or self.scaled

    @cached_property
    def reads(self) -> frozenset[str]:
        """Names that `nodes` read but do not compute: the labels, and buffers such as class weights."""
        return frozenset(name for node in self.nodes for name in node.reads) - {node.name for node in self.nodes}


@dataclass(frozen=True, repr=False)
class ModelGraph(FactTable):
    """A model traced at whole-image size, with its loss or alone (`loss` is None).

    `inputs` are `images` and, with a loss, `labels`. `weights` are the parameters, and `trainable` the names of those
    that receive a gradient from the loss. `buffers` are all other tensors of the model, including its `constants`:
    tensors that forward creates or finds, with their values. `answers` name the tensors of the model's output that the
    loss is given, the prediction first, and `loss` the loss. `loss_input` is the type of what the loss is
    given, "Tensor" for the prediction alone, and `left_out` are the places of the output's other tensors then. `chains`
    are the modules that only run their children one after another. `whole` is set if a step has several micro-batches.
    `default_type` is PyTorch's default type while it was traced. `recomputed` says how often a step updates a buffer
    for one update in forward, if the model computes it once more in backward. `synced` are the modules that are an
    nn.SyncBatchNorm in training, which normalises the whole batch of a step.
    """

    inputs: Mapping[str, TensorSpec]
    weights: Mapping[str, TensorSpec]
    trainable: frozenset[str]
    buffers: Mapping[str, TensorSpec]
    nodes: tuple[Node, ...]
    answers: tuple[str, ...]
    loss: str | None
    chains: frozenset[str] = frozenset()
    loss_input: str = "Tensor"
    left_out: tuple[str, ...] = ()
    whole: BatchLoss | None = None
    constants: Mapping[str, Any] = field(default_factory=dict, compare=False)
    default_type: str = "float32"
    recomputed: Mapping[str, int] = field(default_factory=dict)
    synced: frozenset[str] = frozenset()

    caption = "Traced model"

    @property
    def facts(self) -> dict[str, object]:
        return {
            "inputs": ", ".join(f"{name} {' × '.join(map(str, spec.shape))}" for name, spec in self.inputs.items()),
            "operators": f"{len(self.nodes):,}",
            "modules": f"{len({node.module for node in self.nodes}):,}",
            "weights": f"{len(self.weights):,} tensors, {format_bytes(self.weight_bytes)}",
            "arithmetic": f"{format_flops(self.flops)} forward",
        }

    @property
    def totals(self) -> tuple[BatchTotal, ...]:
        """Totals over the labels of all micro-batches that the loss reads."""
        return self.whole.totals if self.whole else ()

    @property
    def prediction(self) -> str:
        """Name of the first output; most models have no other."""
        return self.answers[0]

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Spec of every value by name."""
        outputs = {node.name: node.spec for node in self.nodes if node.spec is not None}
        totals = {total.name: total.spec for total in self.totals}
        return {**self.inputs, **self.weights, **self.buffers, **totals, **outputs}

    @cached_property
    def matrices(self) -> frozenset[str]:
        """Names of the weights with more than one dimension: of convolutions and products, not of norms or biases."""
        return frozenset(name for name, spec in self.weights.items() if len(spec.shape) > 1)

    @property
    def flops(self) -> int:
        """FLOPs of one forward pass over one batch."""
        return sum(node.flops for node in self.nodes)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(spec.bytes for spec in self.weights.values())


def to_user_name(name: str) -> str:
    """Return a weight's or buffer's name in the user's model; for the loss, a name that no module can have.

    >>> to_user_name("model.stem.weight"), to_user_name("loss.weight")
    ('stem.weight', 'loss: weight')
    """
    return f"loss: {name.removeprefix(LOSS)}" if name.startswith(LOSS) else name.removeprefix(MODEL)


def find_gradient_targets(loss: str, nodes: Sequence[Node]) -> set[str]:
    """Return the names of all values that a gradient of `loss` reaches, walking `nodes` backwards."""
    # A value is reached if each operator from it to the loss passes a gradient: the operator is differentiable, its
    # result is of a floating type, and it was traced with gradients on.
    reached = {loss}
    for node in reversed(nodes):
        floating = node.spec is None or node.spec.is_floating
        if node.name in reached and floating and node.graded and node.operator not in WITHOUT_GRADIENT:
            reached.update(node.reads)
    return reached


def find_loss_nodes(graph: ModelGraph) -> list[Node]:
    """Return the nodes between the model's outputs and the loss, in order."""
    needed, nodes = {graph.loss}, []
    for node in reversed(graph.nodes):
        if node.name in needed and node.name not in graph.answers:
            nodes.append(node)
            needed.update(node.reads)
    return nodes[::-1]


def find_ref_names(value: Any) -> Iterator[str]:
    """Yield the names of all `Ref`s in nested arguments.

    >>> list(find_ref_names(([Ref("x"), 3], {"bias": Ref("b")})))
    ['x', 'b']
    """
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, list | tuple | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from find_ref_names(item)


# Buffers that a model changes in forward: ranks change them at the update, one process in each forward pass.


def check_buffer_reads(graph: ModelGraph, micro_batches: int) -> None:
    """Raise an error if an operator reads a buffer that another operator of the model changes.

    A read after the change would see the value before it (TraceError). A read before the change is right, unless a step
    has several micro-batches: from the second on it would see the value of the first (PlanError).
    """
    changers = {name: node for node in graph.nodes for name in find_updated_buffers(graph, node)}
    # One process, in each forward pass:   read m | m = 0.9 m + 0.1 mean | read m
    # A rank, at the end of the step:      read m |                      | read m   ...   m = 0.9 m + 0.1 mean
    #
    # The first read is the same unless a micro-batch came before it in the step; the second one never is.
    # `changed` are the buffers whose change has been passed.
    changed: set[str] = set()
    for node in graph.nodes:
        updated = set(find_updated_buffers(graph, node))
        for name in sorted({*node.reads} & changers.keys() - updated):
            changer = changers[name]
            both = (
                f"{node.operator} in {node.where} reads the buffer {to_user_name(name)}, which {changer.operator} in "
            )
            if name in changed:
                raise TraceError(
                    f"{both}{changer.where} has changed before. Ranks change buffers at the end of a step: read it "
                    "before the change, or compute what you need without the buffer."
                )
            if micro_batches > 1:
                raise PlanError(
                    f"{both}{changer.where} changes in each of the {micro_batches} micro-batches of a step. Ranks "
                    "change buffers at the end of a step. Use a plan with one micro-batch, or a model that does not "
                    "read it."
                )
        changed |= updated


def check_synced_norms(graph: ModelGraph, plan: Plan) -> None:
    """Raise PlanError if an nn.SyncBatchNorm cannot have the statistics of a step's whole batch, which it asks for.

    Replicas that take one micro-batch each compute them together. Micro-batches that follow one another cannot.
    """
    if not graph.synced:
        return
    first = (
        f"{min(graph.synced)} is an nn.SyncBatchNorm, which normalises by the statistics of the whole batch of a step"
    )
    if plan.micro_batches > plan.data_parallel:
        divided = {name: value for name, value in plan.chosen.items() if OPTIONS[name].divides == "step"}
        chosen = ", ".join(f"{name}={value!r}" for name, value in divided.items() if name != "data_parallel")
        raise PlanError(
            f"{first}, but {chosen} computes its micro-batches one after another: the first would need the last. Use "
            "replicas (data_parallel) of one micro-batch each, or nn.BatchNorm2d, which normalises each micro-batch."
        )
    if not plan.sync_batchnorm and any(grid.tiles > 1 for grid in plan.grids):
        raise PlanError(
            f"{first}, but sync_batchnorm=False normalises each tile by itself. Leave it out, or use nn.BatchNorm2d."
        )


def is_synced_count(graph: ModelGraph, node: Node) -> bool:
    """Return whether a node counts the batches of an nn.SyncBatchNorm: one for each step."""
    return node.operator == "aten.add_.Tensor" and node.module in graph.synced


def is_batch_dependent(graph: ModelGraph) -> bool:
    """Return whether predictions depend on the rest of the batch: a batch norm without running statistics."""
    return any(node.operator == "aten.batch_norm.default" and node.arguments["training"] for node in graph.nodes)


def find_updated_buffers(graph: ModelGraph, node: Node) -> Iterator[str]:
    """Yield the names of the buffers that a node changes."""
    arguments = node.arguments
    if node.operator == "aten.add_.Tensor" and arguments["self"].name in graph.buffers:
        yield arguments["self"].name
    mode = {"aten.batch_norm.default": "training", "aten.instance_norm.default": "use_input_stats"}.get(node.operator)
    for name in ("running_mean", "running_var") if mode and arguments[mode] else ():
        if isinstance(arguments[name], Ref):
            yield arguments[name].name
