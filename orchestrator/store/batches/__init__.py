"""Batches in Redis: manifests, requests to all their runs, expiry."""
