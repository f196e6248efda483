"""The controls of the slicer, and their arrangement on the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from html import escape

import ipywidgets

from engines.plan import Plan
from mpi4dl_nb.draw.halo_layers import find_spatial_stages, get_stage_ranks
from mpi4dl_nb.widgets.controls import Slider, make_bounded_int, make_checkbox, make_dropdown

__all__ = ["WAYS", "SlicerControls", "make_slicer_controls"]

TOGETHER = ("auto", 1, 2, 3, 4, 6, 8)  # layers fused
HELP = (
    "Click a tile to choose it; click the framed place to look at it closely. Keys on the figure: arrows choose the "
    "tile or, close up, pan; + and - zoom, 0 shows the whole; [ and ] change the layer, d fused halos, r the "
    "receptive field."
)
WAYS = {"ArrowLeft": "← left", "ArrowUp": "↑ up", "ArrowDown": "↓ down", "ArrowRight": "→ right"}
ROW = {"flex_flow": "row wrap", "align_items": "center"}


@dataclass(frozen=True)
class SlicerControls:
    """Controls for stage, layer and tile; with a model, also for fused halos and for the output pixel to follow."""

    stage: ipywidgets.Dropdown
    layer: Slider
    tile: ipywidgets.BoundedIntText
    fused_halos: ipywidgets.Checkbox
    together: ipywidgets.Dropdown
    receptive: ipywidgets.Checkbox
    row: ipywidgets.BoundedIntText
    column: ipywidgets.BoundedIntText

    @property
    def all(self) -> tuple[ipywidgets.Widget, ...]:
        """All controls, in the order of the page."""
        return tuple(getattr(self, each.name) for each in fields(self))

    def make_rows(
        self, buttons: Sequence[ipywidgets.Widget], note: ipywidgets.Widget, has_model: bool
    ) -> list[ipywidgets.Widget]:
        """Return rows with the controls, the buttons and a help text; without a model, only the picture's controls."""
        of_model = [self.fused_halos, self.together, self.receptive, self.row, self.column]
        first = [self.stage, self.layer, self.tile] if has_model else [self.stage, self.tile]
        rows = [first, of_model, [*buttons, note]] if has_model else [first, [*buttons, note]]
        help_line = ipywidgets.HTML(f'<div style="max-width: 80em; line-height: 1.4">{escape(HELP)}</div>')
        return [*(ipywidgets.HBox(row, layout=ROW) for row in rows), help_line]


def make_slicer_controls(plan: Plan) -> SlicerControls:
    """Create the controls with the plan's stages and fusion."""
    stages = find_spatial_stages(plan)
    names = [(f"{stage}, in {get_stage_ranks(plan, stage).grid} tiles", stage) for stage in stages]
    together = plan.fused_layers if plan.halo_d2 else "auto"
    return SlicerControls(
        make_dropdown("stage", names, stages[0], "one of the stages that are cut into tiles", "15em"),
        Slider("layer", 0, 0, 0, "among those that read beyond their tiles", "8em"),
        make_bounded_int("tile", 0, 0, 0, "whose halo is shown", "7em"),
        make_checkbox("fused halos (D2)", plan.halo_d2, "one exchange for several layers", "12em"),
        make_dropdown("layers fused", [*dict.fromkeys((*TOGETHER, together))], together, width="12em"),
        make_checkbox("receptive field", False, "what one output pixel sees of the picture", "11em"),
        make_bounded_int("output row", 0, 0, 0, width="11em"),
        make_bounded_int("output column", 0, 0, 0, width="13em"),
    )
