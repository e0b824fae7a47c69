"""What a submission says of a run: its input, and the runs that it waits for."""
