"""The protocol of one step as values and pure decisions. Knows neither Redis nor Celery."""
