"""The controller of the ranks: ipyparallel's, but its hub forgets the numbers of the messages that are answered.

As it comes, the hub keeps every number for as long as it lives, to tell a client that asks which messages are done. No
client asks here, and a training of a million steps on three ranks would cost it 500 MB. This is a program, started by
its path (see mpi.py), and imports nothing of ours.
"""

from __future__ import annotations

from typing import Any

from ipyparallel.controller import app
from ipyparallel.controller.hub import Hub


class _ForgetfulHub(Hub):
    """It knows which messages are under way, and of no others."""

    def save_queue_result(self, idents: Any, msg: Any) -> None:
        super().save_queue_result(idents, msg)
        self.all_completed.clear()
        for numbers in self.completed.values():
            numbers.clear()


if __name__ == "__main__":
    app.Hub = _ForgetfulHub
    app.main()
