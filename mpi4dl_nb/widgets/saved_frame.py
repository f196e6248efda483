"""The living page of a widget in a saved notebook: a frame over the still picture, which shows where no script runs."""

from __future__ import annotations

from html import escape

from mpi4dl_nb.widgets.saved_page import make_page
from mpi4dl_nb.widgets.saved_view import SavedPart

FRAME_PICTURE_BYTES = 400_000
"""Of an image in a frame: enough for the coarsest level of any picture."""
FRAME_RECORD_BYTES = 1_000_000
"""Of the values in a frame with the record of a step."""
MOST_FRAME_BYTES = 2_000_000
"""Of all of a frame, as it is in the notebook's file."""

# Both are in one cell of a grid. The frame is transparent until its scripts have drawn, and a page that removes frames
# has the picture, parts of which are positioned: only a higher level has the frame in front of them, for the pointer.
# It may run scripts, but it has no access to the notebook, and its policy allows no request.
_FRAME = """<div style="display: grid; isolation: isolate; grid-template-columns: minmax(0, 1fr)">
<div style="grid-area: 1 / 1">{still}</div>
<iframe sandbox="allow-scripts" title="{name}, alive without a kernel" srcdoc="{page}"
style="grid-area: 1 / 1; z-index: 1; width: 100%; height: 100%; min-height: {height_px}px;
border: 0; color-scheme: light"></iframe>
</div>"""


def make_frame(part: SavedPart, name: str, still: str, height_px: int) -> str:
    """Return HTML that shows `part` alive in a frame of at least `height_px`, and `still` where no script runs.

    It is `still` only if the frame would take more than MOST_FRAME_BYTES.
    """
    page = escape(make_page([part], name, look="mpi4dl-framed"))
    if len(page) > MOST_FRAME_BYTES:
        return still
    return _FRAME.format(still=still, name=escape(name), page=page, height_px=height_px)
