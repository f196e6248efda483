"""The controller of the ranks: that of ipyparallel, except that its hub forgets the ids of answered messages.

By default the hub keeps every id for its lifetime, to answer clients that ask which messages are done. No client asks
here, and a training of a million steps on three ranks would cost 500 MB. This is a program, started by its path (see
mpi_ranks.py), and imports none of our modules.
"""

from __future__ import annotations

from typing import Any

from ipyparallel.controller import app
from ipyparallel.controller.hub import Hub


class _ForgetfulHub(Hub):
    """A hub that only keeps the messages in progress."""

    def save_queue_result(self, idents: Any, msg: Any) -> None:
        super().save_queue_result(idents, msg)
        self.all_completed.clear()
        for numbers in self.completed.values():
            numbers.clear()


if __name__ == "__main__":
    app.Hub = _ForgetfulHub  # the application has no setting for its hub
    app.main()
