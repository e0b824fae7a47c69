"""A batch as a file: its lines and tables in, its lines of results out."""
