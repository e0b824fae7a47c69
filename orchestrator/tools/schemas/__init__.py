"""JSON Schemas of data that a stranger may write, and data checked against them, within bounds.

Knows neither tools nor runs.
"""
