"""Parsing of untrusted XML, such as OME-XML; document types, which could define entities, are refused."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from xml.etree import ElementTree as ET
from xml.parsers import expat
from xml.parsers.expat import ExpatError

from engines.errors import ImageError
from engines.images.files import make_damaged_error

__all__ = ["XML_BYTES", "OmeImage", "find_attributes", "parse_xml"]

XML_BYTES = 1 << 25  # of a text that is parsed to a tree, which takes about ten times as much memory

Attributes = dict[str, str]


def _refuse(*named: object) -> NoReturn:
    raise ValueError("it has a document type, whose entities could grow without end")


class _NoDoctypeBuilder(ET.TreeBuilder):
    def doctype(self, *named: object) -> NoReturn:
        _refuse()


def parse_xml(text: str | bytes) -> ET.Element:
    """Return the root element. Raises ET.ParseError, and ValueError for a document type, which no picture's XML needs.

    >>> parse_xml("<a><b>1</b></a>").findtext("b")
    '1'
    """
    return ET.fromstring(text, ET.XMLParser(target=_NoDoctypeBuilder()))


def find_attributes(text: str | bytes, outer: str, inner: Sequence[str]) -> dict[str, Attributes]:
    """Return the attributes of the first element `outer`, and of its first direct child of each name in `inner`.

    Names are given without namespaces. No tree is built, and parsing stops after these elements, since the document may
    have megabytes of other content. Raises expat.ExpatError, and ValueError for a document type.

    >>> find_attributes("<a><n:b c='1'><d e='2'/><d e='3'/></n:b><b/></a>", "b", ["d", "f"])
    {'b': {'c': '1'}, 'd': {'e': '2'}}
    """
    # Two states: until `outer` is met, only its name is looked for; from then on, the depth tells its direct children
    # from deeper elements, and its own end from theirs.
    parser, found, depth = expat.ParserCreate(), dict[str, Attributes](), 0

    def find_outer(name: str, attributes: Attributes) -> None:
        if name.endswith(outer) and name.rpartition(":")[2] == outer:
            found[outer] = attributes
            parser.StartElementHandler, parser.EndElementHandler = find_inner, end_element

    def find_inner(name: str, attributes: Attributes) -> None:
        nonlocal depth
        depth += 1
        plain = name.rpartition(":")[2]
        if depth == 1 and plain in inner:
            found.setdefault(plain, attributes)
        if len(found) == 1 + len(inner):
            raise _ParsingDoneError

    def end_element(_name: str) -> None:
        nonlocal depth
        depth -= 1
        if depth < 0:
            raise _ParsingDoneError

    parser.StartDoctypeDeclHandler, parser.StartElementHandler = _refuse, find_outer
    with suppress(_ParsingDoneError):
        parser.Parse(text, True)
    return found


class _ParsingDoneError(Exception):
    """Raised to stop the parser once all wanted elements are found."""


# Parser of the OME-XML of an OME-TIFF file for its first picture (OME data model, Pixels).


_MICRONS = {"µm": 1.0, "μm": 1.0, "um": 1.0, "nm": 1e-3, "mm": 1e3, "cm": 1e4, "m": 1e6}


@dataclass(frozen=True)
class OmeImage:
    """A picture in `planes` pages from `first_page` on, with `microns_per_px` micrometres per pixel (None: unknown)."""

    planes: int
    first_page: int
    microns_per_px: float | None

    @classmethod
    def parse(cls, path: Path, text: str) -> OmeImage:
        """Parse OME-XML. Raises ImageError if it is damaged, or describes a stack or channels that are no colours."""
        try:
            #     <OME><Image><Pixels SizeZ SizeT SizeC PhysicalSizeX ...>
            #         <Channel SamplesPerPixel/> ... <TiffData IFD/> ...
            #
            # RGB is either one channel of three samples, in one page, or three channels of one sample, a page each.
            found = find_attributes(text, "Pixels", ("Channel", "TiffData"))
            pixels = found["Pixels"]
            depth, times, channels = (int(pixels[f"Size{axis}"]) for axis in "ZTC")
            samples = int(found.get("Channel", {}).get("SamplesPerPixel", 1))
            first = int(found.get("TiffData", {}).get("IFD", 0))
            planes = channels // max(1, samples)
        except (ExpatError, LookupError, ValueError, OverflowError) as error:
            raise make_damaged_error(path, f"its OME-XML cannot be read ({type(error).__name__}: {error})") from error
        if (depth, times) != (1, 1) or (planes, samples) not in ((1, 1), (1, 2), (1, 3), (1, 4), (3, 1)):
            raise ImageError(
                f"{path} holds a stack: {depth} focal planes, {times} times, {channels} channels of {samples}. "
                "A picture is one plane of grey, or of red, green and blue: save that by itself."
            )
        if first < 0:
            raise make_damaged_error(path, f"its OME-XML speaks of page {first}")
        return cls(planes, first, _parse_microns(pixels))


def _parse_microns(attributes: dict[str, str]) -> float | None:
    """Return the mean of a pixel's two sides in micrometres, or None if it is not given."""
    sides = []
    for axis in "XY":
        unit = _MICRONS.get(attributes.get(f"PhysicalSize{axis}Unit", "µm"))
        try:
            sides.append(float(attributes[f"PhysicalSize{axis}"]) * (unit or 0))
        except (KeyError, ValueError):
            return None
    return sum(sides) / 2 if min(sides) > 0 else None
