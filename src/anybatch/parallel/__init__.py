"""Several processes that take one gradient together."""
