"""The project's settings: Celery's begin with CELERY_, the fleet's with CELERY_STEPFLEET_."""

import os

SECRET_KEY = os.environ.get("DJANGO_SECRET_KEY", "only-for-this-example")
INSTALLED_APPS = ["shop"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("SHOP_DATABASE", "shop.sqlite3"),
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

CELERY_BROKER_URL = os.environ.get("SHOP_BROKER", "redis://localhost:6379/0")
CELERY_BROKER_TRANSPORT_OPTIONS = {"global_keyprefix": "shop_"}
CELERY_STEPFLEET_AGENTS = "shop.agents"
CELERY_STEPFLEET_PREFIX = "agents:"
