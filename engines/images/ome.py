"""Parser of the OME-XML of an OME-TIFF file for its first picture (OME data model, Pixels)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from xml.parsers.expat import ExpatError

from engines.errors import ImageError
from engines.images.files import make_damaged_error
from engines.images.safe_xml import find_attributes

__all__ = ["OmeImage"]

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
