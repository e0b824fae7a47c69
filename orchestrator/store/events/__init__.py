"""Event feeds and text chunks in Redis."""
