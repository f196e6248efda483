"""The page's part of a slicer: what it may set, the tissue that it asks for, and what a saved page has of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import traitlets

from mpi4dl_nb.draw.navigation import are_tiles, encode_pyramid, encode_tile, is_picked, is_view
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.images.picture_reader import Picture
from mpi4dl_nb.widgets.page_modules import join_modules, read_style
from mpi4dl_nb.widgets.page_view import BoundedView, PageRules, Request
from mpi4dl_nb.widgets.saved_view import SavedView, make_key

MIN_PICTURE_BYTES = 400_000
"""Enough for the coarsest level of any picture, exact pixels included."""


class SlicerView(BoundedView):
    """The part of a slicer that the page draws. It has all numbers of all layers; only tissue is fetched, by tile.

    `layer` and `tile` are numbers. `reading` is `layer` (what the tile borrows at this layer) or `picture` (all that
    its outputs read of the picture, through the windows of all layers). `place` is the view: row, column and side in
    pixels of the picture, or nothing for the whole. `picked` is the last clicked pixel of this layer: its row and
    column in what the layer reads, and those in the layer's output. `preview` is the whole picture and `overlay` the
    predicted map over it, if any, which is shown while `overlaid`.

    A notebook saves all of this. Unless `is_saved`, `preview` and `overlay` stay empty, and are sent to each page that
    asks for them.
    """

    _esm = join_modules("slicer/slicer.js")
    _css = read_style("slicer/slicer.css")
    facts = traitlets.Dict().tag(sync=True)
    numbers = traitlets.Bytes(b"").tag(sync=True)
    preview = traitlets.Bytes(b"").tag(sync=True)
    overlay = traitlets.Bytes(b"").tag(sync=True)
    overlaid = traitlets.Bool(True).tag(sync=True)
    layer = traitlets.Int(0).tag(sync=True)
    tile = traitlets.Int(0).tag(sync=True)
    reading = traitlets.Enum(["layer", "picture"], "layer").tag(sync=True)
    fields = traitlets.Bool(False).tag(sync=True)
    place = traitlets.List(traitlets.Int()).tag(sync=True)
    picked = traitlets.List(traitlets.Int()).tag(sync=True)

    def __init__(self, picture: Picture, preview: bytes, overlay: bytes, is_saved: bool) -> None:
        super().__init__(**({"preview": preview, "overlay": overlay} if is_saved else {}))
        self.picture, self._pictures = picture, [preview, overlay]
        self._pyramid: tuple[int, dict[tuple[int, int, int], bytes]] = 0, {}

    @property
    def rules(self) -> PageRules:
        """What the page may set: places within the picture, and within the layer that it shows."""
        layers, shape = self.facts["layers"], self.picture.shape()
        return PageRules(
            settable={
                "layer": lambda layer, _: 0 <= layer < len(layers),
                "tile": lambda tile, state: 0 <= tile < len(layers[state["layer"]]["ranks"]),
                "reading": lambda _reading, _: True,
                "fields": lambda _fields, _: True,
                "overlaid": lambda _overlaid, _: True,
                "place": lambda place, _: not place or is_view(place, shape),
                "picked": lambda picked, state: not picked or is_picked(picked, layers[state["layer"]]),
            },
            requests={
                "tiles": Request(lambda tiles: are_tiles(tiles, self.picture), self._send_tiles),
                "pictures": Request(lambda asked: asked is True, lambda _: self._send_pictures()),
            },
        )

    def save_pictures(self, most_bytes: int) -> SavedView:
        """Return the view with as many levels of its picture as fit into `most_bytes`, the coarsest first.

        Raises PlanError if not even the coarsest one fits.
        """
        saved = self.save_view()
        if not self.facts["picture"]["saved"]:
            return saved
        if self._pyramid[0] != most_bytes:
            self._pyramid = most_bytes, encode_pyramid(self.picture, most_bytes)
        tiles = self._pyramid[1]
        if not tiles:
            raise PlanError(
                f"The image does not fit into picture_bytes={most_bytes:,}: its coarsest level takes more. Give "
                f"picture_bytes={MIN_PICTURE_BYTES:,} or more."
            )
        facts = self.facts | {"picture": self.facts["picture"] | {"finest": min(level for level, _, _ in tiles)}}
        answers = {make_key(tile): ({"tiles": [tile], "trouble": ""}, (pixels,)) for tile, pixels in tiles.items()}
        return replace(saved, values=saved.values | {"facts": facts}, answers={"tiles": answers})

    def _send_pictures(self) -> None:
        self.send({"pictures": True}, self._pictures)

    def _send_tiles(self, tiles: Sequence[Sequence[int]]) -> None:
        for tile in tiles:  # one message each: the page shows a tile when it has come
            try:
                pixels, trouble = encode_tile(self.picture, *tile), ""
            except Exception as error:  # a slide that the caller has opened may raise anything
                pixels, trouble = b"", str(error) or type(error).__name__
            self.send({"tiles": [tile], "trouble": trouble}, [pixels])
