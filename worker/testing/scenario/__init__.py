"""Replies, faults and latencies as values, whichever protocol carries them. Pure."""
