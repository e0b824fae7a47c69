import pytest

from stepfleet.orchestrator import ConfigurationError
from stepfleet.orchestrator.redis_client.urls import host_port, is_cluster, parse_cluster
from stepfleet.orchestrator.settings.settings import load_settings


def test_an_address_names_some_nodes_of_a_cluster() -> None:
    parsed = parse_cluster("redis+cluster://h1:7000,h2,[::1]:7002,h1:7000")
    assert parsed.nodes == (("h1", 7000), ("h2", 6379), ("::1", 7002))
    assert parsed.tls is None
    assert parsed.location == "cluster h1:7000, h2:6379, [::1]:7002"


def test_credentials_and_tls_hold_for_all_nodes() -> None:
    parsed = parse_cluster(
        "rediss+cluster://us%40er:p%3Aw@h1:7000,h2:7000/0?ssl_ca_certs=/ca.pem&ssl_check_hostname=no"
    )
    assert (parsed.username, parsed.password) == ("us@er", "p:w")
    assert parsed.tls == {"ssl_ca_certs": "/ca.pem", "ssl_check_hostname": False}
    assert parse_cluster("rediss+cluster://h").tls == {}
    assert "p:w" not in repr(parsed)
    assert "p:w" not in parsed.location


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis+cluster://h1:7000/1", "no databases but 0"),
        ("redis+cluster://:se:cr:et@h1:x", "must be HOST:PORT"),
        ("redis+cluster://", "must be HOST:PORT"),
        ("redis+cluster://h1,,h2", "must be HOST:PORT"),
        ("redis+cluster://h1?ssl_ca_certs=/ca.pem", r"begin with rediss\+cluster://"),
        ("rediss+cluster://h1?colour=red", "unknown option"),
        ("rediss+cluster://h1?ssl_check_hostname=perhaps", "neither true nor false"),
    ],
)
def test_an_unusable_address_says_why_and_repeats_nothing_of_it(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as raised:
        parse_cluster(url)
    assert "se:cr:et" not in str(raised.value)
    with pytest.raises(ConfigurationError, match="redis_url"):
        load_settings(redis_url=url)


def test_only_the_two_schemes_are_a_clusters() -> None:
    assert is_cluster("redis+cluster://h")
    assert is_cluster("rediss+cluster://h")
    assert not is_cluster("redis://h")
    assert not is_cluster("sentinel://h/s")


def test_a_places_text_can_be_read_back() -> None:
    for place in (("h", 1), ("::1", 2)):
        assert parse_cluster(f"redis+cluster://{host_port(place)}").nodes == (place,)


def test_a_cluster_needs_a_broker_beside_it() -> None:
    alone = load_settings(redis_url="redis+cluster://h1:7000", broker_url=None)
    with pytest.raises(ConfigurationError, match="set STEPFLEET_BROKER_URL to one Redis"):
        _ = alone.broker
    with pytest.raises(ConfigurationError, match=r"broker_url.*cannot carry Celery's messages"):
        load_settings(redis_url="redis://h", broker_url="redis+cluster://h1:7000")


def test_with_a_cluster_the_next_task_is_published_behind_the_commit() -> None:
    beside = {"redis_url": "redis+cluster://h1:7000", "broker_url": "redis://h1:7000/0"}
    assert not load_settings(**beside).enqueues_in_script
    with pytest.raises(ConfigurationError, match="enqueue='script' needs"):
        _ = load_settings(**beside, enqueue="script").enqueues_in_script
