"""Quickly lettered figures look as matplotlib's own do."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mpi4dl_nb.draw.figure import Drawing


def inked(canvas: type | None, **style: object) -> np.ndarray:
    """Where a figure with one text is dark."""
    figure = Drawing(figsize=(4, 1)) if canvas is None else Figure(figsize=(4, 1))
    if canvas:
        canvas(figure)
    figure.text(0.1, 0.5, "Tile 3 (rank 3) owns 48 × 60 px", **style)
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())[..., 1] < 128


@pytest.mark.parametrize(
    "style", [{"fontsize": 9}, {"fontsize": 14, "weight": "bold"}, {"rotation": 90, "va": "center"}], ids=str
)
def test_text_lies_where_matplotlib_lays_it(style):
    ours, theirs = inked(None, **style), inked(FigureCanvasAgg, **style)
    for axis in (0, 1):
        (a, b), (c, d) = ((np.flatnonzero(ink.any(axis))[[0, -1]]) for ink in (ours, theirs))
        assert abs(a - c) <= 2
        assert abs(b - d) <= 4
    assert ours.sum() == pytest.approx(theirs.sum(), rel=0.3)


def test_colours_and_transparency_are_kept():
    figure = Drawing(figsize=(2, 1))
    figure.text(0.1, 0.3, "■■■", fontsize=30, color="#d95f02")
    figure.text(0.6, 0.3, "■", fontsize=30, color="black", alpha=0.5)
    figure.canvas.draw()
    seen = {
        tuple(int(part) for part in pixel) for pixel in np.asarray(figure.canvas.buffer_rgba())[..., :3].reshape(-1, 3)
    }
    assert (0xD9, 0x5F, 0x02) in seen
    assert {(127, 127, 127), (128, 128, 128)} & seen


def test_a_figure_saved_larger_is_lettered_larger(tmp_path):
    figure = Drawing(figsize=(2, 1))
    figure.text(0.1, 0.5, "owns")
    figure.savefig(tmp_path / "large.png", dpi=300)
    figure.savefig(tmp_path / "small.png")
    figure.savefig(tmp_path / "drawn.svg")
    assert (tmp_path / "large.png").stat().st_size > 2 * (tmp_path / "small.png").stat().st_size
