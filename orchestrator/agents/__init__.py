"""What an agent is and where it comes from: code, files, strategies, answer contracts."""
