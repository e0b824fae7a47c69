"""Processes for work that is suspected of ending its workers."""
