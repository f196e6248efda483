"""Commands: their flags, and what they run."""
