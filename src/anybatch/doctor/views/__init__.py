"""What rules ask of a run: facts that are derived once, and texts in the user's own names."""
