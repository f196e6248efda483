"""The OME-XML of an OME-TIFF file: its images, which of them is the scan, and which page of which file is a channel.

OME data model (2016-06), elements Image, Pixels, TiffData, UUID and BinaryOnly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from xml.parsers import expat

from mpi4dl_nb.engines.errors import AS_TENSORS, ImageError
from mpi4dl_nb.engines.images.files import make_damaged_error
from mpi4dl_nb.engines.images.regular_file import refuse_doctype

MOST_IMAGES = 1000  # that a file may describe: a slide has about ten, a plate thousands
_MICRONS = {"µm": 1.0, "μm": 1.0, "um": 1.0, "nm": 1e-3, "mm": 1e3, "cm": 1e4, "m": 1e6}
_PREVIEW = re.compile(r"label|macro|overview|thumb|preview|barcode", re.IGNORECASE)
_LEVELS = "Annotation:Resolution"  # Bio-Formats annotates so the image that has coarser levels
_COARSER = 4  # pixels so many times as wide are those of an overview
# Channel colours are signed 32-bit RGBA numbers. White is the default of the schema: no colour is meant.
_WHITE, _PRIMARIES = -1, (-16776961, 16711935, 65535)


@dataclass(frozen=True)
class PlaneSource:
    """The page with index `ifd` of the file with this UUID and name; None where the XML does not give them."""

    ifd: int
    uuid: str | None
    file_name: str | None


@dataclass
class OmeImage:
    """An Image element: its name, the attributes of its Pixels, of its Channels and TiffData; and the UUIDs of these.

    `uuids` are pairs of UUID and FileName, one for each TiffData element.
    """

    name: str
    pixels: dict[str, str] = field(default_factory=dict)
    channels: list[dict[str, str]] = field(default_factory=list)
    tiff_data: list[dict[str, str]] = field(default_factory=list)
    uuids: list[tuple[str | None, str | None]] = field(default_factory=list)
    has_levels: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return int(self.pixels["SizeY"]), int(self.pixels["SizeX"])

    @property
    def samples(self) -> int:
        """Samples per pixel of a page."""
        return max(1, int(self.channels[0].get("SamplesPerPixel", 1))) if self.channels else 1

    @property
    def planes(self) -> int:
        """Pages: one for all channels, or one for each."""
        return int(self.pixels["SizeC"]) // self.samples

    @property
    def microns_per_px(self) -> float | None:
        """The mean of a pixel's two sides, or None if it is not given."""
        sides = []
        for axis in "XY":
            with suppress(KeyError, ValueError):
                unit = _MICRONS.get(self.pixels.get(f"PhysicalSize{axis}Unit", "µm"), 0)
                sides.append(float(self.pixels[f"PhysicalSize{axis}"]) * unit)
        return sum(sides) / 2 if len(sides) == 2 and min(sides) > 0 else None


@dataclass
class OmeDocument:
    """An OME element: its UUID, its images, or the file that has the metadata in its place (`BinaryOnly`)."""

    uuid: str | None = None
    metadata_file: str | None = None
    images: list[OmeImage] = field(default_factory=list)


def parse_ome(path: Path, text: str | bytes) -> OmeDocument:
    """Return the content of OME-XML. Raises ImageError if it is damaged, or has more than `MOST_IMAGES` images."""
    with _translate_errors(path):
        return _OmeParser().parse(text)


@contextmanager
def _translate_errors(path: Path) -> Iterator[None]:
    """Translate the errors of a parser, and of what is computed from its texts, into one that names the file."""
    try:
        yield
    except ImageError:  # a ValueError, too
        raise
    except (expat.ExpatError, LookupError, ValueError, OverflowError) as error:
        reason = f"its OME-XML cannot be read ({type(error).__name__}: {error})"
        raise make_damaged_error(path, reason) from error


def _make_pages_error(path: Path, reason: str) -> ImageError:
    return ImageError(
        f"{path} does not say which page is which channel: its OME-XML gives {reason}. Convert it by a program that "
        "writes the elements TiffData anew (bfconvert IN OUT.ome.tif)."
    )


