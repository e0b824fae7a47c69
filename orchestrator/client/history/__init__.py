"""What a client does with a run's past: rewind, fork, compare."""
