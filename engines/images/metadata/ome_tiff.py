"""OME-TIFF: the OME-XML in the first page's description, or in a companion file."""

from mpi4dl_nb.engines.images.metadata.row import MetadataRow

# fmt: off
OME_TIFF = (
    MetadataRow(
        "several Image elements", "Image/@Name, SizeX, SizeY, PhysicalSizeX", "which page is the picture", "read",
        "read",
        "The largest whose Name is not label, macro, overview, thumbnail, preview or barcode; another has to be known "
        "as none of equal rank: by pixels four times as wide, as a reduced copy, without levels (AnnotationRef to "
        "Annotation:Resolution) where the scan has some, or smaller and after the scan.",
    ),
    MetadataRow(
        "several scans", "Image", "which page is the picture", "refused", "refused",
        "Nothing tells which is the scan: save one by itself.",
    ),
    MetadataRow(
        "TiffData: FirstC", "Pixels/TiffData", "which page is which channel", "read", "ignored",
        "In any order. The channels of a mask have to be equal.",
    ),
    MetadataRow(
        "TiffData: IFD, PlaneCount", "Pixels/TiffData", "which page is which channel", "read", "read",
        "Without PlaneCount one page if IFD is given, else all; IFD is 0 by default.",
    ),
    MetadataRow(
        "TiffData that is incomplete", "Pixels/TiffData", "which page is which channel", "refused", "refused",
        "A channel without a page or with two, or FirstZ and FirstT beyond the end: bfconvert writes it anew.",
    ),
    MetadataRow(
        "UUID: FileName", "TiffData/UUID", "which file has the channel", "read", "ignored",
        "In the same folder, with this UUID; not by a path or a link out of it.",
    ),
    MetadataRow(
        "UUID: FileName that is missing", "TiffData/UUID", "which file has the channel", "refused", "refused",
        "The error names the file: copy it beside the others.",
    ),
    MetadataRow(
        "UUID of another file", "OME/@UUID", "which file has the channel", "refused", "refused",
        "A file of this name, but of another set.",
    ),
    MetadataRow(
        "BinaryOnly: MetadataFile", "OME/BinaryOnly", "which page is which channel", "read", "ignored",
        "A companion (.companion.ome) or another OME-TIFF file, in the same folder.",
    ),
    MetadataRow(
        "BinaryOnly: MetadataFile that is missing", "OME/BinaryOnly", "which page is which channel", "refused",
        "refused", "The error names the file: copy it beside the others.",
    ),
    MetadataRow(
        "SizeX, SizeY", "Pixels", "which page is the picture", "refused", "refused",
        "Where the page has another size: the text is that of another file.",
    ),
    MetadataRow("SizeZ, SizeT", "Pixels", "which plane is the picture", "refused", "refused", "A stack."),
    MetadataRow(
        "DimensionOrder", "Pixels", "which page is which plane", "ignored", "ignored",
        "With one focal plane and one time all orders are equal.",
    ),
    MetadataRow(
        "Channel: SamplesPerPixel", "Pixels/Channel", "whether a page has all channels", "read", "read",
        "One page of three samples, or three pages of one.",
    ),
    MetadataRow(
        "Channel: Color", "Pixels/Channel", "which channel is red", "read", "ignored",
        "Red, green and blue in any order; without colours, or all white, in this order.",
    ),
    MetadataRow(
        "Channel: Color of other kinds", "Pixels/Channel", "all colours", "refused", "refused",
        "Fluorescence: pass the channels as a tensor (N, C, H, W).",
    ),
    MetadataRow(
        "BigEndian, Interleaved, SignificantBits", "Pixels", "all numbers", "ignored", "ignored",
        "The tags of TIFF say how numbers are stored.",
    ),
)
