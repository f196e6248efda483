"""Zarr 2 and 3, and OME-Zarr (OME-NGFF 0.1 to 0.5): attributes, order of arrays and places of chunks."""

from mpi4dl_nb.engines.images.metadata.row import Action, MetadataRow


def _row(name: str, number: str, changes: str, picture: Action, note: str) -> MetadataRow:
    return MetadataRow(name, number, changes, picture, None, note)  # masks are not read from Zarr


OME_ZARR: tuple[MetadataRow, ...] = (
    _row(
        "shape",
        "array",
        "rows, columns and channels of an array",
        "read",
        "(H, W), (H, W, C) with 1 or 3, else (C, H, W).",
    ),
    _row(
        "dimension_names",
        "array, or `_ARRAY_DIMENSIONS`",
        "which axis is which",
        "read",
        "By name; without names, or with others, by the shape.",
    ),
    _row("data type", "array", "the range of the numbers", "refused", "Only uint8 is read. Scale and save it."),
    _row("order", "array, Zarr 2", "where in a chunk a pixel is", "read", "C and F."),
    _row("transpose", "array, codec", "where in a chunk a pixel is", "read", "Any order of axes."),
    _row("fill_value", "array", "pixels of chunks that are not stored", "read", "Without a value: 0."),
    _row("dimension_separator", "array, Zarr 2", "which file holds a chunk", "read", "Dot and slash."),
    _row(
        "other dimension_separator",
        "array, Zarr 2",
        "which file holds a chunk",
        "refused",
        "Chunks that have other names than the metadata say would all count as missing.",
    ),
    _row("chunk_key_encoding", "array, Zarr 3", "which file holds a chunk", "read", "`default` and `v2`."),
    _row(
        "sharding_indexed",
        "array, codec",
        "where in a file a chunk is",
        "read",
        "The index is at the end or the start.",
    ),
    _row("compressors", "array, codecs", "the numbers", "read", "Zstandard, Blosc, LZ4, gzip and zlib, one of them."),
    _row(
        "filters",
        "array, codecs",
        "the numbers",
        "refused",
        "Filters that change numbers (delta, fixedscaleoffset, quantize ...). Save it without.",
    ),
    _row(
        "scale_factor, add_offset",
        "attribute (CF)",
        "what a number stands for",
        "refused",
        "The numbers are measurements and no shades.",
    ),
    _row(
        "consolidated metadata",
        "group",
        "shape, order and codecs",
        "ignored",
        "It is a copy, which may be out of date: each array's own metadata are read.",
    ),
    _row(
        "multiscales",
        "group",
        "which arrays are the picture",
        "read",
        "One picture; several entries only if they list the same arrays.",
    ),
    _row(
        "several multiscales",
        "group",
        "which arrays are the picture",
        "refused",
        "It is not known which one is the scan. Give the path of one array.",
    ),
    _row(
        "bioformats2raw.layout", "group, one picture", "which group is the picture", "read", "The only picture is read."
    ),
    _row(
        "bioformats2raw.layout, several",
        "group, several pictures",
        "which group is the picture",
        "refused",
        "It is not known which one is the scan. Give the path of one of them.",
    ),
    _row("image-label", "group", "whether numbers are shades", "refused", "Numbers of labels are classes or objects."),
    _row(
        "labels", "group", "no pixel of the picture", "ignored", "Labels are in groups of their own beside the levels."
    ),
    _row(
        "axes",
        "multiscales",
        "which axis is which",
        "read",
        "By type and name; 0.1 and 0.2 imply t, c, z, y, x. Axes t and z must have one entry.",
    ),
    _row(
        "axes, none",
        "multiscales 0.3 and later",
        "which axis is which",
        "refused",
        "Without names, rows could not be told from channels.",
    ),
    _row(
        "datasets, order",
        "multiscales",
        "which array is level 0",
        "read",
        "Levels are sorted by their size, in whatever order they are listed.",
    ),
    _row(
        "datasets, sizes",
        "multiscales",
        "whether an array is a reduced copy",
        "refused",
        "A level of the same size or another aspect ratio (by more than 2 px).",
    ),
    _row(
        "datasets, channels",
        "multiscales",
        "whether an array is a reduced copy",
        "refused",
        "All levels have the same channels.",
    ),
    _row(
        "scale",
        "coordinateTransformations",
        "which array is level 0",
        "refused",
        "A scale that contradicts the size of its level (by more than 2 px).",
    ),
    _row(
        "translation",
        "coordinateTransformations",
        "which pixels of two levels show the same",
        "refused",
        "A level that begins more than one of its pixels away from the finest.",
    ),
    _row(
        "translation, half a pixel",
        "coordinateTransformations",
        "which pixels of two levels show the same",
        "ignored",
        "A reduced pixel is centred between those that it covers, as levels are taken here.",
    ),
    _row(
        "coordinateTransformations, shared",
        "multiscales",
        "the size of a pixel",
        "read",
        "They multiply `microns_per_px`, and change no pixel.",
    ),
    _row(
        "omero.channels",
        "group: color, window, active, inverted",
        "how a viewer shows the channels",
        "ignored",
        "Settings of a display: pixels are the stored numbers, channels in the stored order.",
    ),
    _row(
        "omero.rdefs",
        "group: model, defaultT, defaultZ",
        "how a viewer shows the channels",
        "ignored",
        "Settings of a display; there is one time and one plane.",
    ),
)
