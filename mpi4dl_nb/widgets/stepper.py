"""Widget to step through a training step on the ranks, by buttons or keys, and inspect the values of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ipywidgets

from mpi4dl_nb.draw.stepper import draw_step
from mpi4dl_nb.training.training import Training
from mpi4dl_nb.widgets.figure_widget import FigureWidget, Slider, make_bounded_int, make_button, make_dropdown

__all__ = ["Stepper"]

ANY, ALL = "any", "all ranks"  # instead of None, for which a menu looks empty
KINDS = (ANY, "compute", "halo", "stage", "all-reduce", "update")
SHOWN_AS = (("what was made", "made"), ("activation", "activation"), ("gradient", "gradient"))
PHASES = (ANY, "forward", "backward", "update")
TIP = (
    "With the figure focused: n one instruction, l one layer, m one micro-batch's pass, p all forward or all back, "
    "b to the breakpoint, f finish the step, r restart it, g gradient or activation"
)
MICRO_BATCH_TIP = "To the end of a micro-batch's pass through a stage"
BREAKPOINT_TIP = "Until an instruction of all that is chosen below is done"


class Stepper(FigureWidget):
    """A training step of a batch, executed in small units on the ranks: see `StepDebugger`.

    `stepping` can be advanced from cells as well; `refresh()` then shows its position. `close()` abandons the step.
    Raises ImageError for a wrong shape or label.

    >>> import torch
    >>> from engines.models import resnet20_v1
    >>> from mpi4dl_nb import Cluster, Plan, Stepper, Training
    >>> with Cluster(4, backend="loopback") as cluster:
    ...     training = Training(resnet20_v1(), Plan(split_size=1), cluster, (2, 3, 32, 32))
    ...     stepper = Stepper(training, torch.randn(2, 3, 32, 32), torch.tensor([3, 7]))
    ...     event = stepper.stepping.until(kind="halo", phase="backward")
    ...     stepper.refresh()
    ...     stepper.close()
    """

    def __init__(self, training: Training, images: Any, labels: Any) -> None:
        self.stepping = training.stepping(images, labels)
        self._quiet = False
        ranks = [(f"rank {rank}", rank) for rank in range(len(self.stepping.steps))]
        shown = "Activation, gradient, or what the last instruction made"
        self.of = make_dropdown("Go on", [(ALL, ALL), ("the next rank", "next"), *ranks], ALL, "Who goes on", "15em")
        self.layer = make_dropdown("Stop at layer", [ANY, *self.stepping.layers], ANY, "Breakpoint: this layer", "17em")
        self.rank = make_dropdown("Stop at rank", [(ANY, ANY), *ranks], ANY, "Breakpoint: this rank", "14em")
        self.kind = make_dropdown("Stop at kind", KINDS, "halo", "Breakpoint: this kind of instruction", "14em")
        self.phase = make_dropdown("Stop at phase", PHASES, ANY, "Breakpoint: this way through the model", "14em")
        self.show = make_dropdown("Show", SHOWN_AS, "made", shown, "15em")
        self.channel = Slider("Channel", 0, 0, 0, "Which channel is shown", "9em")
        self.image = make_bounded_int("Image", 0, 0, 0, "Which image of the micro-batch is shown", "8em")
        moved = "Of the messages that have just moved, whose values are shown"
        self.message = make_dropdown("Message", [("none", 0)], 0, moved, "31em")
        offered: dict[str, tuple[Callable[[], object], str, str]] = {
            "n": (partial(self._go, "instruction"), "Instruction (n)", "One instruction"),
            "l": (partial(self._go, "layer"), "Layer (l)", "To the end of the layer"),
            "m": (partial(self._go, "micro-batch"), "Micro-batch (m)", MICRO_BATCH_TIP),
            "p": (partial(self._go, "phase"), "Phase (p)", "All forward, all back, or the update"),
            "b": (self._run_to_breakpoint, "To breakpoint (b)", BREAKPOINT_TIP),
            "f": (self.stepping.finish, "Finish the step (f)", "The rest at full speed; weights move at the end"),
            "r": (self.stepping.restart, "Restart (r)", "From the beginning of the step; nothing has changed"),
        }
        self._actions = {key: action for key, (action, _, _) in offered.items()}
        self.buttons = {
            key: make_button(name, partial(self._handle_key, key), tip) for key, (_, name, tip) in offered.items()
        }
        rows = [
            [self.of, *self.buttons.values()],
            [self.kind, self.phase, self.rank, self.layer],
            [self.show, self.channel, self.image],
            [self.message],
        ]
        boxes = [ipywidgets.HBox(row, layout={"flex_flow": "row wrap", "align_items": "center"}) for row in rows]
        super().__init__(boxes, [*offered, "g"], self._handle_key, tip=TIP)
        for control in (self.show, self.channel, self.image, self.message):
            control.observe(lambda _: self.refresh(), "value")
        self.refresh()

    def _go(self, unit: str) -> None:
        self.stepping.go(unit, _parse_choice(self.of))

    def _run_to_breakpoint(self) -> None:
        wanted = {"layer": self.layer, "rank": self.rank, "kind": self.kind, "phase": self.phase}
        self.stepping.until(**{name: _parse_choice(control) for name, control in wanted.items()})

    def _handle_key(self, key: str) -> None:
        if key == "g":
            self.show.value = "activation" if self.show.value == "gradient" else "gradient"
            return
        with self.show_errors():
            self._actions[key]()
            self._draw()

    def refresh(self) -> None:
        """Redraw the figure for the current position of the step."""
        if not self._quiet:
            with self.show_errors():
                self._draw()

    def _draw(self) -> None:
        view = self.stepping.view(self.channel.value, self.image.value, self.show.value)
        messages = tuple((str(transfer), index) for index, (transfer, _) in enumerate(view.landed)) or (("none", 0),)
        self._quiet = True  # new options and limits may change values, which would redraw again
        try:
            if self.message.options != messages:  # new options, even if equal, reset the selection
                self.message.options = messages
            # A value beyond the limit of this view stays: the figure shows the last channel, and the next value that is
            # stepped through may have more.
            self.channel.set_range(0, max(view.last_channel, self.channel.value))
            self.image.max = max(view.last_image, self.image.value)
        finally:
            self._quiet = False
        self.view.show(draw_step(view, self.message.value))

    def close(self) -> None:
        """Abandon the step and remove the widget from the page."""
        self.stepping.close()
        super().close()


def _parse_choice(control: ipywidgets.Dropdown) -> Any:
    return None if control.value in (ANY, ALL) else control.value
