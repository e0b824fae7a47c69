"""Connections to Redis: one server, Sentinel, Cluster. Knows nothing of runs."""
