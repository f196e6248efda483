"""All benchmarks in one go, as a page with pictures: `make bench`."""
