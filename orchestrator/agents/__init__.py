"""Agents and their sources: code, files, strategies, answer contracts."""
