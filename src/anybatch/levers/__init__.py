"""What one may trade for memory, on named modules, each with a handle that takes it off."""
