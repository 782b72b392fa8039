"""Rules of the family crashes."""
