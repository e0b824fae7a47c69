"""Events, text chunks and deliveries of a worker."""
