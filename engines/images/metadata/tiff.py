"""TIFF, BigTIFF and GeoTIFF: tags of TIFF 6.0, its supplements, and those of GDAL, ImageJ and microscopes."""

from __future__ import annotations

from mpi4dl_nb.engines.images.metadata.row import MetadataRow

_CONVERTED = "Convert it to 8-bit RGB or grey."

# fmt: off
_PLACES = (
    MetadataRow(
        "Orientation", "274", "the row and column of a pixel", "read", "read", "All eight values: turned upright."
    ),
    MetadataRow(
        "Orientation in XMP", "700", "the row and column of a pixel", "ignored", "ignored",
        "The tag of TIFF counts, and its default, as in libtiff and GDAL.",
    ),
    MetadataRow(
        "PlanarConfiguration", "284 = 2", "which channel a number belongs to", "read", "read",
        "Each channel is a plane of segments.",
    ),
    MetadataRow(
        "NewSubfileType: reduced", "254 = 1", "which page is the picture", "read", "read",
        "The picture is the first page that is no reduced copy; the copies are its levels.",
    ),
    MetadataRow(
        "NewSubfileType: mask", "254 = 4", "whether a pixel is there", "ignored", "refused",
        "A picture has the numbers that are stored under the mask, as GDAL's read() gives them; a mask of classes is "
        "refused where the page is 0, since no class is known there.",
    ),
    MetadataRow(
        "SubIFDs", "330", "which page is the picture", "read", "read",
        "The levels of a page; the picture itself if the page is a preview.",
    ),
    MetadataRow(
        "several pages of one size", "next IFD", "which page is the picture", "refused", "refused",
        "A stack: save one page by itself.",
    ),
    MetadataRow(
        "ImageDepth", "32997", "which plane a number belongs to", "refused", "refused",
        "A volume in one page: save one plane by itself.",
    ),
    MetadataRow(
        "ImageJ: images", "270, 50839", "which plane is the picture", "refused", "refused",
        "A hyperstack, whose planes follow without pages of their own: save one by itself.",
    ),
    MetadataRow(
        "ImageJ: ranges and LUTs", "270, 50839", "the shades on a screen", "ignored", "ignored",
        "Display settings of ImageJ: the stored numbers are read.",
    ),
    MetadataRow(
        "MetaMorph: UIC2Tag", "33629", "which plane is the picture", "refused", "refused",
        "A stack with more than one plane: save one by itself.",
    ),
    MetadataRow(
        "overlapping tiles of Trestle", "270, 305", "the row and column of a pixel", "read", None,
        "By OpenSlide, which knows the overlaps; without it the file is refused.",
    ),
)

_EMPTY = (
    MetadataRow(
        "empty tiles or strips", "offset or byte count 0", "all pixels of the segment", "read", "read",
        "They are 0, in all channels, before palette, white-is-zero and transparency.",
    ),
    MetadataRow(
        "GDAL_NODATA", "42113", "all pixels of empty segments", "read", "read",
        "Empty segments have this number; stored pixels that have it are numbers as all others (masks: ignore=).",
    ),
    MetadataRow(
        "GDAL_NODATA that no pixel can hold", "42113", "all pixels of empty segments", "refused", "refused",
        "Programs differ. Without empty segments it changes nothing.",
    ),
    MetadataRow(
        "empty tiles of a vendor's slide", "offset or byte count 0", "all pixels of the tile", "read", "read",
        "A picture by OpenSlide: from a coarser level, or white. With GDAL_NODATA it is no vendor's file any more. "
        "A mask has 0.",
    ),
)

