"""The page of the configurator: what it is told of a plan, and the knobs that it turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import traitlets

from mpi4dl_nb.draw.plan_picture import PlanShape
from mpi4dl_nb.engines.cli.plan_options import GRID, format_text, parse_value
from mpi4dl_nb.engines.errors import Mpi4dlError
from mpi4dl_nb.engines.plan import OPTIONS, Plan
from mpi4dl_nb.widgets.page_modules import join_modules, read_style
from mpi4dl_nb.widgets.page_view import BoundedView, PageRules, Request

IMAGE_PX, BATCH, MACHINE = "image_px", "batch", "machine"
SIDES_PX = [64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384]
BATCHES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]

# One knob: an option of the plan, a size of the batch, or the machine.


class Knob:
    """A value that a page and a cell can set. `value` is what `Plan` takes, `text` what a page shows of it.

    `trouble` is the error that the value causes, or empty.
    """

    def __init__(self, name: str, value: Any, on_change: Callable[[str], None]) -> None:
        self.name, self.trouble, self._value, self._on_change = name, "", value, on_change

    def __repr__(self) -> str:
        return f"<Knob {self.name}={self._value!r}{self.trouble and ': '}{self.trouble}>"

    @property
    def value(self) -> Any:
        """The current value, as `Plan` takes it."""
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        if value != self._value or type(value) is not type(self._value):
            self._value = value
            self._on_change(self.name)

    @property
    def text(self) -> Any:
        """The value as a page shows it: text, or whether a switch is on. Setting it sets the value."""
        return format_text(self._value)

    @text.setter
    def text(self, text: Any) -> None:
        if isinstance(text, str) and self.name != MACHINE:
            self.value = parse_value(text) if text.strip() else None
        else:
            self.value = text


class StartButton:
    """The button that starts or resizes the cluster. `description` is its text, and `reason` why it is `disabled`."""

    def __init__(self, on_click: Callable[[], None]) -> None:
        self.description, self.disabled, self.reason, self._on_click = "", True, "", on_click

    def click(self) -> None:
        """Do what the button offers, if it is not disabled."""
        if not self.disabled:
            self._on_click()


def describe_options(machines: Sequence[str], axes: Sequence[str]) -> list[dict[str, Any]]:
    """Return all controls of the page, in order: what each is called, how it is set, and what it means.

    The first six are always in view; all others are folded into the groups of `OPTIONS`. `mpi` is MPI4DL's name, and
    `axes` are the names of the axes of an image.
    """
    side = axes[-2:][0]
    helps = {name: option.help for name, option in OPTIONS.items()}
    switches = {field.name for field in fields(Plan) if isinstance(field.default, bool)}
    main: list[dict[str, Any]] = [
        {"name": IMAGE_PX, "label": f"Image, {side} of px", "mpi": "image_size", "kind": "steps", "steps": SIDES_PX},
        {"name": BATCH, "label": "Images in a batch", "mpi": "batch_size", "kind": "steps", "steps": BATCHES},
        {"name": "split_size", "label": "Stages", "mpi": "split_size", "kind": "range", "low": 1, "high": 16},
        {"name": "spatial_size", "label": "Spatial stages", "mpi": "spatial_size", "kind": "range", "low": 0},
        {"name": GRID, "label": "Grid of tiles", "mpi": "num_spatial_parts", "kind": GRID, "axes": list(axes)},
        {"name": MACHINE, "label": "Machine", "mpi": "time and memory", "kind": "menu"},
    ]
    main[-1]["choices"] = list(machines)
    meanings = {
        IMAGE_PX: f"{side} of pixels of an image; its other sides keep the ratio, and the model is traced again",
        BATCH: "images in one batch; the model is traced again",
        GRID: f"{helps['slice_method']}; {helps['num_spatial_parts']}",
        MACHINE: "the machine whose time is predicted, and whose memory is the limit",
    }
    controls = [
        control | {"group": "", "help": meanings.get(control["name"], helps.get(control["name"], ""))}
        for control in main
    ]
    shown = {control["name"] for control in main}
    for name, option in OPTIONS.items():
        if name not in shown:
            kind = "menu" if option.choices else "text" if option.proposals is not None else "number"
            kind = "switch" if name in switches else kind
            controls.append({
                "name": name, "label": name.replace("_", " "), "mpi": name, "group": option.group, "help": option.help,
                "kind": kind, "low": option.low, "choices": list(option.choices or option.proposals or ()),
            })  # fmt: skip
    return controls


MOST_TEXT = 200  # characters of one setting


def are_settings(texts: object, axes: int) -> bool:
    """Return whether what a page has sent are settings by name: texts, switches, and the tiles along each axis."""
    if not isinstance(texts, Mapping):
        return False
    for name, text in texts.items():
        if name == GRID:
            fits = isinstance(text, list) and len(text) == axes and all(type(parts) is int for parts in text)
        else:
            fits = isinstance(text, bool) or (isinstance(text, str) and len(text) <= MOST_TEXT)
        if not fits:
            return False
    return True


class PlanView(BoundedView):
    """The page's part of a configurator: controls on the left, the picture of the plan, and its gauges.

    `on_set(texts)` takes what a user has set, by name; `on_start()` is the button. Everything that a hover shows is on
    the page already: `shape` and `blocks` say where each rank is, `loads` and `rank_groups` what it holds. The number
    `plan` in each of them tells the page which of them belong to the plan that is shown.
    """

    _esm = join_modules("plan/plan_view.js")
    _css = read_style("plan/plan.css")
    options: traitlets.List[Any] = traitlets.List().tag(sync=True)
    values = traitlets.Dict().tag(sync=True)
    errors = traitlets.Dict().tag(sync=True)
    shape = traitlets.Dict().tag(sync=True)
    blocks = traitlets.Bytes(b"").tag(sync=True)
    loads = traitlets.Dict().tag(sync=True)
    rank_groups = traitlets.Bytes(b"").tag(sync=True)
    gauges = traitlets.Dict().tag(sync=True)
    status = traitlets.Dict().tag(sync=True)
    start = traitlets.Dict().tag(sync=True)

    def __init__(
        self,
        machines: Sequence[str],
        axes: Sequence[str],
        on_set: Callable[[Mapping[str, Any]], None],
        on_start: Callable[[], None],
    ) -> None:
        super().__init__(options=describe_options(machines, axes))
        self._on_set = on_set
        self._rules = PageRules(
            requests={
                "start": Request(lambda asked: asked is True, lambda _: on_start()),
                "set": Request(partial(are_settings, axes=len(axes)), self._set),
            }
        )

    def show_shape(self, number: int, plan: str, found: PlanShape) -> None:
        """Show where each rank of plan `number` is; `plan` is its summary."""
        with self.hold_sync():  # one message, so that the page never has the blocks of another plan
            self.blocks = found.blocks
            self.shape = {"plan": number, "summary": plan, **found.to_json()}

    def show_loads(self, number: int, groups: Sequence[Mapping[str, Any]], of_rank: bytes) -> None:
        """Show what each rank of plan `number` holds."""
        with self.hold_sync():
            self.rank_groups = of_rank
            self.loads = {"plan": number, "groups": list(groups)}

    def _set(self, texts: Mapping[str, Any]) -> None:
        try:
            self._on_set(texts)
        except Mpi4dlError as error:
            self.errors = {"": str(error)}
