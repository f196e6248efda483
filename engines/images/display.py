"""Display of a picture in a notebook: its properties and a thumbnail."""

from __future__ import annotations

import base64
import io
from html import escape
from typing import TYPE_CHECKING

from PIL import Image

from engines.html_table import format_html_table

if TYPE_CHECKING:
    from engines.images.picture import Picture

__all__ = ["describe_picture", "make_picture_html"]

LONGEST_PX = 240


def describe_picture(picture: Picture) -> dict[str, str]:
    """Return the size, levels and resolution of a picture as text."""
    sizes = [f"{level.height} rows × {level.width} columns" for level in picture.levels]
    facts = {"Size in px": sizes[0]}
    if len(sizes) > 1:
        facts["Coarser levels"] = ", ".join(sizes[1:])
    if picture.microns_per_px:
        facts["Resolution"] = f"{picture.microns_per_px:.3g} µm per px"
    return facts


def make_picture_html(picture: Picture) -> str:
    """Return HTML of the picture's properties and a thumbnail. Raises ImageError if the picture cannot be read."""
    buffer = io.BytesIO()
    Image.fromarray(picture.thumbnail(LONGEST_PX)).save(buffer, "png")
    data = base64.b64encode(buffer.getvalue()).decode()
    image = f'<img alt="{escape(picture.name)}, all of it" src="data:image/png;base64,{data}">'
    return f"{format_html_table(picture.name, describe_picture(picture))}{image}"
