"""Model families, each described once in ops, and the files that weights come from."""
