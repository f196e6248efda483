"""One model at images of many sizes, each traced once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from engines.layer.graph import ModelGraph
from engines.plan import Plan
from engines.trace_cache import Loss, TraceCache

__all__ = ["Sizes"]


@dataclass(frozen=True)
class Sizes:
    """A model with its loss (None: cross-entropy), and its title in studies (by default its class).

    Studies that share one object share its traces, each of which takes seconds.

    >>> from engines.models import resnet20_v1
    >>> from mpi4dl_nb import Plan, Sizes, forecast
    >>> model = Sizes(resnet20_v1(), title="ResNet-20")
    >>> plans = [Plan(split_size=1, spatial_size=0, data_parallel=ranks) for ranks in (1, 2)]
    >>> [forecast(model, plan, (2, 3, 64, 64), "Summit").images for plan in plans]
    [2, 4]
    """

    model: nn.Module
    loss: Loss | None = None
    title: str = ""
    _traces: dict[tuple[int, ...], TraceCache] = field(default_factory=dict, repr=False, compare=False)

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
        """Return the model as `Sizes`; an object that is one already is returned with its traces."""
        return model if isinstance(model, Sizes) else cls(model, loss)

    @property
    def name(self) -> str:
        """The name of the model in figures."""
        usual = "this model" if type(self.model) is nn.Sequential else type(self.model).__name__
        return self.title or usual
