"""Rules of the family ranks."""
