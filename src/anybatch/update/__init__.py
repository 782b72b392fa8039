"""One attempt at one update of the weights."""
