"""Chaos runs: a plan, a fleet, clients, and the recount afterwards."""
