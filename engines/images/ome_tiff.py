"""The files of an OME-TIFF: the pages of its scan, which may lie in other files of the same folder."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tifffile import TiffFile, TiffPage

from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.images.files import read_head, translate_errors
from mpi4dl_nb.engines.images.ome_xml import OmeDocument, PlaneSource, choose_image, list_planes, parse_ome
from mpi4dl_nb.engines.images.regular_file import TIFF_HEADS, is_within, read_bounded
from mpi4dl_nb.engines.images.tiff_directory import TEXT_BYTES, list_pages


@dataclass
class OmeFiles:
    """The file that was asked for, and the others of its set that are opened; `opened` closes them."""

    path: Path
    file: TiffFile
    opened: ExitStack
    pages: dict[Path, list[TiffPage]] = field(default_factory=dict)

    def find_pages(self) -> tuple[list[tuple[Path, TiffPage]], float | None]:
        """Return the pages of the scan with their files, one or one for each channel, and micrometres per pixel.

        Raises ImageError if the set is incomplete, or the XML does not belong to the pages.
        """
        embedded = document = parse_ome(self.path, self.file.ome_metadata or "")
        if embedded.metadata_file is not None:
            document = self._read_metadata(embedded.metadata_file)
        image = choose_image(self.path, document.images)
        sources = list_planes(self.path, image, len(document.images) == 1)
        scan_pages = [self._get_page(embedded, source) for source in sources]
        for (path, page), source in zip(scan_pages, sources, strict=True):
            sides = int(page.imagelength), int(page.imagewidth)
            if sides != image.shape:
                raise ImageError(
                    f"The OME-XML of {self.path} says that page {source.ifd} of {path.name} has {image.shape[0]} x "
                    f"{image.shape[1]} px, and it has {sides[0]} x {sides[1]}: it is the text of another file. Remove "
                    "it, or export the picture again."
                )
        return scan_pages, image.microns_per_px

    def _read_metadata(self, name: str) -> OmeDocument:
        """Read the XML that a BinaryOnly element names: a file of text, or another TIFF file of the set."""
        path = self._find_file(name, "its metadata (BinaryOnly)")
        if read_head(path, 4) in TIFF_HEADS:
            with translate_errors(path), TiffFile(path) as other:
                list_pages(path, other)
                text: str | bytes = other.ome_metadata or ""
        else:
            with translate_errors(path):
                text = read_bounded(path, TEXT_BYTES)
        document = parse_ome(path, text)
        if document.metadata_file is not None:
            raise ImageError(f"{path} has no metadata either: it names {document.metadata_file!r}. Copy the whole set.")
        return document

    def _get_page(self, embedded: OmeDocument, source: PlaneSource) -> tuple[Path, TiffPage]:
        path = self.path
        # A file that was given another name is still known by its UUID.
        if source.file_name is not None and (source.uuid is None or source.uuid != embedded.uuid):
            path = self._find_file(source.file_name, f"page {source.ifd}")
        elif source.uuid is not None and embedded.uuid is not None and source.uuid != embedded.uuid:
            raise ImageError(f"{self.path} is a part of a set: a channel is in the file {source.uuid}, without a name.")
        if path not in self.pages:
            self.pages[path] = self._open_pages(path, source.uuid)
        if source.ifd >= len(self.pages[path]):
            raise ImageError(
                f"The OME-XML of {self.path} speaks of page {source.ifd} of {path.name}, where "
                f"{len(self.pages[path])} pages are found. Copy the file again, or save its scan by itself."
            )
        return path, self.pages[path][source.ifd]

    def _open_pages(self, place: Path, uuid: str | None) -> list[TiffPage]:
        if place == self.path:
            return list_pages(place, self.file)
        if read_head(place, 4) not in TIFF_HEADS:
            raise ImageError(f"{place}, which the OME-XML of {self.path} names, is no TIFF file. Copy the set again.")
        with translate_errors(place):
            other = self.opened.enter_context(TiffFile(place))
            pages = list_pages(place, other)
            its = parse_ome(place, other.ome_metadata).uuid if other.is_ome and other.ome_metadata else None
        if None not in (uuid, its) and uuid != its:
            raise ImageError(
                f"{place} is not the file that the OME-XML of {self.path} means: its UUID is {its}, and not {uuid}. "
                "Copy the whole set again."
            )
        return pages

    def _find_file(self, name: str, part: str) -> Path:
        """Return the path of another file of the set. Raises ImageError if it is not in the same folder."""
        # A name from the file may lead anywhere: only plain names are taken, and no links out of the folder.
        folder = self.path.parent
        path = folder / name
        if name == self.path.name:
            return self.path
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise ImageError(
                f"{self.path} is one file of a set, and {part} is in {name[:200]!r}. Only files of its own folder "
                "are read: copy the set into one folder, and save it as one file (bfconvert IN OUT.ome.tif)."
            )
        if not path.exists():
            raise ImageError(
                f"{self.path} is one file of a set, and {part} is in {name!r}, which is not in {folder}. Copy it "
                "there, or save the set as one file (bfconvert IN OUT.ome.tif)."
            )
        if not is_within(path, folder):
            raise ImageError(f"{path}, a part of {self.path.name}, is a link that leads out of {folder}. Copy it.")
        return path
