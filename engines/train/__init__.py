"""Training on one rank: steps, checkpoints, evaluation, comparison with one process, asynchronous replicas."""
