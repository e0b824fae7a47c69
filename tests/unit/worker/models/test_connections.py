import orjson
import pytest
from support.servers.raw_model_server import RawModelServer, completion_body, raw
from yarl import URL

from stepfleet.worker.models.connections import Connections, proxy_for

CALLS = 30
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


async def test_a_kept_connection_that_the_server_closed_costs_no_call() -> None:
    """llama.cpp's server closes a connection behind a stream, which it said to keep."""
    body = orjson.dumps(completion_body())
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    connections = Connections()
    async with RawModelServer().running() as server:
        server.answers(raw(answer))
        for _ in range(CALLS):
            response = await connections.post(f"{server.base_url}/chat/completions", {}, b"{}")
            await response.read()
        assert len(server.received) == CALLS, "none was sent twice"
    await connections.aclose()
