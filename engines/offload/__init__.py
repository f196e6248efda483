"""What is kept for backward lies in a file meanwhile: of tiles in turn, and of a plan with `offload_activations`."""
