"""What may be wrong with a run: pure functions over its facts, one decorated function each, one file a family."""
