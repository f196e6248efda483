"""A model as data: its operators, their shapes and costs, and where the user wrote them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

__all__ = [
    "LOSS",
    "MODEL",
    "WITHOUT_GRADIENT",
    "BatchLoss",
    "BatchTotal",
    "ModelGraph",
    "Node",
    "Ref",
    "TensorSpec",
    "find_gradient_targets",
    "find_ref_names",
    "to_user_name",
]

MODEL, LOSS = "model.", "loss."
"""What the names of the model's own weights and buffers begin with, and those of a loss that is a module."""

WITHOUT_GRADIENT = frozenset(
    f"aten.{name}.default"
    for name in (
        "detach", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like",
        "new_empty", "new_zeros", "new_ones", "new_full",
    )
)  # fmt: skip
"""Operators whose result does not lead back to their arguments."""

_ITEM_BYTES = {
    "complex128": 16, "complex64": 8, "float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2,
    "int16": 2,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ref:
    """The value called `name`: an input, a weight, a buffer or what a node makes."""

    name: str


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and type of a tensor of the whole image."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size in memory."""
        return self.numel * _ITEM_BYTES.get(self.dtype, 1)

    @property
    def sums(self) -> TensorSpec:
        """The same in the type that its sums are computed in: float32 for half precision."""
        return replace(self, dtype="float32") if self.is_floating and self.bytes == 2 * self.numel else self

    @property
    def is_floating(self) -> bool:
        """Whether it can carry a gradient."""
        return self.dtype.startswith(("float", "bfloat", "complex"))


@dataclass(frozen=True)
class Node:
    """One ATen operator, without side effects on its inputs.

    `arguments` are in the order of the operator's schema, defaults filled in, with `Ref`s where tensors
    go; `spec` is None where several tensors come out. `module` is the dotted path of the user's module,
    `source` the user's line, `flops` multiply-adds counted as two. One that is not `graded` stands under
    `torch.no_grad()`: no gradient leads back through it.
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
        """Names of the values that it reads, in order."""
        return tuple(find_ref_names(self.arguments))

    @property
    def where(self) -> str:
        """Module and line, for messages."""
        return f"{self.module or 'the model itself'}, {self.source or 'source unknown'}"


@dataclass(frozen=True, slots=True)
class BatchTotal:
    """A number (or a few) that follows from the labels of all micro-batches of a step, known before the first one.

    The micro-batches' values of `source` are added, and divided by the number of micro-batches `degree` times: 0 for
    a sum over the whole batch, 1 for the mean over its micro-batches. The loss reads the result as `name`.
    """

    name: str
    source: str
    spec: TensorSpec
    degree: int


@dataclass(frozen=True)
class BatchLoss:
    """How the losses of micro-batches, averaged, become the loss of the whole batch.

    `nodes` compute the sources of `totals` from the labels of one micro-batch. `scaled`: sums over the batch were
    multiplied by the number of micro-batches. `unknown` says in words why the loss has no such form; then each
    micro-batch has a loss of its own, and nothing was changed. `weighed_by` is the source by which the losses of
    several batches are weighted in their mean: "" where all count alike, None where no such source is known.
    """

    nodes: tuple[Node, ...] = ()
    totals: tuple[BatchTotal, ...] = ()
    scaled: bool = False
    unknown: str = ""
    weighed_by: str | None = None

    @property
    def differs(self) -> bool:
        """Whether the graph computes another loss for a micro-batch than the loss function does."""
        return bool(self.totals) or self.scaled

    @cached_property
    def reads(self) -> frozenset[str]:
        """What `nodes` read and do not compute: the labels, and buffers such as class weights."""
        return frozenset(name for node in self.nodes for name in node.reads) - {node.name for node in self.nodes}


@dataclass(frozen=True)
class ModelGraph:
    """A model with its loss, or alone (`loss` is None), traced at whole-image size.

    `inputs` are `images` and, for a loss, `labels`; `weights` the parameters, `trainable` the names of those with a
    gradient from the loss; `buffers` everything else that the model owns, and its `constants`: tensors that it makes or
    finds while it runs, with their numbers. `answers` name the tensors that the
    model answers with, and `loss` the loss.
    `chains` are the modules that only run their children one after another. `share` is the same model with fewer
    images, where several ranks share those of a micro-batch. `whole` is set where a step has several micro-batches.
    """

    inputs: Mapping[str, TensorSpec]
    weights: Mapping[str, TensorSpec]
    trainable: frozenset[str]
    buffers: Mapping[str, TensorSpec]
    nodes: tuple[Node, ...]
    answers: tuple[str, ...]
    loss: str | None
    chains: frozenset[str] = frozenset()
    share: ModelGraph | None = None
    whole: BatchLoss | None = None
    constants: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def totals(self) -> tuple[BatchTotal, ...]:
        """What the loss reads of the labels of all micro-batches."""
        return self.whole.totals if self.whole else ()

    @property
    def prediction(self) -> str:
        """The first answer; most models have no other."""
        return self.answers[0]

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The shape of every value by name."""
        made = {node.name: node.spec for node in self.nodes if node.spec is not None}
        totals = {total.name: total.spec for total in self.totals}
        return {**self.inputs, **self.weights, **self.buffers, **totals, **made}

    @cached_property
    def matrices(self) -> frozenset[str]:
        """The weights of more than one dimension: those of convolutions and products, not of norms or biases."""
        return frozenset(name for name, spec in self.weights.items() if len(spec.shape) > 1)

    @property
    def flops(self) -> int:
        """Of one forward pass over one batch."""
        return sum(node.flops for node in self.nodes)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(spec.bytes for spec in self.weights.values())

    @property
    def activation_bytes(self) -> int:
        """Bytes of everything that the operators make in one forward pass."""
        return sum(node.spec.bytes for node in self.nodes if node.spec is not None)


def to_user_name(name: str) -> str:
    """The name that a weight or buffer has in the user's model; of the loss, what no module's name looks like.

    >>> to_user_name("model.stem.weight"), to_user_name("loss.weight")
    ('stem.weight', 'loss: weight')
    """
    return f"loss: {name.removeprefix(LOSS)}" if name.startswith(LOSS) else name.removeprefix(MODEL)


def find_gradient_targets(loss: str, nodes: Sequence[Node]) -> set[str]:
    """The names of all values that a gradient of `loss` reaches, backwards through `nodes`."""
    reached = {loss}
    for node in reversed(nodes):
        floating = node.spec is None or node.spec.is_floating
        if node.name in reached and floating and node.graded and node.operator not in WITHOUT_GRADIENT:
            reached.update(node.reads)
    return reached


def find_ref_names(value: Any) -> Iterator[str]:
    """The names of all `Ref`s in nested arguments.

    >>> list(find_ref_names(([Ref("x"), 3], {"bias": Ref("b")})))
    ['x', 'b']
    """
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, list | tuple):
        for item in value:
            yield from find_ref_names(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from find_ref_names(item)