class _OmeParser:
    """Collects the elements that say where pixels are; no tree is built, since annotations may have megabytes."""

    def __init__(self) -> None:
        self.found, self.parents = OmeDocument(), [""]
        self.uuid_text: str | None = None
        self.parser = expat.ParserCreate()
        self.parser.StartDoctypeDeclHandler = refuse_doctype
        self.parser.StartElementHandler, self.parser.EndElementHandler = self.start, self.end
        self.parser.CharacterDataHandler = self.collect_text

    def parse(self, text: str | bytes) -> OmeDocument:
        with suppress(_ImagesEndError):
            self.parser.Parse(text, True)
        return self.found

    def start(self, name: str, attributes: dict[str, str]) -> None:
        name, parent = name.rpartition(":")[2], self.parents[-1]
        self.parents.append(name)
        if parent == "":
            self.found.uuid = attributes.get("UUID")
        elif parent == "OME":
            self.start_outer(name, attributes)
        elif self.found.images:
            self.start_inner(self.found.images[-1], (parent, name), attributes)

    def start_outer(self, name: str, attributes: dict[str, str]) -> None:
        if name == "BinaryOnly":
            self.found.metadata_file = attributes["MetadataFile"]
        elif name == "Image":
            if len(self.found.images) == MOST_IMAGES:
                raise ValueError(f"it describes more than {MOST_IMAGES} images")
            self.found.images.append(OmeImage(attributes.get("Name", "")))
        elif name in ("StructuredAnnotations", "ROI") and self.found.images:
            raise _ImagesEndError  # the schema has all images before these

    def start_inner(self, image: OmeImage, place: tuple[str, str], attributes: dict[str, str]) -> None:
        if place == ("Image", "Pixels"):
            image.pixels = attributes
        elif place == ("Image", "AnnotationRef"):
            image.has_levels |= attributes.get("ID", "").startswith(_LEVELS)
        elif place == ("Pixels", "Channel"):
            image.channels.append(attributes)
        elif place == ("Pixels", "TiffData") and _is_plane(image.pixels):
            image.tiff_data.append(attributes)
            image.uuids.append((None, None))
        elif place == ("TiffData", "UUID") and image.uuids:
            image.uuids[-1] = None, attributes.get("FileName")
            self.uuid_text = ""

    def collect_text(self, text: str) -> None:
        if self.uuid_text is not None:
            self.uuid_text += text

    def end(self, _name: str) -> None:
        self.parents.pop()
        if self.uuid_text is not None:
            uuids = self.found.images[-1].uuids
            uuids[-1] = self.uuid_text.strip() or None, uuids[-1][1]
            self.uuid_text = None


class _ImagesEndError(Exception):
    """Raised to stop the parser after the last image."""


def _is_plane(pixels: dict[str, str]) -> bool:
    """Return whether there is one focal plane and time: the pages of a stack, perhaps 100,000, are not kept."""
    return pixels.get("SizeZ") == pixels.get("SizeT") == "1"


def choose_image(path: Path, images: Sequence[OmeImage]) -> OmeImage:
    """Return the image that is the scan.

    It is the largest whose name does not say that it is a label or an overview. Any other image has to be known as none
    of equal rank: by its name, by pixels that are `_COARSER` times as wide, as a reduced copy (of the same aspect
    ratio), because the scan alone has levels, or because it is smaller and follows the scan, and no sizes of pixels
    tell that both are scans. Raises ImageError if there are several scans, or the XML is damaged.
    """
    with _translate_errors(path):
        images = [image for image in images if image.pixels]
        if not images:
            raise make_damaged_error(path, "its OME-XML has no image")
        named = [image for image in images if not _PREVIEW.search(image.name)] or images
        scan = max(named, key=lambda image: image.shape[0] * image.shape[1])
        before = True
        for image in named:
            before &= image is not scan
            if image is not scan and not _is_lesser(image, scan, before):
                sizes = "; ".join(
                    f"{picture.name or 'no name'}: {' x '.join(map(str, picture.shape))} px" for picture in named
                )
                raise ImageError(
                    f"{path} holds {len(named)} pictures, and its OME-XML does not say which of them is the scan: "
                    f"{sizes[:600]}. Save the one you want by itself, or give the others a Name such as label or macro."
                )
    return scan


