"""The cost of a plan before it runs: time and memory on a machine."""
