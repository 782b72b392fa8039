"""Memory of a step: measuring it, and checkpointing, offload and the loss in chunks."""
