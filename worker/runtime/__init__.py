"""A worker process around its steps: connect, compose, background tasks, isolation, shutdown."""
