"""The hands: one worker per device runs plans."""
