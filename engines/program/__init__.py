"""The program of a rank, as data, and what runs it."""
