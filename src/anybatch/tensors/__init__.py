"""What one does to tensors and batches of them."""
