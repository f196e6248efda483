"""A page that is alive without a kernel: widgets and figures in one HTML file that asks nothing of a network."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from html import escape
from itertools import chain, repeat
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from mpi4dl_nb.draw.figure import Drawing
from mpi4dl_nb.draw.packed_tables import pack_tables
from mpi4dl_nb.engines.errors import PlanError, make_absolute
from mpi4dl_nb.widgets.page_modules import join_modules, read_style, wrap_module
from mpi4dl_nb.widgets.saved_view import SavedPart, SavedView

PICTURE_BYTES = 4_000_000
NO_KERNEL = "This page was saved: no ranks run behind it."

# Nothing may be fetched: not by the page itself, nor by what a damaged one contains.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}
</style>
<body class="{look}">
{parts}
<script type="module">
{script}
</script>
</body>
</html>
"""


_HEADER = """<header>
<h1>{title}</h1>
{text}
</header>"""
_FOOTER = "<footer>Made with mpi4dl_nb. The page is complete in itself: it asks nothing of a network.</footer>"


class Saveable(Protocol):
    """A widget that can be part of a saved page."""

    @property
    def figure(self) -> Drawing | None:
        """The picture for readers whose browser runs no scripts."""

    def save_part(self, picture_bytes: int) -> SavedPart:
        """Return the part of the page. Raises PlanError if the widget is closed or not finished."""


def save_page(
    parts: Saveable | Drawing | Sequence[Saveable | Drawing],
    path: str | PathLike[str],
    *,
    title: str = "",
    text: str = "",
    picture_bytes: int = PICTURE_BYTES,
) -> Path:
    """Write widgets and figures into one HTML file that is alive without a kernel, and return its path.

    The file needs neither a server nor a network: it opens from a disk or a mail, in any browser of today, and draws
    with the same code as a notebook. What needs ranks (another step, another plan, a measurement) is refused in words.
    `title` and `text` (paragraphs are separated by an empty line) stand above the parts. An image is stored with as
    many of its levels as fit into `picture_bytes`, the coarsest first; the page says where that ends.
    The file contains what the widgets show, an image's file name too; it contains no path, and no name of a user or a
    host. A widget with `save_picture=False` is saved without its image, and a `Stepper` with it not at all.
    Raises PlanError, and writes nothing, if a widget is closed or shows a step that is not finished, if not even the
    coarsest level of an image fits, or if the file cannot be written.

    >>> from mpi4dl_nb import Plan, Slicer, immunohistochemistry, resnet20_v1, save_page
    >>> slicer = Slicer(immunohistochemistry(), Plan(split_size=1, slice_method="2x2"), resnet20_v1())
    >>> save_page(slicer, "halo.html", title="Halos of ResNet-20").name
    'halo.html'
    """
    shown = parts if isinstance(parts, Sequence) else [parts]
    if not shown:
        raise PlanError("A page needs at least one widget or figure. Give one, such as save_page(slicer, 'halo.html').")
    saved = [_save_part(part, picture_bytes) for part in shown]
    title = title or "Spatial parallelism, step by step"
    paragraphs = "\n".join(f"<p>{escape(paragraph)}</p>" for paragraph in text.split("\n\n") if paragraph.strip())
    header = _HEADER.format(title=escape(title), text=paragraphs)
    page = make_page(saved, title, stills=[_make_still(part) for part in shown], header=header, footer=_FOOTER)
    path = make_absolute(path)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise PlanError(
            f"The page cannot be written to {path} ({error.strerror}). Give a file in a folder that exists and in "
            "which you may write."
        ) from error
    return path


def make_page(
    parts: Sequence[SavedPart],
    title: str,
    *,
    stills: Sequence[str] = (),
    header: str = "",
    footer: str = "",
    look: str = "",
) -> str:
    """Return an HTML document with the parts, each after its HTML in `stills`. `look` is the class of its body."""
    views = [view for part in parts for view in part.views]
    codes = list(dict.fromkeys(view.code for view in views))
    pairs = zip(parts, chain(stills, repeat("")), strict=False)
    sections = [_format_part(part, still, codes) for part, still in pairs]
    return _PAGE.format(
        policy=_POLICY,
        title=escape(title),
        style="\n".join(_list_styles(views)),
        look=look,
        parts="\n".join([header, *sections, footer]),
        script=_make_script(codes),
    )


def _save_part(part: Any, picture_bytes: int) -> SavedPart:
    if isinstance(part, Drawing):
        return SavedPart(html=part._repr_html_())
    if not hasattr(part, "save_part"):
        raise PlanError(
            f"A value of type {type(part).__name__} cannot be part of a page. Give widgets of mpi4dl_nb, or "
            "figures of its show_... functions."
        )
    return part.save_part(picture_bytes)


def _make_still(part: Saveable | Drawing) -> str:
    """Return a picture for readers whose browser runs no scripts, in front of what the scripts show."""
    if isinstance(part, Drawing) or not getattr(part, "save_picture", True) or part.figure is None:
        return ""
    return f"<noscript>{part.figure._repr_html_()}</noscript>"


def _list_styles(views: Sequence[SavedView]) -> list[str]:
    return list(dict.fromkeys([read_style("saved/saved_page.css"), *(view.style for view in views)]))


def _format_part(part: SavedPart, still: str, codes: Sequence[str]) -> str:
    remarks = "".join(f'<p class="mpi4dl-saved-remark">{escape(remark)}</p>' for remark in part.remarks)
    if not part.views:
        return f'<section class="mpi4dl-saved-figure">{part.html}{remarks}</section>'
    packed = [{"code": codes.index(view.code), "values": view.values, "answers": view.answers} for view in part.views]
    data = gzip.compress(pack_tables({"views": packed, "links": part.links}), mtime=0)
    views = "mpi4dl-saved-views mpi4dl-saved-beside" if part.is_side_by_side else "mpi4dl-saved-views"
    return (
        f'<section class="mpi4dl-saved-part">{still}<div class="{views}"></div>{remarks}'
        f'<script type="application/gzip">{base64.b64encode(data).decode()}</script></section>'
    )


def _make_script(codes: Sequence[str]) -> str:
    """Return the script of a page, with the module of each view."""
    page_module, makers = wrap_module(join_modules("saved/saved_page.js")), ",\n".join(map(wrap_module, codes))
    script = f"({page_module})().showPage([{makers}], {json.dumps(NO_KERNEL)});"
    return script.replace("</script", "<\\/script")
