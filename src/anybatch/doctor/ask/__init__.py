"""Questions that are put to copies after a run, and what is kept of the run for them."""
