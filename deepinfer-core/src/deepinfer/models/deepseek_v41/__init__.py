"""DeepSeek-V4.1: its text model, described in ops."""
