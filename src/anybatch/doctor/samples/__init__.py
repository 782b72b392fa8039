"""What is measured on sampled steps."""
