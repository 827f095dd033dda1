"""Groups of ranks."""
