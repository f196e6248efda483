"""JPEG: its frames, and the segments of JFIF, Adobe, EXIF, ICC and further pictures."""

from mpi4dl_nb.engines.images.metadata.row import MetadataRow

_LOSSY = "Masks need a threshold, since JPEG changes numbers."

JPEG: tuple[MetadataRow, ...] = (
    MetadataRow("baseline, progressive", "frame", "how pixels are coded", "read", "refused", _LOSSY),
    MetadataRow("arithmetic", "frame", "how pixels are coded", "read", "refused", _LOSSY),
    MetadataRow(
        "12 bits", "frame", "the range of the numbers", "refused", "refused", "Scale it to 0 ... 255 and save it again."
    ),
    MetadataRow("JPEG-LS", "frame", "how pixels are coded", "refused", "refused", "Save it as PNG or TIFF."),
    MetadataRow(
        "two channels", "frame", "what a channel is", "refused", "refused", "A picture is grey, or red, green and blue."
    ),
    MetadataRow(
        "Adobe transform",
        "APP14",
        "whether channels are red, green and blue",
        "read",
        "refused",
        f"RGB and YCbCr. {_LOSSY}",
    ),
    MetadataRow(
        "names of channels",
        "frame, without APP0 and APP14",
        "whether channels are red, green and blue",
        "read",
        "refused",
        f"R, G, B are RGB, others YCbCr, as in libjpeg. {_LOSSY}",
    ),
    MetadataRow(
        "CMYK",
        "frame and APP2 (ICC)",
        "the colour of the inks",
        "read",
        "refused",
        "Converted to sRGB by its profile; Adobe's inverted numbers. Inks are no classes.",
    ),
    MetadataRow(
        "CMYK without a profile",
        "frame",
        "the colour of the inks",
        "refused",
        "refused",
        "It is not known which inks. Convert it to RGB.",
    ),
    MetadataRow(
        "ICC profile",
        "APP2",
        "the colour of a number",
        "ignored",
        "refused",
        f"Red, green and blue are used as they are stored, with one warning if sRGB shows other colours. {_LOSSY}",
    ),
    MetadataRow(
        "ICC profile of no red, green and blue",
        "APP2",
        "the colour of a number",
        "read",
        "refused",
        f"Such as XYB: converted to sRGB (`engines/images/colour_profile.py`). {_LOSSY}",
    ),
    MetadataRow(
        "ColorSpace",
        "APP1 (EXIF)",
        "the colour of a number",
        "ignored",
        "refused",
        f"Adobe RGB is not applied, and one warning says so. {_LOSSY}",
    ),
    MetadataRow(
        "Orientation",
        "APP1 (EXIF)",
        "which row and column a pixel has",
        "read",
        "read",
        "All eight values; the image is turned upright.",
    ),
    MetadataRow(
        "further pictures",
        "APP2 (MPF)",
        "which picture is shown",
        "ignored",
        "refused",
        f"The first picture is read; others are previews, depths or gain maps. {_LOSSY}",
    ),
    MetadataRow(
        "gain map",
        "APP1 (hdrgm), APP2 (MPF)",
        "the brightness on a display of high range",
        "ignored",
        "refused",
        f"The first picture is complete without it. {_LOSSY}",
    ),
    MetadataRow("density", "APP0", "nothing", "ignored", "refused", f"The size of a print. {_LOSSY}"),
)
