"""All benchmarks in one run, as a page with pictures: `make bench`."""
