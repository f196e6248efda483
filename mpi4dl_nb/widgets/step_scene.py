"""The page's part of a stepper: frames of the step, and what a page asks of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import traitlets

from mpi4dl_nb.draw.step_frame import StepFrame, make_palettes
from mpi4dl_nb.widgets.page_modules import join_modules, read_style
from mpi4dl_nb.widgets.page_view import BoundedView, PageRules, Request
from mpi4dl_nb.widgets.saved_view import Answer, SavedView, make_key

RUNS = (
    ("n", "Instruction", "one instruction"),
    ("l", "Layer", "to the end of the layer"),
    ("m", "Micro-batch", "to the end of a micro-batch's pass through a stage"),
    ("p", "Phase", "all forward, all back, or the update"),
    ("b", "To breakpoint", "until an instruction of all that is chosen below is done"),
    ("f", "Finish", "the rest of the step at full speed; weights move at the end"),
    ("r", "Restart", "from the beginning of the step; nothing has changed"),
)
GRADIENT = "g"


class StepScene(BoundedView):
    """The ranks of a debugged step, animated, with a record of its frames.

    `on_key(key)` handles the keys in `accepts`, `on_focus(index)` a message that was chosen on the page, and
    `on_rest()` is called when nothing has happened on the page for a second. `trouble` is what was refused, shown in
    the place of the title. `list_frames` returns the frames for a page that is opened later.
    """

    _esm = join_modules("stepper/stepper_view.js")
    _css = read_style("stepper/stepper.css")
    setup = traitlets.Dict().tag(sync=True)
    palettes = traitlets.Bytes(b"").tag(sync=True)
    meta = traitlets.Dict().tag(sync=True)
    values = traitlets.Bytes(b"").tag(sync=True)
    focus = traitlets.Int(0).tag(sync=True)
    alt = traitlets.Unicode("").tag(sync=True)
    runs: traitlets.List[Any] = traitlets.List().tag(sync=True)
    accepts = traitlets.List(traitlets.Unicode()).tag(sync=True)
    trouble = traitlets.Unicode("").tag(sync=True)

    def __init__(
        self,
        setup: dict[str, Any],
        on_key: Callable[[str], None],
        on_focus: Callable[[int], None],
        on_rest: Callable[[], None],
        is_saved: bool,
        max_height: int | None,
    ) -> None:
        keys = [*(key for key, _, _ in RUNS), GRADIENT]
        setup = setup | {"saved": is_saved}
        super().__init__(setup=setup, palettes=make_palettes(), runs=list(RUNS), accepts=keys, max_height=max_height)
        self.list_frames: Callable[[], Sequence[StepFrame]] = tuple
        self._rules = PageRules(
            requests={
                "key": Request(lambda key: key in self.accepts, on_key),
                "focus": Request(lambda index: type(index) is int, on_focus),
                "rest": Request(lambda _: True, lambda _: on_rest()),
                "history": Request(lambda _: True, lambda _: self._send_history()),
                "newest": Request(lambda _: True, lambda _: self._send_newest()),
            }
        )

    def show(self, frame: StepFrame, dropped: Sequence[int], note: str, alt: str, focus: int) -> None:
        """Show a frame as the newest one. Pages forget the `dropped` ones; `note` says what is missing by now."""
        self._newest = frame.meta | {"dropped": list(dropped), "note": note}, frame.values
        with self.hold_sync():  # one message: a description never comes with the values of another frame
            self.alt, self.focus = alt, focus
            if self.setup["saved"]:
                self.values = frame.values
                self.meta = self._newest[0]
        if not self.setup["saved"]:
            self._send_newest()

    def _send_newest(self) -> None:
        """Send the newest frame in a message, which no file contains."""
        meta, values = self._newest
        self.send({"frame": meta}, [values])

    def _send_history(self) -> None:
        frames = self.list_frames()
        self.send({"history": [frame.meta for frame in frames]}, [frame.values for frame in frames])

    def save_record(self, frames: Sequence[StepFrame]) -> SavedView:
        """Return the view with these frames of a step, from the first one on; what needs the ranks is not offered."""
        first = {"meta": frames[0].meta, "values": frames[0].values, "alt": frames[0].meta["title"], "focus": 0}
        history = {"history": [frame.meta for frame in frames]}, [frame.values for frame in frames]
        saved = self.save_view()
        asked = make_key(True)
        answers: dict[str, dict[str, Answer]] = {"history": {asked: history}, "rest": {asked: ({}, ())}}
        return replace(saved, values=saved.values | first | {"accepts": [], "runs": [], "trouble": ""}, answers=answers)
