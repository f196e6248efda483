"""OME-TIFF: the OME-XML in the first page's description, or in a companion file."""

from engines.images.metadata.row import MetadataRow

OME_TIFF: tuple[MetadataRow, ...] = ()
