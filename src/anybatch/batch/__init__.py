"""Batches: where samples lie, how they are split, packed and moved."""
