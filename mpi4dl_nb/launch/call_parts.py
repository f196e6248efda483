"""The messages of a call to a rank over ipyparallel: what is large travels in parts, each of which is progress.

`engines/server/rank_server.py` has the rank's side.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import ipyparallel

from mpi4dl_nb.engines.server import rank_server
from mpi4dl_nb.engines.server.notebook_imports import NotebookImports

PART_BYTES = 4 << 20
_MOST_PARTS = 400  # of a call's arguments: ZeroMQ drops messages of a queue of more than 1,000


def call_in_parts(
    view: ipyparallel.DirectView, common: bytes, own: bytes, followed: NotebookImports
) -> tuple[str, Future[bytes]]:
    """Send a call, and return the id of the message that runs it, and its packed reply.

    Raises IndexError if the engine of `view` is gone.
    """
    work: tuple[bytes, bytes] | None = (common, own)
    if (total := len(common) + len(own)) > PART_BYTES:
        step, begin = max(PART_BYTES, total // _MOST_PARTS), 0
        for piece in (common, own):
            for at in range(0, len(piece), step):
                part = piece[at : at + step]
                view.apply_async(rank_server.receive_part, part, begin, total)
                begin += len(part)
        work = None
    asked = view.apply_async(rank_server.run, work, (len(common), len(own)), followed, PART_BYTES)
    return asked.msg_ids[0], _Arrival(view, asked).reply


class _Arrival:
    """The arrival of a reply: whole, or one part after the other. Everything here runs in the client's thread."""

    def __init__(self, view: ipyparallel.DirectView, asked: Future[Any]) -> None:
        self.reply: Future[Any] = Future()
        self._view, self._arrived, self._total = view, bytearray(), 0
        asked.add_done_callback(self._receive)

    def _receive(self, asked: Future[Any]) -> None:
        try:
            answer = asked.result()
            if isinstance(answer, int):
                self._total = answer
            else:
                self._arrived += answer
            if len(self._arrived) < self._total:
                begin = len(self._arrived)
                self._view.apply_async(rank_server.send_part, begin, PART_BYTES).add_done_callback(self._receive)
            else:
                self.reply.set_result(self._arrived)
        except Exception as error:  # of the transport: mostly the rank is dead, or the client closed
            self.reply.set_exception(error)
