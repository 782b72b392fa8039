"""Rules of the family graph."""
