"""Limits of the fleet in Redis: their settings, and the admission of steps under them."""
