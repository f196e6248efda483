"""From a module to a graph of operators: tracing, stages, and what a loss is."""
