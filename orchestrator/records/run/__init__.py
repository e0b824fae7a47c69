"""Results and reports of a run, derived from its records."""
