"""Rules of the family loss."""
