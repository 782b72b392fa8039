"""What a step takes, and what is traded for it: checkpointing, offload, a loss in chunks."""
