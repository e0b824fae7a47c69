"""Acts: the Celery app, the step, models and tools."""
