"""JSON Schemas and data of strangers: checked against each other, within bounds.

Knows neither tools nor runs.
"""