def _is_lesser(image: OmeImage, scan: OmeImage, comes_before: bool) -> bool:
    """Return whether an image that is not larger than the scan is known to be none."""
    rows, cols = image.shape
    if (rows, cols) == scan.shape:
        return False
    if scan.has_levels and not image.has_levels:
        return True
    if abs(scan.shape[0] * cols / scan.shape[1] - rows) <= 2:
        return True
    widths = image.microns_per_px, scan.microns_per_px
    if widths[0] and widths[1]:
        return widths[0] >= _COARSER * widths[1]
    return not comes_before


def list_planes(path: Path, image: OmeImage, alone: bool) -> list[PlaneSource]:
    """Return the page of each channel of an image, red, green and blue in this order, or the one page of all.

    `alone` says that the document has no other image. Raises ImageError if it is a stack, if its channels are no
    colours, or if the XML does not give a page for each channel exactly once.
    """
    with _translate_errors(path):
        sizes = [int(image.pixels[f"Size{axis}"]) for axis in "ZT"]
        if sizes != [1, 1] or (image.planes, image.samples) not in ((1, 1), (1, 2), (1, 3), (1, 4), (3, 1)):
            raise ImageError(
                f"{path} holds a stack: {sizes[0]} focal planes, {sizes[1]} times, {image.planes} channels of "
                f"{image.samples}. A picture is one plane of grey, or of red, green and blue: save that by itself. "
                + AS_TENSORS
            )
        sources = _map_planes(path, image, alone)
        return [sources[channel] for channel in _order_channels(path, image)]


def _map_planes(path: Path, image: OmeImage, alone: bool) -> dict[int, PlaneSource]:
    """Return the page of each channel. Raises ImageError if one has none, or several."""
    #     <TiffData/>                               all pages of the file, from the first on
    #     <TiffData IFD="4"/>                       page 4 is channel 0
    #     <TiffData IFD="4" FirstC="1" PlaneCount="2"/>   pages 4 and 5 are channels 1 and 2
    sources: dict[int, PlaneSource] = {}
    elements = list(zip(image.tiff_data, image.uuids, strict=True))
    if not elements and alone:
        elements = [({}, (None, None))]
    for data, (uuid, file_name) in elements:
        z, t, first, ifd = (int(data.get(key, 0)) for key in ("FirstZ", "FirstT", "FirstC", "IFD"))
        count = int(data.get("PlaneCount", 1 if "IFD" in data else image.planes - first))
        if min(z, t, first, ifd, count) < 0 or z or t or first + count > image.planes:
            reason = f"FirstC={first}, FirstZ={z}, FirstT={t}, IFD={ifd}, PlaneCount={count} of {image.planes} planes"
            raise _make_pages_error(path, reason)
        for step in range(count):
            if sources.setdefault(first + step, source := PlaneSource(ifd + step, uuid, file_name)) != source:
                raise _make_pages_error(path, f"two pages for channel {first + step}")
    if missing := set(range(image.planes)) - set(sources):
        raise _make_pages_error(path, f"no page for channel {min(missing)}")
    return sources


def _order_channels(path: Path, image: OmeImage) -> list[int]:
    """Return the channels whose colours are red, green and blue; as they come, if no colours are given."""
    colours = [int(channel.get("Color", _WHITE)) for channel in image.channels]
    if image.planes == 1 or set(colours) <= {_WHITE} or len(colours) != image.planes:
        return list(range(image.planes))
    if set(colours) != set(_PRIMARIES):
        shown = ", ".join(
            f"{channel.get('Name', 'no name')} #{colour & 0xFFFFFFFF:08x}"
            for channel, colour in zip(image.channels, colours, strict=True)
        )
        raise ImageError(
            f"{path} has channels that are no red, green and blue: {shown} (RGBA). Pass their numbers as a tensor "
            "(N, C, H, W), or save the picture that a viewer shows of them."
        )
    return [colours.index(colour) for colour in _PRIMARIES]
