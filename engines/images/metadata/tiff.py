"""TIFF, BigTIFF and GeoTIFF: tags of TIFF 6.0, its supplements, and those of GDAL and ImageJ."""

from engines.images.metadata.row import MetadataRow

TIFF = (
    MetadataRow(
        "Orientation",
        "tag 274",
        "which row and column a pixel has",
        "read",
        "read",
        "All eight values; the image is turned upright.",
    ),
)
