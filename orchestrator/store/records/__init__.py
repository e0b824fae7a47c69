"""Records as bytes in Redis, and back. Pure."""
