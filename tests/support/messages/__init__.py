"""Broker messages, forged and hostile."""
