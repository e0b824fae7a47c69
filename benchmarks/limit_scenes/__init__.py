"""Scenes of limits.py, and what a service's log says about them."""
