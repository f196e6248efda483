"""JPEG: its segments, EXIF and ICC profiles."""

from engines.images.metadata.row import MetadataRow

JPEG: tuple[MetadataRow, ...] = ()
