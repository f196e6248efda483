"""Walk through a training step on the ranks, by buttons or keys, and see what all of them have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import ipywidgets

from mpi4dl_nb.draw.stepper import draw_step
from mpi4dl_nb.widgets.controls import Slider, button, choice, number
from mpi4dl_nb.widgets.instrument import Instrument

if TYPE_CHECKING:
    from mpi4dl_nb.training import Training

__all__ = ["Stepper"]

ANY, ALL = "any", "all ranks"  # a menu whose value is None looks empty
KINDS = (ANY, "compute", "halo", "stage", "all-reduce", "update")
SHOWN_AS = (("what was made", "made"), ("activation", "activation"), ("gradient", "gradient"))
PHASES = (ANY, "forward", "backward", "update")
TIP = (
    "With the figure focused: n one instruction, l one layer, m one micro-batch's pass, p all forward or all back, "
    "b to the breakpoint, f finish the step, r restart it, g gradient or activation"
)


class Stepper(Instrument):
    """One training step of a batch, walked on the ranks that train: see `mpi4dl_nb.stepping.Stepping`.

    `stepping` can be walked from cells as well; `refresh()` then shows where it is. `close()` gives the step up.
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
        self._actions = {
            "n": partial(self._go, "instruction"), "l": partial(self._go, "layer"),
            "m": partial(self._go, "micro-batch"), "p": partial(self._go, "phase"), "b": self._until,
            "f": self.stepping.finish, "r": self.stepping.restart,
        }  # fmt: skip
        self._make_controls()
        super().__init__(self._rows(), [*self._actions, "g"], self._key, tip=TIP)
        self._quiet = False
        for control in (self.show, self.channel, self.image, self.message):
            control.observe(lambda _: self.refresh(), "value")
        self.refresh()

    def _make_controls(self) -> None:
        ranks = [(f"rank {rank}", rank) for rank in range(len(self.stepping.steps))]
        self.of = choice("Go on", [(ALL, ALL), ("the next rank", "next"), *ranks], ALL, "Who goes on")
        self.layer = choice("Stop at layer", [ANY, *self.stepping.layers], ANY, "Breakpoint: this layer")
        self.rank = choice("Stop at rank", [(ANY, ANY), *ranks], ANY, "Breakpoint: this rank")
        self.kind = choice("Stop at kind", KINDS, "halo", "Breakpoint: this kind of instruction")
        self.phase = choice("Stop at phase", PHASES, ANY, "Breakpoint: this way through the model")
        self.show = choice("Show", SHOWN_AS, "made", "Activation, gradient, or what the last instruction made")
        self.channel = Slider("Channel", 0, 0, 0, "Which channel is shown")
        self.image = number("Image", 0, 0, 0, "Which image of the micro-batch is shown")
        self.message = choice(
            "Message", [("none", 0)], 0, "Of the messages that have just moved, whose values are shown"
        )
        for control, width in (
            (self.of, "15em"), (self.layer, "17em"), (self.rank, "14em"), (self.kind, "14em"), (self.phase, "14em"),
            (self.show, "15em"), (self.channel.children[0], "9em"), (self.image, "8em"), (self.message, "31em"),
        ):  # fmt: skip
            control.layout.width = width

    def _rows(self) -> list[ipywidgets.Box]:
        names = {
            "n": ("Instruction (n)", "One instruction"),
            "l": ("Layer (l)", "To the end of the layer"),
            "m": ("Micro-batch (m)", "To the end of a micro-batch's pass through a stage"),
            "p": ("Phase (p)", "All forward, all back, or the update"),
            "b": ("To breakpoint (b)", "Until an instruction of all that is chosen below is done"),
            "f": ("Finish the step (f)", "The rest at full speed; weights move at the end"),
            "r": ("Restart (r)", "From the beginning of the step; nothing has changed"),
        }
        self.buttons = {key: button(name, partial(self._key, key), tip) for key, (name, tip) in names.items()}
        return [
            _row([self.of, *self.buttons.values()]),
            _row([self.kind, self.phase, self.rank, self.layer]),
            _row([self.show, self.channel, self.image]),
            _row([self.message]),
        ]

    def _go(self, unit: str) -> None:
        self.stepping.go(unit, _chosen(self.of.value))

    def _until(self) -> None:
        self.stepping.until(
            layer=_chosen(self.layer.value), rank=_chosen(self.rank.value), kind=_chosen(self.kind.value),
            phase=_chosen(self.phase.value),
        )  # fmt: skip

    def _key(self, key: str) -> None:
        if key == "g":
            self.show.value = "activation" if self.show.value == "gradient" else "gradient"
        else:
            self._act(self._actions[key])

    def _act(self, action: Callable[[], object]) -> None:
        """Go on, and show where that led."""
        with self.telling():
            action()
            self._draw()

    def refresh(self) -> None:
        """Show where the step is now."""
        if not self._quiet:
            with self.telling():
                self._draw()

    def _draw(self) -> None:
        view = self.stepping.view(self.channel.value, self.image.value, self.show.value)
        self._offer([(str(transfer), index) for index, (transfer, _) in enumerate(view.landed)])
        self._quiet = True
        try:
            self.channel.span(0, max(view.last_channel, self.channel.value))
            self.image.max = max(view.last_image, self.image.value)
        finally:
            self._quiet = False
        self.view.show(draw_step(view, self.message.value))

    def _offer(self, messages: Sequence[tuple[str, int]]) -> None:
        """The messages that can be looked at; the same ones keep the choice."""
        offered = tuple(messages) or (("none", 0),)
        if self.message.options != offered:
            self._quiet = True
            try:
                self.message.options = offered
            finally:
                self._quiet = False

    def close(self) -> None:
        """Give the step up, and take the widget off the page."""
        self.stepping.close()
        super().close()


def _chosen(value: Any) -> Any:
    return None if value in (ANY, ALL) else value


def _row(controls: Sequence[ipywidgets.Widget]) -> ipywidgets.Box:
    return ipywidgets.HBox(controls, layout={"flex_flow": "row wrap", "align_items": "center"})
