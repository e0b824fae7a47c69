"""Worker processes and commands for tests."""
