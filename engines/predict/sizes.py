"""One model at images of many sizes, each traced once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from mpi4dl_nb.engines.compiler.compile import Compiler
from mpi4dl_nb.engines.compiler.trace_cache import Loss, TraceCache
from mpi4dl_nb.engines.errors import PlanError, TraceError
from mpi4dl_nb.engines.formatting import FactTable, format_bytes, format_names
from mpi4dl_nb.engines.graph.model_graph import ModelGraph
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.machine import Machine
from mpi4dl_nb.engines.predict.machines import resolve_machine
from mpi4dl_nb.engines.predict.rank_memory import predict_rank_memory


@dataclass(frozen=True, repr=False)
class Sizes(FactTable):
    """A model with its loss (None: cross-entropy), and its title in studies (by default its class).

    Studies that share one object share its traces, each of which takes seconds.

    >>> from mpi4dl_nb import Plan, Sizes, forecast, resnet20_v1
    >>> model = Sizes(resnet20_v1(), title="ResNet-20")
    >>> plans = [Plan(split_size=1, spatial_size=0, data_parallel=ranks) for ranks in (1, 2)]
    >>> [forecast(model, plan, (2, 3, 64, 64), "Summit").images for plan in plans]
    [2, 4]
    """

    model: nn.Module
    loss: Loss | None = None
    title: str = ""
    _traces: dict[tuple[int, ...], TraceCache] = field(default_factory=dict, compare=False)

    @property
    def facts(self) -> dict[str, object]:
        shapes = [" × ".join(map(str, shape)) for shape in self._traces]
        weights = sum(weight.numel() for weight in self.model.parameters())
        traced = format_names(shapes) or "of no size yet"
        return {"model": self.name, "weights": f"{weights:,}", "traced for images": traced}

    def graph(self, plan: Plan, image_shape: Sequence[int]) -> ModelGraph:
        """Return the graph from which a plan is compiled, for batches (N, C, H, W).

        Raises PlanError, TraceError or ImageError.
        """
        shape = tuple(image_shape)
        if shape not in self._traces:
            self._traces[shape] = TraceCache(self.model, shape, self.loss or nn.CrossEntropyLoss())
        return self._traces[shape].get_graph(plan)

    @classmethod
    def of(cls, model: nn.Module | Sizes, loss: Loss | None = None) -> Sizes:
        """Return the model as `Sizes`; an object that is one already is returned with its traces.

        Raises PlanError if that one has another loss.
        """
        if isinstance(model, Sizes) and loss is not None and loss is not model.loss:
            raise PlanError("The traces of a Sizes are of its own loss. Give the loss to it: Sizes(model, loss).")
        return model if isinstance(model, Sizes) else cls(model, loss)

    @property
    def name(self) -> str:
        """The name of the model in figures."""
        usual = "this model" if type(self.model) is nn.Sequential else type(self.model).__name__
        return self.title or usual


# Finds the largest image that fits into the memory of every rank under a plan.


MOST_PX = 1 << 17
START_PX = 512
PATIENCE = 8
"""The number of guesses by extrapolation before the search bisects."""


@dataclass(frozen=True, repr=False)
class Limit(FactTable):
    """The largest square image that fits: `size_px` a side (0: none), at which the fullest rank holds `bytes`.

    With `next_px` a side, the next larger size that can be cut, a rank would hold `next_bytes`, more than the
    `rank_bytes` that it may use. Both are None if no larger image was tried, or if none can be computed.
    """

    plan: Plan
    batch: int
    rank_bytes: int
    step_px: int
    size_px: int
    bytes: int
    next_px: int | None
    next_bytes: int | None

    caption = "Largest image"

    @property
    def facts(self) -> dict[str, object]:
        larger = {"larger images": "not tried"}
        if self.next_bytes is not None:
            larger = {f"memory with {self.next_px:,} px a side": format_bytes(self.next_bytes)}
        return {
            "largest image": f"{self.size_px:,} × {self.size_px:,} px" if self.size_px else "none fits",
            "images in a batch": self.batch,
            "memory of the fullest rank": f"{format_bytes(self.bytes)} of {format_bytes(self.rank_bytes)}",
            **larger,
            "plan": self.plan.summary,
        }


def largest_image(
    model: nn.Module | Sizes,
    plan: Plan,
    machine: Machine | str,
    batch: int = 1,
    channels: int = 3,
    step_px: int = 64,
    rank_bytes: int | None = None,
    loss: Loss | None = None,
    optimiser_states: int = 1,
    most_px: int = MOST_PX,
) -> Limit:
    """Return the largest square image of which batches of `batch` fit into every rank.

    The side is a multiple of `step_px`, up to `most_px`. `rank_bytes` is the memory that a rank may use; None means
    that of the machine, which may be given by name. Nothing is run: memory is counted from the programs.
    Raises PlanError if no limit is known, or if the plan does not fit the model at any size; or TraceError.

    >>> from mpi4dl_nb import Plan, largest_image, resnet20_v1
    >>> one = largest_image(resnet20_v1(), Plan(split_size=1, spatial_size=0), "Summit", rank_bytes=10**9)
    >>> four = largest_image(resnet20_v1(), Plan(split_size=1, slice_method="2x2"), "Summit", rank_bytes=10**9)
    >>> four.size_px > 1.8 * one.size_px
    True
    """
    machine = resolve_machine(machine)
    limit = machine.get_rank_bytes(plan.ranks) if rank_bytes is None else rank_bytes
    if limit is None:
        raise PlanError(f"How much memory a rank of {machine.name!r} has is not known. Say it: rank_bytes=16 * 2**30.")
    if not 1 <= step_px <= most_px:
        raise PlanError(f"step_px={step_px} must be at least 1, and at most most_px={most_px}.")
    weighing = _SizeProbe(Sizes.of(model, loss), plan, (batch, channels), step_px, optimiser_states)
    while True:
        low, high = _search_size(weighing, limit, most_px // step_px)
        # The search measures only the ranks that were fullest before. If another rank is fuller here, search again with
        # it.
        held = weighing.compute_full_peak(low) if low else 0
        if held <= limit:
            break
    next_px = high * step_px if high * step_px <= most_px else None
    try:
        beyond = None if next_px is None else weighing.compute_full_peak(high)
    except TraceError:  # a layer cannot be computed at this size
        next_px = beyond = None
    return Limit(plan, batch, limit, step_px, low * step_px, held, next_px, beyond)


def _search_size(weighing: _SizeProbe, limit: int, most: int) -> tuple[int, int]:
    """Return the largest size that fits and the next larger one, in steps.

    Sizes that are too small to be cut count as fitting, and those at which a layer cannot be computed (one that needs
    the whole image) as too large. Raises the last PlanError or TraceError if all sizes are refused.
    """
    low, high, guess = 0, most + 1, max(1, START_PX // weighing.step_px)
    refused: PlanError | TraceError | None = None
    for turn in range(most):
        if high - low <= 1:
            break
        size = min(max(guess, low + 1), high - 1)
        try:
            fits = weighing.compute_peak(size) <= limit
        except (PlanError, TraceError) as error:
            refused, fits = error, isinstance(error, PlanError)
        low, high = (size, high) if fits else (low, size)
        # Extrapolation needs few guesses, which matters, since each costs a trace and a compilation.
        # Bisection, slower but certain, is for memory that does not grow with the pixels.
        guess = _guess_size(weighing.known, limit) if turn < PATIENCE else 0
        guess = guess or (low + high) // 2
    if refused and not weighing.known:
        raise refused
    return max((count for count, held in weighing.known.items() if held <= limit), default=0), high


def _guess_size(known: Mapping[int, int], limit: int) -> int:
    """Return the size at the limit by extrapolation, if memory grows with the pixels, from the two nearest sizes.

    >>> _guess_size({4: 116, 8: 164}, limit=200), _guess_size({}, limit=5)
    (10, 0)
    """
    # bytes = fixed + per_px * size^2, through the two measured sizes that are nearest to the limit.
    near = sorted(known.items(), key=lambda item: abs(item[1] - limit))[:2]
    if not near:
        return 0
    (size, held), (other, others) = near[0], near[-1]
    per_px = (held - others) / (size**2 - other**2) if size != other else held / size**2
    pixels = size**2 + (limit - held) / per_px if per_px > 0 else 0.0
    return math.isqrt(int(pixels)) if pixels > 0 else 0


@dataclass
class _SizeProbe:
    """Measures the bytes at a size, in steps, of the ranks that were the fullest so far.

    At other sizes these ranks are usually the fullest, too.
    """

    sizes: Sizes
    plan: Plan
    batch: tuple[int, int]
    step_px: int
    states: int
    ranks: set[int] = field(default_factory=set)
    known: dict[int, int] = field(default_factory=dict)

    def compute_peak(self, count: int) -> int:
        """Return the peak bytes at a size. Raises PlanError if images of this size cannot be cut."""
        if not self.ranks:
            return self.compute_full_peak(count)
        if count not in self.known:
            self.known[count] = max(self._compute_rank_peaks(count, self.ranks).values())
        return self.known[count]

    def compute_full_peak(self, count: int) -> int:
        """Return the peak bytes over all ranks, and add the fullest rank to those measured from now on."""
        held = self._compute_rank_peaks(count, range(self.plan.replica_ranks))
        fullest = max(held, key=lambda rank: held[rank])
        if fullest not in self.ranks:
            self.known = {}
        self.ranks.add(fullest)
        self.known[count] = held[fullest]
        return held[fullest]

    def _compute_rank_peaks(self, count: int, ranks: Iterable[int]) -> dict[int, int]:
        side = count * self.step_px
        graph = self.sizes.graph(self.plan, (*self.batch, side, side))
        programs = map(Compiler(graph, self.plan).compile_rank, ranks)
        memory = (predict_rank_memory(program, graph, self.plan, self.states) for program in programs)
        return {found.rank: found.peak_bytes for found in memory}
