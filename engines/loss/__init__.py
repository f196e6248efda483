"""What a traced loss says of itself: how micro-batches add up to a batch, and which numbers are classes."""
