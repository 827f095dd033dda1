"""The references: plain torch, one definition for each op of the table."""
