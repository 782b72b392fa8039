"""How large a batch is worth its samples, and what changes with its size."""
