"""What a loss may return, its weights, and one pass over micro-batches."""
