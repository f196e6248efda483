"""Buckets of gradients: which weights are reduced together, and where in a program their all-reduce starts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from engines.layer.graph import ModelGraph
from engines.program.instructions import Instruction, Phase, SumGradients
from engines.program.program import Step

__all__ = ["insert_gradient_sums", "make_buckets"]


def make_buckets(
    graph: ModelGraph, holders: Mapping[str, tuple[int, ...]], tag: int, bucket_bytes: int = 1 << 22
) -> tuple[SumGradients, ...]:
    """Return the gradient all-reduces of a training step; `holders` are the ranks that hold each weight, ascending.

    Weights held by the same ranks share buckets of `bucket_bytes` or a little more, the last layers first, as the
    backward pass reaches them first (Li et al., 2020, PyTorch Distributed, arXiv:2006.15704, section 3.2.3). Ranks may
    start the buckets in different orders; each bucket therefore has its own tag, from `tag` on.
    """
    groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in reversed(graph.weights):
        if name in graph.trainable and len(holders[name]) > 1:
            groups[holders[name]].append(name)
    found: list[SumGradients] = []
    for group, names in sorted(groups.items()):
        part: list[str] = []
        for name in names:
            part.append(name)
            filled = sum(graph.weights[each].bytes for each in part)
            if filled >= bucket_bytes or name == names[-1]:
                number = len(found)
                found.append(SumGradients(f"gradients{number}", tuple(part), filled, group, tag + 2 * number))
                part = []
    return tuple(found)


def insert_gradient_sums(
    steps: Iterable[Step], sums: Sequence[SumGradients], trained: Callable[[Instruction], set[str]]
) -> Iterator[Step]:
    """Yield a rank's steps, with each all-reduce started after the last step that adds to a gradient in its bucket.

    `trained` returns the weights to whose gradients an instruction adds in the backward pass.
    """
    steps = tuple(steps)
    last: dict[str, int] = {}
    for index, step in enumerate(steps):
        if step.phase is not Phase.FORWARD:
            last.update(dict.fromkeys(trained(step.instruction), index))
    begun: dict[int, list[SumGradients]] = defaultdict(list)
    for each in sums:
        # A weight that no step trains here has no gradient; the bucket then starts at the end, as other ranks still
        # take part.
        begun[max(last.get(name, len(steps) - 1) for name in each.weights)].append(each)
    for index, step in enumerate(steps):
        yield step
        yield from (Step(each, Phase.BACKWARD, step.micro_batch) for each in begun[index])
