"""The fleet as a whole: its figures, its health, messages that nobody can read."""
