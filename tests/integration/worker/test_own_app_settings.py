"""A fleet's settings on a user's own Celery app, and what of the app is refused, with the fix."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.worker import WorkController
from celery.worker.control import conf

from stepfleet.orchestrator import ConfigurationError, Fleet
from stepfleet.orchestrator.settings.own_app import app_settings
from stepfleet.worker import install

AGENTS = "from stepfleet.orchestrator import Agent\nclerk = Agent('clerk', model='openai:m')\n"
OWN = {"broker_url": "redis://localhost:6379/3"}


@pytest.fixture
def app(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "their_agents.py").write_text(AGENTS)
    with Celery("theirs", set_as_current=False) as app:
        yield app


def test_broker_store_and_prefix_are_those_of_the_app(app: Celery) -> None:
    install(app, agents="their_agents.py", queue="steps", grace=2.0)
    theirs = {"stepfleet_prefix": "agents:", "stepfleet_queue": "ignored"}
    options = {"broker_transport_options": {"global_keyprefix": "shop_"}}
    app.config_from_object({**OWN, **theirs, **options})
    found = app_settings(app)
    assert (found.store, found.broker) == (OWN["broker_url"], OWN["broker_url"])
    assert (found.prefix, found.queue_prefix) == ("agents:", "shop_")
    assert (found.queue, found.grace, found.transport) == ("steps", 2.0, "stock")
    assert found.enqueues_in_script
    assert app_settings(app, grace=3.0).grace == 3.0


def test_another_broker_needs_a_store_and_messages_are_published(app: Celery) -> None:
    app.conf.update(broker_url="amqp://guest@localhost//")
    with pytest.raises(ConfigurationError, match="STEPFLEET_REDIS_URL"):
        _ = app_settings(app).store
    assert not app_settings(app, redis_url="redis://localhost:6379/0").enqueues_in_script


def test_a_socket_is_the_same_redis_in_both_notations(app: Celery) -> None:
    app.conf.update(broker_url="redis+socket:///tmp/r.sock?virtual_host=2")
    found = app_settings(app)
    assert found.store == found.broker == "unix:///tmp/r.sock?db=2"


@pytest.mark.parametrize(
    ("conf", "named"),
    [
        ({"accept_content": ["pickle"]}, "accept_content"),
        ({"task_protocol": 1}, "task_protocol"),
        ({"broker_url": "sentinel://h:1;sentinel://i:1"}, "broker_url='sentinel://"),
        ({"stepfleet_prefix": "a b"}, "'prefix'"),
    ],
)
def test_an_app_that_cannot_carry_steps_is_refused(
    app: Celery, conf: dict[str, Any], named: str
) -> None:
    """CONF-04"""
    app.conf.update({**OWN, **conf})
    with pytest.raises(ConfigurationError, match=named):
        Fleet(app=app)


def test_an_eager_app_warns_that_steps_wait_for_a_worker(
    app: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    app.conf.update(**OWN, task_always_eager=True)
    app_settings(app)
    assert "never steps" in caplog.text


@pytest.mark.parametrize(
    ("conf", "named"),
    [
        ({"stepfleet_agents": "no_such_module"}, "no_such_module"),
        ({"worker_pool": "gevent"}, "gevent pool is not supported"),
    ],
)
def test_a_worker_that_cannot_do_steps_says_why_and_does_not_start(
    app: Celery, conf: dict[str, Any], named: str
) -> None:
    install(app, agents="their_agents.py")
    app.conf.update({**OWN, **conf})
    with pytest.raises(SystemExit, match=named):
        WorkController(app=app, queues="celery,stepfleet")


def test_passwords_of_addresses_are_not_shown_with_the_apps_configuration(app: Celery) -> None:
    """Celery's `inspect conf`, and Flower with it, show the configuration to who asks."""
    url = "redis://:k7-of-the-store@localhost:6379/4"
    app.conf.update(OWN)
    install(app, agents="their_agents.py", redis_url=url, events_url=url)
    for found in (app_settings(app), app_settings(app)):
        assert found.store == url
    shown = (conf(SimpleNamespace(app=app)), app.conf.humanize(with_defaults=False))
    assert "redis_url" in str(shown)
    assert "k7-of-the-store" not in str(shown)


@pytest.mark.parametrize(
    "url", ["redis://:xylo#phone@h/0", "redis://:xylo;phone@h/0", ["redis://h", "amqp://u:xy/lo@h"]]
)
def test_a_password_of_the_broker_that_celery_cannot_read_is_shown_by_nobody(
    app: Celery, url: str | list[str]
) -> None:
    install(app, agents="their_agents.py")
    app.conf.broker_url = url
    with pytest.raises(SystemExit, match=r"broker_url of the Celery app.*percent-encode") as caught:
        app.Worker(pool="solo")
    assert not any(part in str(caught.value) for part in ("xy", "lo@", "phone"))
