"""Rules of the family order."""
