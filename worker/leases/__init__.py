"""Leases of steps and tool calls, and their renewal."""
