"""What fits in a budget of memory, and which of it is fastest."""
