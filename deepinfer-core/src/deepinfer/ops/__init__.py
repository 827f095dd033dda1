"""The op table: an op is declared by its reference, backends override ops at any grain."""
