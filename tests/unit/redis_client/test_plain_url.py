"""Addresses of Redis and of brokers: all clients read them alike, and no error quotes one."""

# mypy: allow-untyped-calls, implicit-reexport, disable-error-code="attr-defined"

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu import Connection
from pydantic import SecretStr
from redis.asyncio import ConnectionPool

from stepfleet.orchestrator import ConfigurationError
from stepfleet.orchestrator.agents.recall import RedisNotes
from stepfleet.orchestrator.redis_client.urls import usable_broker, usable_url
from stepfleet.orchestrator.settings.settings import Settings, load_settings
from stepfleet.orchestrator.store.dispatch import celery_app

SPECIAL = [f":xylo{sign}phone@h/0" for sign in "#?/"] + [
    ":xy/lo@phone@h",
    "user:xylo/phone@h",
    ":xy@lo#phone@h",
    ":xylo[phone@h:x",
    ":xylo;ph#one@h",
]


def no_part_of_the_password(text: str) -> bool:
    return not any(part in text for part in ("xy", "lo@", "phone", "one@"))


@pytest.mark.parametrize("field", ["redis_url", "broker_url", "events_url"])
@pytest.mark.parametrize("scheme", ["redis", "unix", "REDISS"])
@pytest.mark.parametrize("rest", SPECIAL)
def test_a_password_that_is_not_encoded_is_refused_and_no_part_of_it_shown(
    field: str, scheme: str, rest: str
) -> None:
    """CONF-04"""
    with pytest.raises(ConfigurationError, match="percent-encode") as caught:
        load_settings(**{"redis_url": "redis://h", field: f"{scheme}://{rest}"})
    assert no_part_of_the_password(str(caught.value))
    assert f"'{field}'" in str(caught.value)


@pytest.mark.parametrize("url", ["amqp://u:xylo#phone@h//", "amqp://u:xy;lo@h//", "sqs://k:xy/lo@"])
def test_so_is_that_of_a_broker_that_is_no_redis(url: str) -> None:
    with pytest.raises(ConfigurationError, match="percent-encode") as caught:
        load_settings(redis_url="redis://h", broker_url=url)
    assert no_part_of_the_password(str(caught.value))


def test_settings_that_are_made_directly_show_no_address_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="percent-encode") as caught:
        Settings(redis_url=SecretStr("redis://:xylo#phone@h"))
    assert no_part_of_the_password(str(caught.value))
    monkeypatch.setenv("STEPFLEET_BROKER_URL", "redis://:xylo#phone@h")
    with pytest.raises(ValueError, match="percent-encode") as caught:
        Settings()
    assert no_part_of_the_password(str(caught.value))


def test_a_memory_in_redis_refuses_an_unusable_address_at_once() -> None:
    with pytest.raises(ConfigurationError, match="percent-encode") as caught:
        RedisNotes("redis://:xylo#phone@h")
    assert no_part_of_the_password(str(caught.value))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "must begin with"),
        ("h:6379", "must begin with"),
        ("http://h", "must begin with"),
        ("redis-batch://h", "must begin with"),
        ("redis://h/abc", "the database must be a number"),
        ("redis://h/1/2", "the database must be a number"),
        ("redis://h?db=x", "the database must be a number"),
        ("redis://h/1?db=2", "two databases"),
        ("redis://h:99999", "port above 65535"),
        ("redis://h:many/0", "no HOST:PORT"),
        ("redis://h/0#1", "# is %23"),
        ("redis://h/0?foo=bar", "an unknown option; there are db, protocol, ssl_ca_certs"),
        ("redis://h/0?socket_timeout=3", "an unknown option"),
        ("redis://h/0?protocol=3", "leave 'protocol' out"),
        ("redis://h/0?ssl_cert_reqs=none", r"ssl_cert_reqs is for TLS: begin with rediss://"),
        (
            "rediss://h/0?ssl_cert_reqs=maybe",
            "ssl_cert_reqs is not one of required, optional, none",
        ),
        ("rediss://h/0?ssl_check_hostname=maybe", "neither true nor false"),
        ("sentinels://h/m?ssl_cert_reqs=maybe", "ssl_cert_reqs is not one of"),
        ("unix://h/tmp/redis.sock", "names no file"),
        ("unix:///tmp/redis.sock?db=x", "the database must be a number"),
    ],
)
def test_a_wrong_address_is_refused_with_the_field_and_the_fix(url: str, said: str) -> None:
    """CONF-04"""
    with pytest.raises(ConfigurationError, match=said) as caught:
        load_settings(redis_url=url)
    assert "'redis_url'" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("redis://h", "redis://h"),
        (" redis://h:1/2/\n", "redis://h:1/2"),
        ("REDIS://h?db=3", "redis://h/3"),
        ("redis://h/0?protocol=2", "redis://h/0"),
        ("redis://[::1]:7/0", "redis://[::1]:7/0"),
        ("redis://:p@ss@h/0", "redis://:p%40ss@h/0"),
        ("redis://u:p;s%25s@h/0", "redis://u:p%3Bs%25s@h/0"),
        ("rediss://h?ssl_cert_reqs=CERT_NONE", "rediss://h?ssl_cert_reqs=none"),
        ("rediss://h?ssl_check_hostname=No", "rediss://h?ssl_check_hostname=false"),
        ("unix:///tmp/a@b.sock?db=3", "unix:///tmp/a@b.sock?db=3"),
    ],
)
def test_what_clients_read_differently_is_written_in_one_form(given: str, written: str) -> None:
    assert usable_url(given) == written


def test_addresses_of_kombu_and_of_other_brokers_stay_as_they_are() -> None:
    for url in (
        "redis-batch://h/1",
        "redis+socket:///tmp/s?virtual_host=3",
        "amqp://u:p%23@h:5672//",
        "amqp://u:p@h1;amqp://u:p@h2",
        "mongodb://h1:1,h2:2/db",
        "memory://",
    ):
        assert usable_broker(url) == url


def test_a_broker_of_no_known_transport_is_refused() -> None:
    settings = load_settings(redis_url="redis://h", broker_url="foo://h")
    with pytest.raises(ConfigurationError, match="kombu does not know the transport"):
        celery_app(settings)


@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
    st.integers(0, 15),
)
def test_encoded_credentials_are_read_alike_by_both_clients(
    user: str, password: str, db: int
) -> None:
    url = f"redis://{quote(user, safe='')}:{quote(password, safe='')}@h:7/{db}"
    settings = load_settings(redis_url=url)
    store = ConnectionPool.from_url(settings.store).connection_kwargs
    broker = Connection(celery_app(settings).conf.broker_url)
    assert (store.get("username") or "", store["password"]) == (user, password)
    assert (broker.userid or "", broker.password) == (user, password)
    assert store["db"] == int(broker.virtual_host) == db
    assert store["host"] == broker.hostname == "h"


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=4, max_size=30))
def test_no_error_quotes_a_part_of_any_password(password: str) -> None:
    marked = f"Zq{password}qZ"
    for field in ("redis_url", "broker_url"):
        said = refusal(**{"redis_url": "redis://h", field: f"redis://:{marked}@h/0"})
        assert "Zq" not in said
        assert "qZ" not in said


def refusal(**settings: str) -> str:
    """Return what is said of settings; '' where they are usable."""
    try:
        load_settings(**settings)
    except ConfigurationError as error:
        return str(error)
    return ""
