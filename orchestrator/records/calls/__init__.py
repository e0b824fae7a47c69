"""Calls of tools: as the model made them, the answers that some wait for, their records."""
