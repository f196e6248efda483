"""Training on one rank: steps, checkpoints, comparison with one process, asynchronous replicas."""
