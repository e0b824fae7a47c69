"""Settings of a fleet, and the signing of its messages."""
