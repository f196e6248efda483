"""From a module to a graph of operators, and the checks of what a trace would get wrong."""
