"""Addresses behind Sentinel: what they mean, and what is said of wrong ones."""

import pytest

from stepfleet.orchestrator import ConfigurationError
from stepfleet.orchestrator.redis_client.sentinel import elected
from stepfleet.orchestrator.redis_client.urls import is_sentinel, parse_sentinel
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store.dispatch import client_app, kombu_conf, kombu_url
from stepfleet.orchestrator.store.store import place_of
from stepfleet.worker.engine.transport import batch_url

URL = "sentinel://us%40er:p%2Fw@h1:26380,[::1]:2,h3/my%20master/3"


def test_an_address_names_sentinels_service_database_and_credentials() -> None:
    url = parse_sentinel(URL)
    assert url.sentinels == (("h1", 26380), ("::1", 2), ("h3", 26379))
    assert (url.service, url.db) == ("my master", 3)
    assert (url.username, url.password) == ("us@er", "p/w")
    assert url.tls is None


def test_the_database_may_be_left_out() -> None:
    assert parse_sentinel("sentinel://h1/m").db == parse_sentinel("sentinel://h1/m/").db == 0


def test_sentinels_may_have_credentials_of_their_own() -> None:
    url = parse_sentinel("sentinel://h1/m?sentinel_username=u&sentinel_password=p%26q")
    assert (url.sentinel_username, url.sentinel_password) == ("u", "p&q")
    assert url.password is None


def test_tls_has_a_scheme_and_options_of_its_own() -> None:
    url = parse_sentinel("sentinels://h1/m?ssl_ca_certs=/ca.pem&ssl_check_hostname=false")
    assert url.tls == {"ssl_ca_certs": "/ca.pem", "ssl_check_hostname": False}
    conf = kombu_conf("sentinels://h1/m?ssl_ca_certs=/ca.pem")
    assert conf["broker_use_ssl"] == {"ssl_cert_reqs": "required", "ssl_ca_certs": "/ca.pem"}
    assert conf["broker_transport_options"]["sentinel_kwargs"]["ssl"] is True


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sentinel://h1", "names no service"),
        ("sentinel://h1:x/m", "a Sentinel must be HOST:PORT"),
        ("sentinel:///m", "a Sentinel must be HOST:PORT"),
        ("sentinel://h1/m/x", "the database must be a number"),
        ("sentinel://h1/m?foo=1", "unknown option"),
        ("sentinel://h1/m?ssl_ca_certs=x", "begin with sentinels://"),
        ("sentinels://h1/m?ssl_check_hostname=maybe", "neither true nor false"),
    ],
)
def test_a_wrong_address_is_refused_with_the_field_and_the_fix(url: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        load_settings(redis_url=url)
    assert "redis_url" in str(caught.value)
    with pytest.raises(ConfigurationError, match=said):
        load_settings(redis_url="redis://h/0", broker_url=url)


def test_a_password_that_was_not_quoted_is_not_repeated() -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_settings(redis_url="sentinel://user:top/secret@h1/m/0")
    assert "secret" not in str(caught.value)
    assert "top" not in str(caught.value)
    assert "p/w" not in repr(parse_sentinel(URL))


def test_people_see_the_place_without_credentials() -> None:
    assert place_of(URL) == "my master (Sentinel h1:26380, [::1]:2, h3:26379)"


def test_store_and_broker_are_one_redis_if_their_sentinels_service_and_database_are() -> None:
    url = "sentinel://:p@h1:1,h2:2/m/0"
    assert load_settings(redis_url=url).enqueues_in_script
    swapped = "sentinel://:p@h2:2,h1:1/m"
    assert load_settings(redis_url=url, broker_url=swapped).enqueues_in_script
    for other in ("sentinel://h1:1,h2:2/n/0", "sentinel://h1:1,h2:2/m/1", "redis://h1:1/0"):
        assert not load_settings(redis_url=url, broker_url=other).enqueues_in_script


def test_kombu_gets_every_sentinel_the_service_and_bounds() -> None:
    assert kombu_url("sentinel://:p%40@h1:1,h2:2/m/4") == (
        "sentinel://:p%40@h1:1/4;sentinel://:p%40@h2:2/4"
    )
    options = kombu_conf("sentinel://h1:1,h2:2/m")["broker_transport_options"]
    assert options["master_name"] == "m"
    assert options["socket_timeout"] > 0


def test_a_worker_names_the_service_and_has_the_sentinels_beside_it() -> None:
    assert batch_url("sentinel://u:p%40@h1,h2/my%20m/2") == "sentinel-batch://u:p%40@my%20m/2"
    with client_app(load_settings(redis_url="sentinel://h1:1,h2:2/m")) as app:
        assert app.conf.broker_transport_options["sentinels"] == [("h1", 1), ("h2", 2)]
        assert app.connection_for_write().transport_cls == "sentinel"


def test_other_brokers_keep_their_urls() -> None:
    assert kombu_url("amqp://h//") == batch_url("amqp://h//") == "amqp://h//"
    assert "socket_timeout" not in kombu_conf("amqp://h//")["broker_transport_options"]
    assert not is_sentinel("redis://sentinel:26379/0")


def test_the_newest_configuration_of_the_sentinels_counts() -> None:
    """One that was cut off from the others still names the former master."""
    old = {"ip": "a", "port": 1, "is_master": True, "config-epoch": 3}
    new = {"ip": "b", "port": 2, "is_master": True, "config-epoch": 4}
    assert elected([old, new, old]) == ("b", 2)
    assert elected([{**new, "is_odown": True}, old]) == ("a", 1)
    assert elected([{**new, "is_sdown": True}]) is None
    assert elected([]) is None
