"""Ranks for a notebook: their cluster, calls of functions on them, and the modules that these need."""
