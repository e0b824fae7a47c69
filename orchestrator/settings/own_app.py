"""The settings of a fleet whose steps run on a user's own Celery app.

Its broker is the app's, with the app's `global_keyprefix`. Other settings come from arguments, then
from the app's configuration (`stepfleet_queue`; in Django `CELERY_STEPFLEET_QUEUE`), then from
where `load_settings` finds them. Reads the app's configuration, and changes nothing of it but how
addresses with passwords are shown.
"""

import logging
import re
from typing import Any

from celery import Celery
from pydantic import SecretStr

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.redis_client.urls import is_sentinel, usable_broker
from stepfleet.orchestrator.settings.settings import Settings, load_settings

log = logging.getLogger(__name__)

NAMESPACE = "stepfleet_"
AGENTS = f"{NAMESPACE}agents"
_ADDRESSES = (f"{NAMESPACE}redis_url", f"{NAMESPACE}events_url")
_JSON = {"json", "application/json"}
_REDIS = re.compile(r"(rediss?|unix)://[^;]*")


def app_settings(app: Celery, **given: Any) -> Settings:
    """Return the settings of the fleet on `app`.

    Raises `ConfigurationError` that names the setting of the app, and the fix, where steps could
    not run on it.
    """
    conf = app.conf
    _hide_addresses(conf)
    known = {name: conf.get(f"{NAMESPACE}{name}") for name in Settings.model_fields}
    own = {name: value for name, value in {**known, **given}.items() if value is not None}
    _check(conf)
    broker = _broker(app, own.get("broker_url"))
    own |= {"broker_url": broker, "transport": "stock"}
    own.setdefault(
        "broker_prefix", (conf.broker_transport_options or {}).get("global_keyprefix", "")
    )
    found = load_settings(**own)
    # Where the app's TLS options are not in its URL, they do not reach the store.
    if found.redis_url is None and _REDIS.fullmatch(broker) and not conf.broker_use_ssl:
        found = load_settings(**own, redis_url=broker)
    return found


def check_addresses(app: Celery) -> None:
    """Raise `ConfigurationError` for an address of the app's broker that kombu cannot read."""
    for given in (app.conf.broker_read_url, app.conf.broker_write_url):
        urls = (given or "",) if isinstance(given, str | None) else given
        for url in (one for text in urls for one in text.split(";")):
            try:
                if url and not is_sentinel(url):  # theirs have another form than ours
                    usable_broker(url)
            except ValueError as error:
                raise ConfigurationError(f"broker_url of the Celery app: {error}") from None


def _hide_addresses(conf: Any) -> None:
    """Hide the passwords of our addresses, which Celery and Flower would show to who asks."""
    for name in _ADDRESSES:
        if isinstance(value := conf.get(name), str):
            conf[name] = SecretStr(value)


def _check(conf: Any) -> None:
    if not _JSON & {str(one).lower() for one in conf.accept_content or ()}:
        msg = "accept_content of the Celery app has no 'json', which steps are sent as: add it"
        raise ConfigurationError(msg)
    if conf.task_protocol != 2:  # noqa: PLR2004 - Celery's number
        msg = "task_protocol of the Celery app is not 2, and messages of steps are: leave it out"
        raise ConfigurationError(msg)
    if conf.task_always_eager:
        log.warning(
            "task_always_eager runs tasks where they are sent, and never steps: these wait for a"
            " worker. In tests use stepfleet.worker.testing"
        )


def _broker(app: Celery, named: str | None) -> str:
    """Return the app's broker as Stepfleet writes it; `named` replaces what it cannot read."""
    url = app.conf.broker_write_url
    url = ";".join(url) if isinstance(url, list | tuple) else url
    if url is None:
        return str(app.connection_for_write().as_uri(include_password=True))
    if not url.startswith(("sentinel", "redis+socket://")):
        return str(url)
    if url.startswith("redis+socket://"):
        return "unix://" + url.removeprefix("redis+socket://").replace("virtual_host=", "db=")
    if named is None:
        msg = (
            "the Celery app's broker is behind Sentinels: name them to install() and Fleet() as"
            " broker_url='sentinel://HOST:PORT,HOST:PORT/SERVICE/0', or set stepfleet_broker_url"
            " in the app's configuration"
        )
        raise ConfigurationError(msg)
    return named
