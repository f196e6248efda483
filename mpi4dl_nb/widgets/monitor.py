"""Widget that shows a running training and can stop it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import ipywidgets
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display

from mpi4dl_nb.draw.figure import Drawing
from mpi4dl_nb.draw.monitor import describe_outcome, format_progress_html, format_tables_html, show_progress
from mpi4dl_nb.engines.train.history import History, Progress
from mpi4dl_nb.engines.train.training_events import TrainingEvent
from mpi4dl_nb.training.progress import ProgressRecorder, RefreshRate
from mpi4dl_nb.training.training import Training
from mpi4dl_nb.training.training_handle import TrainingHandle
from mpi4dl_nb.widgets.figure_widget import FigureView, PageWidget

# A button whose clicks are handled while a cell runs, if the page and the kernel support it.


class LiveButton(ipywidgets.Button):
    """A button whose click is handled in another thread while a cell runs, so that it should only set a flag.

    JupyterLab 4.4 and later, and front ends based on it, send clicks to a subshell of the kernel, which has its own
    thread. Elsewhere a click is handled when the cell is done.
    """

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
        (self.comm or self).__dict__.pop("_reply_subshell_id", None)


LOOK_S = 0.2
NUMBERS_SHARE, FIGURE_SHARE = 0.003, 0.007  # of all cores
STOP, STOPS = "Stop after this step", "Stops after this step …"
HINT = "The notebook's own ■ does so too. What it has learned is kept."


class Monitor(PageWidget):
    """Loss, speed, time and memory of all ranks while `fit` runs, and a button that stops `fit`.

    `training.fit(images, monitor=Monitor())` shows the monitor below that cell. `Monitor(training)` in a cell of its
    own is live whenever that training's `fit` runs.

    Another thread draws. Numbers are updated at most every second, the figure less often, such that drawing takes a
    negligible share of the cores. After a stop, `fit` saves the training if `save` is set, and returns its History.

    >>> import torch
    >>> from mpi4dl_nb.engines.models import resnet20_v1
    >>> from mpi4dl_nb import Cluster, Monitor, Plan, Training
    >>> batch = torch.randn(2, 3, 32, 32), torch.tensor([3, 7])
    >>> with Cluster(4, backend="loopback") as cluster:
    ...     training = Training(resnet20_v1(), Plan(split_size=1), cluster, (2, 3, 32, 32))
    ...     history = training.fit([batch], epochs=2, progress=False, monitor=Monitor())
    >>> len(history.losses)
    2
    """

    def __init__(self, training: Training | None = None) -> None:
        self.numbers, self.tables = ipywidgets.HTML(), ipywidgets.HTML()
        folded = ipywidgets.Accordion([self.tables], titles=["Ranks and epochs in numbers"])
        folded.add_class("mpi4dl-folded")
        whole = {"width": "max-content", "flex": "none"}
        self.stop = LiveButton(description=STOP, tooltip=HINT, icon="stop", layout=whole)
        self.stop.on_click(lambda _: self._stop())
        self.stops = False
        self._over, self._drawer = threading.Event(), Thread()
        self._training: TrainingHandle | None = None
        self._gathered: ProgressRecorder | None = None
        self._state, self._running, self._on_page = "not begun", False, False
        row = ipywidgets.HBox([self.stop, ipywidgets.HTML(HINT)], layout={"flex_flow": "row wrap"})
        super().__init__([row, self.numbers], FigureView())
        self.children = (*self.children, folded)
        self.stop.disabled = True
        if training is not None:
            training.monitor = self
            self._reset_history(training, None)
            self._show()

    @property
    def figure(self) -> Drawing | None:
        """The figure that is shown now."""
        return self.view.figure

    @property
    def progress(self) -> Progress | None:
        """The progress of the current or last `fit`; None if there is no training yet."""
        return self._gathered.get_progress(self._state, self._running) if self._gathered else None

    @property
    def thread_id(self) -> int | None:
        """The native ID of the drawing thread; None if it was never started."""
        return self._drawer.native_id

    # ---- callbacks of `fit`, in the thread of `fit`

    def begin(self, training: TrainingHandle, total: int | None) -> None:
        """Start drawing a `fit`, and display the monitor below this cell if it is not on a page yet."""
        gathered = self._reset_history(training, total)
        self.stops, self._state, self._running = False, "running", True
        self.stop.description, self.stop.disabled = STOP, False
        self.trouble.show("")
        self._show()
        if not self._on_page and InteractiveShell.initialized():
            display(self)
        self._over.clear()
        # A daemon: a cell that is killed must not leave an interpreter that waits for its drawings.
        self._drawer = Thread(target=self._draw_until_over, args=(gathered,), name="monitor", daemon=True)
        self._drawer.start()

    def handle_event(self, event: TrainingEvent) -> None:
        """Record an event. The drawing thread shows it later."""
        if self._gathered and self._training:
            self._gathered.add(event, self._training.reports, self._training.plan)

    def end(self, outcome: History | BaseException) -> None:
        """Stop the drawing thread and show the final numbers and figure."""
        self._over.set()
        self._drawer.join()  # first, or the thread could overwrite the final figure
        self._state, self._running = describe_outcome(outcome), False
        self.stop.description, self.stop.disabled = STOP, True
        with self._show_failure("has not drawn the end"):
            self._show()
            self.update_snapshot()

    def close(self) -> None:
        """Close the widget. Later fits of its training show the usual progress bar again."""
        if isinstance(self._training, Training) and self._training.monitor is self:
            self._training.monitor = None
        super().close()

    # ---- the button, and the thread that draws

    def _stop(self) -> None:
        if self._running:
            # A flag only: this may run in another thread, and `fit` reads `stops` after each step.
            self.stops, self._state = True, "stops after this step"
            self.stop.description, self.stop.disabled = STOPS, True

    def _reset_history(self, training: TrainingHandle, total: int | None) -> ProgressRecorder:
        gathered = ProgressRecorder(training.plan, training.cluster.is_one_process, total)
        self._training, self._gathered = training, gathered
        return gathered

    def _show(self) -> None:
        self._show_numbers()
        self._show_figure()

    def _show_numbers(self) -> None:
        if progress := self.progress:
            self.numbers.value, self.tables.value = format_progress_html(progress), format_tables_html(progress)

    def _show_figure(self) -> None:
        if progress := self.progress:
            self.view.show(show_progress(progress))

    def _draw_until_over(self, gathered: ProgressRecorder) -> None:
        for_numbers, for_figure = RefreshRate(NUMBERS_SHARE), RefreshRate(FIGURE_SHARE)
        with self._show_failure("has stopped drawing, the training goes on"):
            while not self._over.wait(LOOK_S):
                # Both rates measure what drawing costs and lengthen their own interval, see `RefreshRate`.
                if gathered.current.last is None:
                    continue  # an empty figure would use up the interval and delay the first step's
                with for_numbers.begin_refresh() as due:
                    if due:
                        self._show_numbers()
                with for_figure.begin_refresh() as due:
                    if due:
                        self._show_figure()

    @contextmanager
    def _show_failure(self, what: str) -> Iterator[None]:
        """Show an error of the body as text: a failure to draw must not end the training, nor hide why it ended."""
        try:
            yield
        except Exception as error:
            self.trouble.show(f"The monitor {what}: {type(error).__name__}: {error}")

    def _ipython_display_(self) -> None:
        self._on_page = True
        super()._ipython_display_()
