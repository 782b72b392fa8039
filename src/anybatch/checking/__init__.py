"""Whether a loss may be split: the whole batch against two splits of it, and what makes the difference."""
