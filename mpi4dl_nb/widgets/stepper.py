"""Widget to step through a training step on the ranks, by buttons or keys, and inspect the values of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import ipywidgets

from mpi4dl_nb.draw.figure import Drawing
from mpi4dl_nb.draw.step_frame import (
    FRAME_PX,
    StepRecord,
    describe_progress,
    describe_scene,
    find_planes,
    is_volume,
    pack_frame,
)
from mpi4dl_nb.draw.stepper import describe_step, draw_step
from mpi4dl_nb.engines.compiler.steps import StepCounts
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.train.step_events import StepView, choose_depth
from mpi4dl_nb.training.step_debugger import StepDebugger
from mpi4dl_nb.training.training import Training
from mpi4dl_nb.widgets.figure_widget import PageWidget, Slider, make_bounded_int, make_dropdown
from mpi4dl_nb.widgets.saved_frame import FRAME_RECORD_BYTES
from mpi4dl_nb.widgets.saved_view import SavedPart
from mpi4dl_nb.widgets.step_scene import GRADIENT, StepScene

ANY, ALL = "any", "all ranks"  # instead of None, for which a menu looks empty
KINDS = (ANY, "compute", "halo", "stage", "all-reduce", "ring", "update")
SHOWN_AS = (("what was made", "made"), ("activation", "activation"), ("gradient", "gradient"))
PHASES = (ANY, "forward", "backward", "update")
RECORDED = 256
"""The most instructions of a walk that are recorded one by one; more run at once first, and the page says so."""


class Stepper(PageWidget):
    """A training step of a batch, executed in small units on the ranks: see `StepDebugger`.

    The page draws all ranks and what moves between them, and keeps a record of every instruction that has run: going
    back in it undoes nothing on the ranks. What runs at full speed, as *Finish* does, is one frame of the record, which
    says how many instructions it stands for.

    A notebook that is saved contains the values of the last frame, of the images too; not so with `save_picture=False`.
    `max_height` is in px, by default that of the window.

    `stepping` can be advanced from cells as well; `refresh()` then shows its position. `close()` abandons the step.
    Raises ImageError for a wrong shape or label.

    >>> import torch
    >>> from mpi4dl_nb.engines.models import resnet20_v1
    >>> from mpi4dl_nb import Cluster, Plan, Stepper, Training
    >>> with Cluster(4, backend="loopback") as cluster:
    ...     training = Training(resnet20_v1(), Plan(split_size=1), cluster, (2, 3, 32, 32))
    ...     stepper = Stepper(training, torch.randn(2, 3, 32, 32), torch.tensor([3, 7]))
    ...     event = stepper.stepping.until(kind="halo", phase="backward")
    ...     stepper.refresh()
    ...     stepper.close()
    """

    frame_px = 960
    stepping: StepDebugger

    def __init__(
        self,
        training: Training,
        images: Any,
        labels: Any,
        *,
        save_picture: bool = True,
        max_height: int | None = None,
    ) -> None:
        choose_depth(training.recipe.graph.inputs["images"].shape, None)  # refuses what cannot be drawn
        self.save_picture = save_picture
        self.stepping = training.stepping(images, labels)
        self.record = StepRecord()
        self._quiet = False
        self._shown: StepView | None = None
        self._figure: Drawing | None = None
        self._kept: Drawing | None = None
        menus = self._make_menus()
        self._actions: dict[str, Callable[[], object]] = {
            "n": partial(self._go, "instruction"),
            "l": partial(self._go, "layer"),
            "m": partial(self._go, "micro-batch"),
            "p": partial(self._go, "phase"),
            "b": self._run_to_breakpoint,
            "f": self._finish,
            "r": self._restart,
        }
        scene = describe_scene(self.stepping)
        self.view = StepScene(scene, self._handle_key, self._focus_message, self._rest, save_picture, max_height)
        self.view.list_frames = lambda: self.record.frames
        super().__init__([], self.view)
        self.children = (*self.children, *menus)  # what is set less often stands below the picture
        self.trouble.layout.display = "none"  # the view shows it, in a place that is free for it
        for control in (self.show, self.channel, self.image, self.plane):
            control.observe(lambda _: self.refresh(), "value")
        self.message.observe(lambda _: self._show_focus(), "value")
        self.refresh()

    def _make_menus(self) -> list[ipywidgets.HBox]:
        """Return the rows of menus: who goes on and where to stop, and what is shown."""
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
        first, last = find_planes(self.stepping.image_shape)
        self.plane = Slider("Plane", first, 0, last, "Which plane of the volumes is shown", "9em")
        self.plane.layout.display = None if last else "none"
        moved = "Of the messages that have just moved, whose values are shown"
        self.message = make_dropdown("Message", [("none", 0)], 0, moved, "35em")
        rows = [
            [self.of, self.kind, self.phase, self.rank, self.layer],
            [self.show, self.channel, self.image, self.plane, self.message],
        ]
        return [ipywidgets.HBox(row, layout={"flex_flow": "row wrap", "align_items": "center"}) for row in rows]

    def _make_saved_part(self, picture_bytes: int) -> SavedPart:
        return self._save_record(self.record)

    def _make_framed_part(self) -> SavedPart:
        return self._save_record(self.record.shorten(FRAME_RECORD_BYTES))

    def _save_record(self, record: StepRecord) -> SavedPart:
        if not self.save_picture:
            raise PlanError(
                "A Stepper(save_picture=False) shows values of its images, which no file may contain. Save the page of "
                "a Stepper of other images."
            )
        if not self.stepping.event.done:
            raise PlanError(
                f"The step has {describe_progress(self.stepping)}, and a page can run no others. Finish it first: "
                "stepper.record_step() runs it instruction by instruction, and the page shows each of them."
            )
        return SavedPart([self.view.save_record(record.frames)], remarks=[note] if (note := record.note) else [])

    @property
    def figure(self) -> Drawing | None:
        """The current position of the step, drawn when it is asked for."""
        if self._figure is None and self._shown is not None:
            self._figure = draw_step(self._shown, self.message.value)
        return self._figure

    def _go(self, unit: str) -> None:
        self._walk(self.stepping.find_unit_end(unit, _parse_choice(self.of)))

    def record_step(self) -> None:
        """Run the rest of the step instruction by instruction, so that the record has a frame of each."""
        while not self.stepping.done:
            self._walk(self.stepping.find_unit_end("instruction", None))
        self._rest()

    def _run_to_breakpoint(self) -> None:
        wanted = {"layer": self.layer, "rank": self.rank, "kind": self.kind, "phase": self.phase}
        self._walk(self.stepping.find_breakpoint(**{name: _parse_choice(control) for name, control in wanted.items()}))

    def _walk(self, target: StepCounts) -> None:
        for _ in self.stepping.walk_to(target, RECORDED):
            self._draw()

    def _finish(self) -> None:
        self.stepping.finish()
        self._draw()

    def _restart(self) -> None:
        self.stepping.restart()
        self._draw()

    @contextmanager
    def show_errors(self) -> Iterator[None]:
        """Show an error of the body in the view, in the place of its title, until the next body without one."""
        with super().show_errors():
            yield
        self.view.trouble = self.trouble.text

    def _handle_key(self, key: str) -> None:
        if key == GRADIENT:
            self.show.value = "activation" if self.show.value == "gradient" else "gradient"
            return
        with self.show_errors():
            self._actions[key]()
        if self.trouble.text:
            self.view.send({"refused": self.trouble.text})

    def refresh(self) -> None:
        """Show the current position of the step."""
        if not self._quiet:
            with self.show_errors():
                self._draw()

    def _draw(self) -> None:
        plane = self.plane.value if is_volume(self.stepping.image_shape) else None
        view = self.stepping.view(self.channel.value, self.image.value, self.show.value, FRAME_PX, plane)
        messages = tuple((str(transfer), index) for index, (transfer, _) in enumerate(view.landed)) or (("none", 0),)
        self._quiet = True  # new options and limits may change values, which would redraw again
        try:
            if self.message.options != messages:  # new options, even if equal, reset the selection
                self.message.options = messages
            # A value beyond the limit of this view stays: the page shows the last channel, and the next value that is
            # stepped through may have more.
            self.channel.set_range(0, max(view.last_channel, self.channel.value))
            self.image.max = max(view.last_image, self.image.value)
        finally:
            self._quiet = False
        self._shown, self._figure = view, None
        frame = pack_frame(view, self.stepping.number)
        dropped = self.record.add(frame)
        self.view.show(frame, dropped, self.record.note, describe_step(view, self.message.value), self.message.value)
        if self.stepping.event.done:
            self._rest()  # also where no page says that it rests, as in a notebook that runs without one

    def _show_focus(self) -> None:
        """Show the values of the chosen message, on the page and in the figure."""
        if not self._quiet and self._shown is not None:
            self._figure = None
            self.view.focus, self.view.alt = self.message.value, describe_step(self._shown, self.message.value)
            self._rest()

    def _focus_message(self, index: int) -> None:
        if any(index == choice for _, choice in self.message.options):
            self.message.value = index

    def _rest(self) -> None:
        """Draw the figure of the saved page, now that nobody waits for the ranks."""
        if self._still is not None and self._kept is not self.figure:
            self._kept = self.figure
            self.update_snapshot()

    def close(self) -> None:
        """Abandon the step and replace the widget by its last picture."""
        if self._still is not None:
            self.update_snapshot(kept=True)
            self._still = None
        if hasattr(self, "stepping"):  # the batch was accepted
            self.stepping.close()
        super().close()


def _parse_choice(control: ipywidgets.Dropdown) -> Any:
    return None if control.value in (ANY, ALL) else control.value
