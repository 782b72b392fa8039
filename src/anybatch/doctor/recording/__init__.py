"""What is hung on torch while a run is recorded, and what numbers and names its objects."""
