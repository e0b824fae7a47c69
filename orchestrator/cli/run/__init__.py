"""`stepfleet run`: one command from a file of inputs to a file of results."""
