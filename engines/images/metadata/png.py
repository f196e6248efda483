"""PNG: its chunks."""

from engines.images.metadata.row import MetadataRow

PNG: tuple[MetadataRow, ...] = ()
