"""Envelopes and domain events, and their way out."""
