"""Rules of the family probes."""