_COLOURS = (
    MetadataRow(
        "PhotometricInterpretation: white is zero", "262 = 0", "all shades", "read", "ignored",
        "Shades are inverted; the numbers of a mask are classes as they are stored.",
    ),
    MetadataRow(
        "ColorMap", "262 = 3, 320", "all colours", "read", "ignored",
        "The high byte of 16-bit colours; the numbers of a mask are indices.",
    ),
    MetadataRow(
        "ColorMap of 8-bit colours", "262 = 3, 320", "all colours", "read", "ignored",
        "If no colour is above 255, all are taken for 8-bit ones, as in libtiff and GDAL.",
    ),
    MetadataRow("Indexed", "346", "all colours", "refused", "ignored", "Indices into colours of another kind."),
    MetadataRow(
        "YCbCr in JPEG", "262 = 6, 259 = 7", "all colours", "read", "refused",
        "libjpeg converts to RGB by the coefficients of JPEG. Masks: a JPEG changes numbers.",
    ),
    MetadataRow(
        "YCbCrCoefficients, ReferenceBlackWhite of JPEG", "529, 532, 531", "all colours", "ignored", "refused",
        "JPEG defines its own, and tifffile, Pillow and GDAL use these.",
    ),
    MetadataRow(
        "YCbCr without JPEG", "262 = 6", "all colours", "read", "refused",
        "By Pillow, with the default coefficients and whole colours.",
    ),
    MetadataRow(
        "YCbCrCoefficients without JPEG", "529, 532", "all colours", "refused", "refused", _CONVERTED
    ),
    MetadataRow(
        "YCbCrSubSampling without JPEG", "530", "which colours a pixel has", "refused", "refused", _CONVERTED
    ),
    MetadataRow("CMYK, InkSet, DotRange", "262 = 5, 332, 336", "all colours", "refused", "refused", _CONVERTED),
    MetadataRow("L*a*b*, Decode", "262 = 8 to 10, 433", "all colours", "refused", "refused", _CONVERTED),
    MetadataRow("LogL, LogLuv", "262 = 32844, 32845", "all colours", "refused", "refused", _CONVERTED),
    MetadataRow("CFA, LinearRaw", "262 = 32803, 34892", "all colours", "refused", "refused", _CONVERTED),
    MetadataRow(
        "PhotometricInterpretation: mask", "262 = 4", "all colours", "refused", "read",
        "It is no picture; as a mask of classes its numbers are 0 and 1.",
    ),
    MetadataRow(
        "ICC profile", "34675", "all colours on a screen", "ignored", "ignored", "The stored numbers are given."
    ),
    MetadataRow(
        "TransferFunction, WhitePoint, PrimaryChromaticities", "301, 318, 319", "colours on a screen", "ignored",
        "ignored", "No reader applies them: colours are taken for sRGB.",
    ),
    MetadataRow(
        "GrayResponseCurve", "290, 291", "shades in print", "ignored", "ignored", "No reader applies it."
    ),
    MetadataRow(
        "MinSampleValue, MaxSampleValue", "280, 281, 340, 341", "shades on a screen", "ignored", "ignored",
        "They describe the numbers, and change none.",
    ),
    MetadataRow(
        "GDAL_METADATA: scale, offset", "42112", "the physical value of a number", "ignored", "ignored",
        "The stored numbers are read, as by GDAL's read().",
    ),
    MetadataRow(
        "GeoTIFF", "33550, 33922, 34264", "the place on Earth", "ignored", "ignored", "Rows and columns stay."
    ),
)

_NUMBERS = (
    MetadataRow(
        "BitsPerSample 1, 2, 4", "258", "all numbers", "read", "read",
        "Spread over 0 ... 255 in a picture; the numbers themselves in a mask.",
    ),
    MetadataRow(
        "BitsPerSample above 8", "258", "all numbers", "refused", "read",
        "No scaling to 8 bits is right for all pictures: pass the numbers as a tensor (N, C, H, W).",
    ),
    MetadataRow(
        "SampleFormat", "339 = 2, 3", "all numbers", "refused", "read", "Signed and floating-point numbers: as above."
    ),
    MetadataRow("SampleFormat: undefined", "339 = 4", "all numbers", "read", "read", "As unsigned, as in GDAL."),
    MetadataRow(
        "ExtraSamples: alpha", "338 = 2", "colours of transparent pixels", "read", "refused",
        "Composited on white. A mask is refused where it is transparent.",
    ),
    MetadataRow(
        "ExtraSamples: premultiplied alpha", "338 = 1", "colours of transparent pixels", "read", "refused",
        "White is added to what is multiplied already. A mask is refused where it is transparent.",
    ),
    MetadataRow(
        "ExtraSamples: alpha after others", "338 = 0, 2", "which channel is transparency", "read", "refused",
        "The channel that the tag says, wherever it is.",
    ),
    MetadataRow(
        "premultiplied alpha without colours", "338 = 1, 262 = 0 or 3", "all colours", "refused", "refused",
        "What is multiplied is not defined for indices and for white that is 0.",
    ),
    MetadataRow(
        "ExtraSamples: unspecified", "338 = 0", "a further channel", "ignored", "refused",
        "The first three channels of RGB are its colours. Of a mask it is not known which channel has the classes.",
    ),
    MetadataRow("FillOrder", "266 = 2", "the order of bits in a byte", "read", "read", "Reversed."),
    MetadataRow("byte order", "II, MM", "numbers of more than one byte", "read", "read", "Swapped."),
    MetadataRow(
        "Predictor", "317 = 2", "all numbers", "read", "read", "Differences are added up, of 8, 16, 32 and 64 bits."
    ),
    MetadataRow(
        "Predictor without its compression", "317, 259 = 1", "all numbers", "ignored", "ignored",
        "It belongs to LZW, deflate, LZMA and Zstandard; Pillow and GDAL pass it over elsewhere.",
    ),
    MetadataRow(
        "Predictor of other kinds", "317", "all numbers", "refused", "refused", "Programs differ, also for few bits."
    ),
    MetadataRow(
        "Compression: fax", "259 = 2 to 4", "all numbers", "read", "refused",
        "A picture by Pillow, whole. Programs differ in whether ink is 0 or 1: save a mask as PNG.",
    ),
    MetadataRow(
        "Compression of other kinds", "259 = 50001, ...", "all numbers", "refused", "refused",
        "WebP, JPEG XL, LERC and others, by name: gdal_translate or tiffcp converts them.",
    ),
    MetadataRow(
        "JPEGTables", "347", "all numbers", "read", "refused", "Given to the decoder. Masks: a JPEG changes numbers."
    ),
)

TIFF = (*_PLACES, *_EMPTY, *_COLOURS, *_NUMBERS)
