"""Checkpoints: everything of a run in one record, to keep, to look into, and to go on from."""
