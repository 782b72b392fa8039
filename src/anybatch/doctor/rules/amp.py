"""Rules of the family amp."""
