"""Run ipyparallel's coroutines in a separate event loop, since that of a notebook's kernel is busy."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from functools import cache
from threading import Thread
from typing import Any

__all__ = ["run_in_loop"]


@cache
def _get_loop(process: int) -> asyncio.AbstractEventLoop:
    """Return the loop of this process: a fork has a copy of its parent's loop, but not the thread that runs it."""
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, name="mpi4dl_nb launcher", daemon=True).start()
    return loop


def run_in_loop(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to completion and return its result."""
    future = asyncio.run_coroutine_threadsafe(work, _get_loop(os.getpid()))
    try:
        return future.result()
    except KeyboardInterrupt:
        future.cancel()
        raise
