import pytest
from yarl import URL

from stepfleet.worker.models.connections import proxy_for

OPENAI = URL("https://api.openai.com/v1")


@pytest.mark.parametrize(
    ("proxies", "proxy"),
    [
        ({}, None),
        ({"http": "http://proxy:1"}, None),
        ({"https": "http://proxy:1"}, "http://proxy:1"),
        ({"https": "proxy:1"}, "http://proxy:1"),
        ({"all": "http://proxy:1"}, "http://proxy:1"),
        ({"all": "http://all:1", "https": "http://own:1"}, "http://own:1"),
        ({"https": "http://proxy:1", "no": "*"}, None),
        ({"https": "http://proxy:1", "no": "example.com, openai.com"}, None),
        ({"https": "http://proxy:1", "no": ".openai.com"}, None),
        ({"https": "http://proxy:1", "no": "example.com"}, "http://proxy:1"),
    ],
)
def test_the_way_follows_the_environments_rules(proxies: dict[str, str], proxy: str | None) -> None:
    assert proxy_for(OPENAI, proxies) == proxy


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
def test_this_machine_is_never_reached_through_a_proxy(host: str) -> None:
    assert proxy_for(URL(f"http://{host}:1/v1"), {"all": "http://proxy:1"}) is None
