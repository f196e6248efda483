"""Offloading to a file of what backward needs: for tiles computed in turn, and for plans with `offload_activations`."""
