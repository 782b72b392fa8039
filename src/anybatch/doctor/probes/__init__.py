"""Questions to a copy of a model after its script has ended."""
