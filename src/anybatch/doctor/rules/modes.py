"""Rules of the family modes."""
