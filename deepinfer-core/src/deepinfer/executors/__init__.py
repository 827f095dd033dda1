"""Executors: where plans are carried out."""
