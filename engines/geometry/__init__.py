"""Positions of values: spans, tiles, grids and moves between them, and the windows that operators read."""
