"""Explain a non-finite loss: the rank with the loss detects it, and all ranks together find the cause."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from engines.errors import LossError, RankError
from engines.loss.non_finite_causes import NonFiniteCause, format_causes

if TYPE_CHECKING:
    from engines.rank_server import RankServer
    from mpi4dl_nb.cluster import Cluster

__all__ = ["explain_loss"]


@contextmanager
def explain_loss(cluster: Cluster, name: str) -> Iterator[None]:
    """Raise a LossError from this context with the causes that the ranks find in images, labels and weights."""
    try:
        yield
    except LossError as error:
        words = ""
        with suppress(RankError):
            words = format_causes(dict(enumerate(cluster.call(_find_causes, name))))
        if words:
            raise error.with_cause(words) from None
        raise


def _find_causes(host: RankServer, name: str) -> list[NonFiniteCause]:
    return host.trainings[name].find_causes() if name in host.trainings else []
