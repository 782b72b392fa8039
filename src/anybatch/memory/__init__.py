"""What a step takes, and how it is lowered: checkpointing, offload, a loss in chunks."""
