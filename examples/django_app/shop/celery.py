"""The Celery app of the project, on whose workers agents run: `install` is all that is new."""

import os

from celery import Celery

from stepfleet.worker import install

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")

app = Celery("shop")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
install(app)
