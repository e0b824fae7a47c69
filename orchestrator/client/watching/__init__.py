"""Runs and batches as they go on, and why they do not."""
