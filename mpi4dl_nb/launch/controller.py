"""The controller of the ranks: ipyparallel's, with a hub that drops the numbers of answered messages.

ipyparallel's hub keeps the number of every message, so that a client may query which messages are done. No client does
so here, and a training of a million steps on three ranks would take 500 MB. This file is a program, started by its path
(see mpi.py), and imports nothing of this package.
"""

from __future__ import annotations

from typing import Any

from ipyparallel.controller import app
from ipyparallel.controller.hub import Hub


class _ForgetfulHub(Hub):
    """Keeps the numbers of unanswered messages only."""

    def save_queue_result(self, idents: Any, msg: Any) -> None:
        super().save_queue_result(idents, msg)
        self.all_completed.clear()
        for numbers in self.completed.values():
            numbers.clear()


if __name__ == "__main__":
    app.Hub = _ForgetfulHub  # the application has no setting for its hub
    app.main()
