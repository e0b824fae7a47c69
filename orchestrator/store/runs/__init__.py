"""Runs in Redis: steps, tool calls, control, reading."""
