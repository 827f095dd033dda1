"""The draw: counter-based noise, filters, verification."""
