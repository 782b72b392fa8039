"""The exact gradient of a batch in pieces."""
