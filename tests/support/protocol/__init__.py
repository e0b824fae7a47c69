"""The model of the step protocol, and the machine that compares it with Redis."""
