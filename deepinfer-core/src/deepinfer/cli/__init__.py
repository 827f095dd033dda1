"""The command line, a file per command; heavy imports stand inside the commands."""
