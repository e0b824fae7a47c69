"""A Django project that has agents. As in any project with Celery, the app is made with it."""

from shop.celery import app as celery_app

__all__ = ["celery_app"]
