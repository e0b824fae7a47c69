"""The terminal: output, formats, signals, progress, exit codes."""
