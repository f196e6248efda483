"""The view of a debugged step that the page draws: it gets frames, keeps them, and sends keys and a chosen message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anywidget
import traitlets

from mpi4dl_nb.draw.step_frame import StepFrame, make_palettes
from mpi4dl_nb.widgets.page_modules import join_modules, read_style


class StepScene(anywidget.AnyWidget):
    """The ranks of a debugged step, animated, with a record of its frames.

    `on_key(key)` handles the keys in `accepts`, `on_focus(index)` a message that was chosen on the page, and
    `on_rest()` is called when nothing has happened on the page for a second. `list_frames` returns the frames for a
    page that is opened later.
    """

    _esm = join_modules("stepper_view.js")
    _css = read_style("stepper.css")
    setup = traitlets.Dict().tag(sync=True)
    palettes = traitlets.Bytes(b"").tag(sync=True)
    meta = traitlets.Dict().tag(sync=True)
    values = traitlets.Bytes(b"").tag(sync=True)
    focus = traitlets.Int(0).tag(sync=True)
    alt = traitlets.Unicode("").tag(sync=True)
    accepts = traitlets.List(traitlets.Unicode()).tag(sync=True)
    tip = traitlets.Unicode("").tag(sync=True)

    def __init__(
        self,
        setup: dict[str, Any],
        keys: Sequence[str],
        on_key: Callable[[str], None],
        on_focus: Callable[[int], None],
        on_rest: Callable[[], None],
        tip: str,
    ) -> None:
        super().__init__(setup=setup, palettes=make_palettes(), accepts=list(keys), tip=tip)
        self.list_frames: Callable[[], Sequence[StepFrame]] = tuple
        self._handlers: dict[str, Callable[[Any], None]] = {
            "key": on_key,
            "focus": on_focus,
            "rest": lambda _: on_rest(),
            "history": lambda _: self._send_history(),
        }
        self.on_msg(self._handle_event)

    def show(self, frame: StepFrame, dropped: Sequence[int], note: str, alt: str, focus: int) -> None:
        """Show a frame as the newest one. Pages forget the `dropped` ones; `note` says what is missing by now."""
        with self.hold_sync():  # one message: a description never comes with the values of another frame
            self.values, self.alt, self.focus = frame.values, alt, focus
            self.meta = frame.meta | {"dropped": list(dropped), "note": note}

    def _send_history(self) -> None:
        frames = self.list_frames()
        self.send({"history": [frame.meta for frame in frames]}, [frame.values for frame in frames])

    def _handle_event(self, _widget: Any, content: dict[str, Any], _buffers: Any) -> None:
        try:
            for name, value in content.items():
                if handler := self._handlers.get(name):
                    handler(value)
        finally:  # the page waits for it, also after an interrupt, and where no frame has changed
            if asked := content.get("asked"):
                self.send({"answered": asked})
