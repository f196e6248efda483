"""A button whose clicks are heard while a cell runs, where the page and the kernel can do that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets

__all__ = ["LiveButton"]


class LiveButton(ipywidgets.Button):
    """`on_press()` is called in another thread while a cell runs, so it should do no more than take note.

    JupyterLab 4.4 and later, and what is made of it, send clicks to a subshell of the kernel, which has a thread of
    its own. Elsewhere they wait until the cell is done.
    """

    def __init__(self, label: str, on_press: Callable[[], None], tip: str = "", icon: str = "") -> None:
        super().__init__(description=label, tooltip=tip or label, icon=icon, layout={"width": "max-content"})
        self.on_click(lambda _: on_press())

    def open(self) -> None:
        """Tell the page of it."""
        super().open()
        self._clear_reply_subshell()

    def _send(self, msg: Any, buffers: Any = None) -> None:
        super()._send(msg, buffers=buffers)
        self._clear_reply_subshell()

    def _clear_reply_subshell(self) -> None:
        # ipykernel 7.4 has the thread that last sent something of a widget hear the answers, here that of the cells,
        # and notes it so. Without the note a click is heard where the page has sent it.
        vars(self.comm or self).pop("_reply_subshell_id", None)
