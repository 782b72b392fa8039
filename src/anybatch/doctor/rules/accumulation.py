"""Rules of the family accumulation."""
