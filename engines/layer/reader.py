"""Reads what `torch.export` made of a model into our own data."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from engines.errors import TraceError
from engines.layer.flops import flops
from engines.layer.graph import MODEL, ModelGraph, Node, Ref, TensorSpec, behind, plain_name, references

__all__ = ["Reader", "is_check", "spec_of"]

_RENAMED = {  # in-place operators whose out-of-place form has another name
    "bernoulli_.float": "bernoulli.p",
    "bernoulli_.Tensor": "bernoulli.Tensor",
    "normal_.default": "normal_functional.default",
    "fill_.Scalar": "full_like.default",
    "zero_.default": "zeros_like.default",
}
_CHECKS = ("_guards_fn", "_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range_for_size")
_OURS = ("/torch/", str(Path(__file__).parent))


class Reader:
    """Reads an exported module into our own data, with in-place operators made plain.

    `first_names` maps every name of a weight or buffer to the first one of the same tensor. `has_loss`: the first
    output is the loss.
    """

    def __init__(self, module: fx.GraphModule, first_names: Mapping[str, str], has_loss: bool = True) -> None:
        self.module, self.first_names, self.has_loss = module, first_names, has_loss
        self.names: dict[str, str] = {}  # fx name -> the value that the name stands for by now
        self.storage: dict[str, str] = {}  # value -> the first value in the same memory
        self.spoiled: dict[str, Node] = {}  # aliases of memory that was written -> who wrote it
        self.nodes: list[Node] = []
        self.inputs: dict[str, TensorSpec] = {}
        self.owned: dict[str, Tensor] = {}

    def graph(self) -> ModelGraph:
        outputs: tuple[str, ...] = ()
        for node in self._ordered():
            if node.op == "placeholder":
                self.inputs[node.name] = spec_of(node.meta["val"])
                self.names[node.name] = node.name
            elif node.op == "get_attr":
                self._own(node)
            elif node.op == "output":
                outputs = tuple(references(self._refs(node.args[0])))
            elif not is_check(node):
                self._call(node)
        return self._checked(outputs[0], outputs[1:]) if self.has_loss else self._checked(None, outputs)

    def _checked(self, loss: str | None, answers: Sequence[str]) -> ModelGraph:
        specs = {name: spec_of(tensor) for name, tensor in self.owned.items()}
        weights = {name for name, tensor in self.owned.items() if isinstance(tensor, nn.Parameter)}
        nodes = tuple(self._named(answers))
        reached = behind(loss, nodes) if loss else set()
        graph = ModelGraph(
            inputs=self.inputs,
            weights={name: specs[name] for name in specs if name in weights},
            trainable=frozenset(n for n in weights & reached if self.owned[n].requires_grad),
            buffers={name: specs[name] for name in specs if name not in weights},
            nodes=nodes,
            answers=answers,
            loss=loss,
        )
        if loss and graph.specs[loss].shape != ():
            raise TraceError(f"The loss must be one number, but its shape is {graph.specs[loss].shape}. Reduce it.")
        return graph

    def _named(self, answers: Sequence[str]) -> Iterator[Node]:
        """What follows the last answer, and is in no module, is the loss."""
        made = [index for index, node in enumerate(self.nodes) if node.name in answers]
        if not made:
            raise TraceError("The model answers with its own input: there is nothing to compute.")
        for index, node in enumerate(self.nodes):
            yield replace(node, module="loss") if index > made[-1] and not node.module else node

    def _ordered(self) -> Iterator[fx.Node]:
        """Each `getitem` right behind the operator whose outputs it picks."""
        for node in self.module.graph.nodes:
            if node.target is not operator.getitem:
                yield node
                yield from (user for user in node.users if user.target is operator.getitem)

    def _own(self, node: fx.Node) -> None:
        name = self.first_names.get(str(node.target), str(node.target))
        self.owned[name] = operator.attrgetter(str(node.target))(self.module)
        self.names[node.name] = name

    def _refs(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return Ref(self.names[value.name])
        if isinstance(value, list | tuple):
            return tuple(self._refs(item) for item in value)
        return value

    def _call(self, node: fx.Node) -> None:
        target, arguments = node.target, self._arguments(node)
        written = self._written(node, arguments)
        if written in self.owned:
            self._check_counter(node, arguments)
        elif written:
            target = _out_of_place(target, node)
            names = (schema.name for schema in target._schema.arguments)
            arguments = dict(zip(names, arguments.values(), strict=False))
        made = Node(
            name=node.name,
            operator=_operator(target, node),
            arguments=arguments,
            spec=spec_of(node.meta["val"]) if isinstance(node.meta["val"], Tensor) else None,
            module=_module_path(node),
            source=_source(node),
            flops=flops(node),
        )
        self._check_memory(made, written)
        self.nodes.append(made)
        self._alias(node, made, written)

    @staticmethod
    def _check_counter(node: fx.Node, arguments: dict[str, Any]) -> None:
        """A buffer may only count: other changes would not be those of one process in its order."""
        if str(node.target) != "aten.add_.Tensor" or not isinstance(arguments["other"], int):
            raise TraceError(
                f"{node.target} in {_source(node)} changes the buffer {plain_name(arguments['self'].name)} "
                "while the model runs. Only counting up by a whole number has a rule: keep such values outside."
            )

    def _arguments(self, node: fx.Node) -> dict[str, Any]:
        """By name, in the schema's order, with defaults filled in."""
        if not isinstance(node.target, torch._ops.OpOverload):
            return {str(position): self._refs(value) for position, value in enumerate(node.args)}
        given = {schema.name: value for schema, value in zip(node.target._schema.arguments, node.args, strict=False)}
        given.update(node.kwargs)
        return {
            schema.name: self._refs(given.get(schema.name, schema.default_value))
            for schema in node.target._schema.arguments
        }

    @staticmethod
    def _written(node: fx.Node, arguments: dict[str, Any]) -> str | None:
        """The value that an in-place operator writes to."""
        if not isinstance(node.target, torch._ops.OpOverload):
            return None
        for schema in node.target._schema.arguments:
            if schema.alias_info and schema.alias_info.is_write and isinstance(arguments[schema.name], Ref):
                return str(arguments[schema.name].name)
        return None

    def _alias(self, node: fx.Node, made: Node, written: str | None) -> None:
        """From now on whoever says `written` means the result; whoever looked at its memory is wrong."""
        self.names[node.name] = made.name
        if written in self.owned:  # the result is the buffer itself, which is written at the update
            self.names[node.name] = written
            self.spoiled[written] = made
        elif written:
            memory = self.storage.get(written, written)
            self.spoiled.update({name: made for name, root in self.storage.items() if root == memory})
            self.spoiled[memory] = made
            self.names.update({name: made.name for name, value in self.names.items() if value == written})
        elif _is_view(node) and made.reads:
            self.storage[made.name] = self.storage.get(made.reads[0], made.reads[0])

    def _check_memory(self, node: Node, written: str | None) -> None:
        for name in node.reads:
            if name != written and (writer := self.spoiled.get(name)):
                raise TraceError(
                    f"{node.operator} in {node.where} reads memory that {writer.operator} in {writer.where} "
                    "has changed through another view. Make that operator out-of-place."
                )


