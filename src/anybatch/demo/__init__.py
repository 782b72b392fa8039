"""A demonstration on real text: the gradient in pieces against the whole batch's, then two minutes of training."""
