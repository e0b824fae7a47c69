"""Limits that a whole fleet shares: which apply to a step, what a call reserves. Pure."""
