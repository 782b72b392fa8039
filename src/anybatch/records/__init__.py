"""Plain facts: frozen, without torch, JSON in and out."""
