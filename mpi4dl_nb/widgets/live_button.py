"""A button whose clicks are handled while a cell runs, if the page and the kernel support it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets

__all__ = ["LiveButton"]


class LiveButton(ipywidgets.Button):
    """A button that calls `on_press()` in another thread while a cell runs, so `on_press` should only set a flag.

    JupyterLab 4.4 and later, and front ends based on it, send clicks to a subshell of the kernel, which has its own
    thread. Elsewhere a click is handled when the cell is done.
    """

    def __init__(self, label: str, on_press: Callable[[], None], tip: str = "", icon: str = "") -> None:
        super().__init__(description=label, tooltip=tip or label, icon=icon, layout={"width": "max-content"})
        self.on_click(lambda _: on_press())

    def open(self) -> None:
        """Open the comm to the page."""
        super().open()
        self._clear_reply_subshell()

    def _send(self, msg: Any, buffers: Any = None) -> None:
        super()._send(msg, buffers=buffers)
        self._clear_reply_subshell()

    def _clear_reply_subshell(self) -> None:
        # ipykernel 7.4 records the subshell that last sent a message of a widget, here that of the cells, and routes
        # replies to it. Without the record, a click is handled in the subshell to which the page sends it.
        vars(self.comm or self).pop("_reply_subshell_id", None)
