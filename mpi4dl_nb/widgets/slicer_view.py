"""The page's part of a slicer: what it may set, the tissue that it asks for, and what a saved page has of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import traitlets

from mpi4dl_nb.draw.halo_points import Shown
from mpi4dl_nb.draw.navigation import are_tiles, describe_level, encode_pyramid, encode_tile, is_picked, is_view
from mpi4dl_nb.draw.volume import Volume, are_sections, encode_section, is_position, pack_grey
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.images.picture_reader import Picture
from mpi4dl_nb.widgets.page_modules import join_modules, read_style
from mpi4dl_nb.widgets.page_view import BoundedView, PageRules, Request
from mpi4dl_nb.widgets.saved_view import SavedView, make_key

MIN_PICTURE_BYTES = 400_000
"""Enough for the coarsest level of any picture, exact pixels included."""


class PictureTissue:
    """The pixels of a picture as a page gets them: a preview, and the tiles of a pyramid that it asks for."""

    def __init__(self, picture: Picture, preview: bytes) -> None:
        self.picture, self.preview = picture, preview
        self._pyramid: tuple[int, dict[tuple[int, int, int], bytes]] = 0, {}

    def accepts(self, tiles: object) -> bool:
        """Return whether these are tiles of the pyramid."""
        return are_tiles(tiles, self.picture)

    def encode(self, tile: Sequence[int]) -> bytes:
        """Return one tile as an image file."""
        return encode_tile(self.picture, *tile)

    def save(self, saved: SavedView, most_bytes: int) -> SavedView:
        """Return a view with as many levels as fit into `most_bytes`, the coarsest first.

        Raises PlanError if not even the coarsest one fits.
        """
        if self._pyramid[0] != most_bytes:
            self._pyramid = most_bytes, encode_pyramid(self.picture, most_bytes)
        tiles, facts = self._pyramid[1], saved.values["facts"]
        if not tiles:
            raise PlanError(
                f"The image does not fit into picture_bytes={most_bytes:,}: its coarsest level takes more. Give "
                f"picture_bytes={MIN_PICTURE_BYTES:,} or more."
            )
        finest = min(level for level, _, _ in tiles)
        facts = facts | {"picture": facts["picture"] | {"finest": finest}, "left_out": describe_level(finest)}
        answers = {make_key(tile): ({"tiles": [tile], "trouble": ""}, (pixels,)) for tile, pixels in tiles.items()}
        return replace(saved, values=saved.values | {"facts": facts}, answers={"tiles": answers})


class VolumeTissue:
    """The grey of a volume as a page gets it: all of it, maybe coarsely, and the sections that it asks for."""

    def __init__(self, volume: Volume) -> None:
        self.volume = volume
        self.preview, _ = pack_grey(volume)

    def accepts(self, tiles: object) -> bool:
        """Return whether these are sections of the volume: [number, position] each."""
        return are_sections(tiles, self.volume.shape())

    def encode(self, tile: Sequence[int]) -> bytes:
        """Return one section as an image file."""
        return encode_section(self.volume, *tile)

    def save(self, saved: SavedView, most_bytes: int) -> SavedView:
        """Return a view with the volume as finely as fits into `most_bytes`."""
        preview, left_out = pack_grey(self.volume, most_bytes)
        facts = saved.values["facts"] | {"left_out": left_out}
        return replace(saved, values=saved.values | {"facts": facts, "preview": preview})


Tissue = PictureTissue | VolumeTissue


class SlicerView(BoundedView):
    """The part of a slicer that the page draws. It has all numbers of all layers; only tissue is fetched, by tile.

    `layer` and `tile` are numbers. `reading` is `layer` (what the tile borrows at this layer) or `picture` (all that
    its outputs read of the picture, through the windows of all layers). `place` is the view: row, column and side in
    pixels of the picture, or nothing for the whole. `picked` is the last clicked pixel of this layer: its row and
    column in what the layer reads, and those in the layer's output. `preview` is the whole picture and `overlay` the
    predicted map over it, if any, which is shown while `overlaid`.

    Of a volume, all sections go through `position`, and `large` is the number of the large one, which `place` is of.

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
    position = traitlets.List(traitlets.Int()).tag(sync=True)
    large = traitlets.Int(0).tag(sync=True)

    def __init__(self, picture: Shown, tissue: Tissue, overlay: bytes, is_saved: bool) -> None:
        super().__init__(**({"preview": tissue.preview, "overlay": overlay} if is_saved else {}))
        self.picture, self._tissue, self._pictures = picture, tissue, [tissue.preview, overlay]

    @property
    def rules(self) -> PageRules:
        """What the page may set: places within the picture, and within the layer that it shows."""
        layers, sections, sizes = self.facts["layers"], self.facts["sections"], self.picture.shape()
        return PageRules(
            settable={
                "layer": lambda layer, _: 0 <= layer < len(layers),
                "tile": lambda tile, state: 0 <= tile < len(layers[state["layer"]]["ranks"]),
                "reading": lambda _reading, _: True,
                "fields": lambda _fields, _: True,
                "overlaid": lambda _overlaid, _: True,
                "position": lambda position, _: is_position(position, sizes),
                "large": lambda large, _: 0 <= large < len(sections),
                "place": lambda place, state: not place or is_view(place, sections[state["large"]]["scene"]),
                "picked": lambda picked, state: not picked or is_picked(picked, layers[state["layer"]]),
            },
            requests={
                "tiles": Request(self._tissue.accepts, self._send_tiles),
                "pictures": Request(lambda asked: asked is True, lambda _: self._send_pictures()),
            },
        )

    def save_pictures(self, most_bytes: int) -> SavedView:
        """Return the view with as much of its picture as fits into `most_bytes`. Raises PlanError if none does."""
        saved = self.save_view()
        return self._tissue.save(saved, most_bytes) if self.facts["picture"]["saved"] else saved

    def _send_pictures(self) -> None:
        self.send({"pictures": True}, self._pictures)

    def _send_tiles(self, tiles: Sequence[Sequence[int]]) -> None:
        for tile in tiles:  # one message each: the page shows a tile when it has come
            try:
                pixels, trouble = self._tissue.encode(tile), ""
            except Exception as error:  # a slide that the caller has opened may raise anything
                pixels, trouble = b"", str(error) or type(error).__name__
            self.send({"tiles": [tile], "trouble": trouble}, [pixels])
