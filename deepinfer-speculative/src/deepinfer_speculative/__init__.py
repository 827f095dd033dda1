"""Speculative decoding: drafters, the planner that decides how many drafts pay, the ratio rule."""
