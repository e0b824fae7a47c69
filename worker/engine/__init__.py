"""Celery: its pool, its transport, its consumer, and the bridge into the event loop."""
