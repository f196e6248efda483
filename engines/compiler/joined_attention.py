"""Attention that is written by hand, as `softmax(q @ k.T) @ v`, becomes one operator if there are many keys.

Its matrix of scores has an element for each pair of a query and a key, which no rank could hold; the operator needs
none. Few keys are left as they are written.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from mpi4dl_nb.engines.compiler.local_rules import WHOLE_PX
from mpi4dl_nb.engines.graph.model_graph import ModelGraph, Node, Ref
from mpi4dl_nb.engines.program.rng import find_sample_number

_PRODUCTS = ("aten.matmul.default", "aten.bmm.default", "aten.einsum.default")
_OF_KEYS, _OF_TURNED_KEYS, _OF_VALUES = "bxd,byd->bxy", "bxd,bdy->bxy", "bxy,byd->bxd"
_SCALES = ("aten.mul.Tensor", "aten.div.Tensor")


def join_attention(graph: ModelGraph, attention_keys: str) -> ModelGraph:
    """Return the graph with one operator for each attention to more than `WHOLE_PX` keys that is written by hand.

    With `attention_keys="ring"` also to fewer keys: only the operator has a ring.

    What is found: a product, perhaps multiplied or divided by a number, perhaps with a mask added, softmax over the
    keys, perhaps dropout, and a second product; each read by the next one only.
    """
    #     scores = matmul(q, kT) -> mul(., number) -> add(., mask) -> softmax(., -1) -> dropout -> matmul(., v)
    #     becomes                                                     attention(q, kT.mT, v, mask, p, scale=number)
    finder, most = _ChainFinder(graph), 0 if attention_keys == "ring" else WHOLE_PX
    joined: dict[str, tuple[Node, ...]] = {}
    for node in graph.nodes:
        chain = finder.find(node)
        if chain and chain.nodes[0].result.shape[-1] > most and not finder.reorders_draws(chain):
            joined |= dict.fromkeys((part.name for part in chain.nodes), ())
            joined[node.name] = chain.join()
    if not joined:
        return graph
    return replace(graph, nodes=tuple(part for node in graph.nodes for part in joined.get(node.name, (node,))))


@dataclass
class _Chain:
    """The nodes of one attention, in order, and what the operator in their place takes, as far as it is known."""

    nodes: list[Node]
    arguments: dict[str, Any]
    turn: Node | None = None

    def join(self) -> tuple[Node, ...]:
        """Return the nodes in place of the last one of the chain."""
        last, flops = self.nodes[-1], sum(node.flops for node in self.nodes)
        operator = "aten.scaled_dot_product_attention.default"
        return *filter(None, [self.turn]), replace(last, operator=operator, arguments=self.arguments, flops=flops)


class _ChainFinder:
    """Finds the attentions of a graph, each from its last node back to its first."""

    def __init__(self, graph: ModelGraph) -> None:
        self.graph, self.nodes = graph, {node.name: node for node in graph.nodes}
        self.places = {node.name: index for index, node in enumerate(graph.nodes)}
        self.readers = Counter(name for node in graph.nodes for name in node.reads)
        self.readers.update(graph.answers)

    def find(self, last: Node) -> _Chain | None:
        """Return the attention that ends with a node, if there is one."""
        if (pair := self._get_factors(last, _OF_VALUES)) is None:
            return None
        weights, value = pair
        arguments = {"query": None, "key": None, "value": value, "attn_mask": None, "dropout_p": 0.0}
        chain = _Chain([last], {**arguments, "is_causal": False, "scale": 1.0, "enable_gqa": False})
        source: object = weights
        if node := self._step_back(chain, source, "aten.dropout.default"):
            chain.arguments["dropout_p"] = float(node.arguments["p"] if node.arguments["train"] else 0.0)
            source = node.arguments["input"]
        node = self._step_back(chain, source, "aten.softmax.int")
        if node is None or node.arguments["dim"] % len(node.result.shape) != len(node.result.shape) - 1:
            return None
        if node.result != self.graph.specs[node.arguments["self"].name]:
            return None  # in another type
        source = self._pass_mask(chain, node.arguments["self"])
        if node := self._step_back(chain, source, *_SCALES):
            factor = node.arguments["other"]
            if not isinstance(factor, int | float) or factor <= 0:
                return None
            chain.arguments["scale"] = factor if "mul" in node.operator else 1 / factor
            source = node.arguments["self"]
        node = self._step_back(chain, source, *_PRODUCTS)
        return chain if node and self._take_factors(chain, node) else None

    def reorders_draws(self, chain: _Chain) -> bool:
        """Return whether another operator draws random numbers between the first and the last node of a chain."""
        start, stop = (self.places[node.name] for node in (chain.nodes[0], chain.nodes[-1]))
        between = self.graph.nodes[start:stop]
        return chain.arguments["dropout_p"] > 0 and any(
            node not in chain.nodes and find_sample_number(self.graph, node) is not None for node in between
        )

    def _step_back(self, chain: _Chain, source: object, *operators: str) -> Node | None:
        """Return the node that makes a value, and add it to the chain, if it is one of these and read once."""
        node = self.nodes.get(source.name) if isinstance(source, Ref) else None
        if node is None or node.operator not in operators or self.readers[node.name] > 1:
            return None
        chain.nodes.insert(0, node)
        return node

    def _pass_mask(self, chain: _Chain, source: Ref) -> Ref:
        """Return what a mask is added to, if `source` is such a sum, else `source`."""
        node = self.nodes.get(source.name)
        if node is None or node.operator != "aten.add.Tensor" or node.arguments.get("alpha", 1) != 1:
            return source
        pair = node.arguments["self"], node.arguments["other"]
        for scores, mask in (pair, pair[::-1]):
            maker = self.nodes.get(scores.name) if isinstance(scores, Ref) else None
            is_product = maker is not None and maker.operator in (*_SCALES, *_PRODUCTS)
            if is_product and isinstance(mask, Ref) and self._step_back(chain, source, node.operator):
                chain.arguments["attn_mask"] = mask
                return scores
        return source

    def _take_factors(self, chain: _Chain, product: Node) -> bool:
        """Take queries and keys from the product that makes the scores; return whether there are such."""
        if pair := self._get_factors(product, _OF_KEYS):
            query, key = pair
        elif pair := self._get_factors(product, _OF_TURNED_KEYS):
            query, turned = pair
            key, spec = Ref(f"{chain.nodes[-1].name}_keys"), self.graph.specs[turned.name]
            *before, size, count = spec.shape
            how = {"self": turned, "dim0": -2, "dim1": -1}
            spec = replace(spec, shape=(*before, count, size))
            chain.turn = replace(
                product, name=key.name, operator="aten.transpose.int", arguments=how, spec=spec, flops=0
            )
        else:
            return False
        chain.arguments |= {"query": query, "key": key}
        return True

    def _get_factors(self, node: Node, form: str) -> tuple[Ref, Ref] | None:
        """Return the factors of a product of that form, in which b stands for all axes before the last two."""
        a = node.arguments
        if node.operator == "aten.einsum.default":
            return tuple(a["tensors"]) if _has_form(a["equation"], form) else None
        if node.operator not in _PRODUCTS or form == _OF_KEYS:
            return None
        first, second = a["self"], a["mat2" if "bmm" in node.operator else "other"]
        one, other = (self.graph.specs[ref.name].shape for ref in (first, second))
        return (first, second) if len(one) == len(other) >= 3 and one[:-2] == other[:-2] else None


def _has_form(equation: str, form: str) -> bool:
    """Return whether an equation is a form with other letters.

    >>> _has_form("nhid, nhjd -> nhij", "bxd,byd->bxy"), _has_form("nhid,nhdj->nhij", "bxd,byd->bxy")
    (True, False)
    """
    parts, shapes = (re.split(",|->", text.replace(" ", "")) for text in (equation, form))
    letters: dict[str, str] = {}
    for part, shape in zip(parts, shapes, strict=False):
        if part[:-2] != parts[0][:-2] or len(part) < 3:
            return False
        if any(
            letters.setdefault(symbol, letter) != letter for symbol, letter in zip(shape[1:], part[-2:], strict=True)
        ):
            return False
    used = [*parts[0][:-2], *letters.values()]
    return len(parts) == len(shapes) and len(set(used)) == len(used)
