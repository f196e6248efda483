"""Zarr arrays and OME-Zarr groups."""

from engines.images.metadata.row import MetadataRow

OME_ZARR: tuple[MetadataRow, ...] = ()
