"""A demonstration on real text: the gradient of micro-batches and of the whole batch, then two minutes of training."""
