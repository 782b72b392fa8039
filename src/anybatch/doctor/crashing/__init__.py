"""What torch's own errors mean, from what is alive when they are raised."""
