"""What users request of runs: cancel, pause, resume, retry, and under which limits."""