def is_check(node: fx.Node) -> bool:
    """Whether a node only makes sure of something."""
    return any(check in str(node.target) for check in _CHECKS)


def spec_of(value: Tensor) -> TensorSpec:
    """Shape and type of a tensor."""
    return TensorSpec(tuple(int(size) for size in value.shape), str(value.dtype).removeprefix("torch."))


def _out_of_place(target: Any, node: fx.Node) -> Any:
    """`relu_` -> `relu`."""
    if (name := str(target).removeprefix("aten.")) in _RENAMED:
        packet, overload = _RENAMED[name].split(".")
        return getattr(getattr(torch.ops.aten, packet), overload)
    packet, overload = name.split(".")
    plain = getattr(torch.ops.aten, packet.removesuffix("_"), None) if packet.endswith("_") else None
    if plain is None or not hasattr(plain, overload):
        raise TraceError(f"{target} in {_source(node)} writes to its input and has no out-of-place form. Replace it.")
    return getattr(plain, overload)


def _operator(target: Any, node: fx.Node) -> str:
    """Its name; only operators of ATen's kind have one."""
    if target is operator.getitem:
        return "getitem"
    if not isinstance(target, torch._ops.OpOverload):
        raise TraceError(f"{target} in {_source(node)} computes with values of a tensor; only shapes are known.")
    return str(target)


def _is_view(node: fx.Node) -> bool:
    """Whether the result lies in the memory of the first input. `reshape` and `contiguous` may."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    returns = node.target._schema.returns
    return bool(returns and returns[0].alias_info) or any(
        name in str(node.target) for name in ("reshape", "flatten", "contiguous", "dropout", "chunk", "split")
    )


def _module_path(node: fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return path if path.startswith("loss") else f"{path}.".removeprefix(MODEL).rstrip(".")


def _source(node: fx.Node) -> str:
    """File, line and text of the deepest frame that is the user's."""
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    frames = [
        (head.strip(), text.strip())
        for head, text in itertools.pairwise(lines)
        if head.strip().startswith("File ") and not any(ours in head for ours in _OURS)
    ]
    if not frames:
        return ""
    head, text = frames[-1]
    return f"{head.split(', in ')[0].replace('File ', '')}: {text}"
