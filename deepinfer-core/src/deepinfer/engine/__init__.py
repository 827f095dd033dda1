"""The brain: scheduling, KV book-keeping, output. Standard library and numpy; never torch."""
