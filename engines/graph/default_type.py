"""PyTorch's default type, which a whole process shares: changed for a while, and put back."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from mpi4dl_nb.engines.graph.model_graph import ModelGraph

_CHANGE = threading.Condition()
_USERS: Counter[int] = Counter()  # how many contexts each thread is in


@contextmanager
def use_default_type(dtype: torch.dtype) -> Iterator[None]:
    """Within the context, `torch.tensor([0.5])`, `torch.ones(3)` and quotients of whole numbers have the type `dtype`.

    The type is that of all threads. Threads that want the same one share it, the last of them puts the former one back,
    also after an error, and a thread that wants another one waits until then.

    >>> with use_default_type(torch.float64):
    ...     torch.tensor([0.5]).dtype
    torch.float64
    """
    # Ranks may be threads: if each of them put back what it had found, the first one to end would change the type of
    # those that are still computing, and the last one would leave the changed type behind.
    #
    #     thread 0   float32 -> float64 ............ ends
    #     thread 1              float64 .................. ends, puts float32 back
    thread = threading.get_ident()
    with _CHANGE:
        _CHANGE.wait_for(lambda: _USERS.total() == _USERS[thread] or torch.get_default_dtype() is dtype)
        if not _USERS.total():
            _OUTSIDE[:] = [torch.get_default_dtype()]
        before = torch.get_default_dtype()
        _USERS[thread] += 1
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        with _CHANGE:
            _USERS[thread] -= 1
            alone = _USERS.total() == _USERS[thread]
            if alone:  # a context within another one of this thread returns to that one's type
                torch.set_default_dtype(before if _USERS[thread] else _OUTSIDE[0])
            if not _USERS[thread]:
                del _USERS[thread]
            _CHANGE.notify_all()


_OUTSIDE: list[torch.dtype] = []  # the type outside all contexts


def use_default_type_of(graph: ModelGraph) -> AbstractContextManager[None]:
    """Use, within the context, the default type with which a graph was traced."""
    return use_default_type(getattr(torch, graph.default_type))
