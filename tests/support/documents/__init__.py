"""Pages, samples, the public names and the table of requirements."""
