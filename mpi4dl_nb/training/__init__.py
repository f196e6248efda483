"""One training: batches, loops, healing, predictions and walked steps."""
