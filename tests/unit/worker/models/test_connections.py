import asyncio
import socket
import struct

import aiohttp
import orjson
import pytest
from support.servers.raw_model_server import (
    RawModelServer,
    Script,
    completion,
    completion_body,
    raw,
)
from yarl import URL

from stepfleet.worker.models import connections as module
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
            await response.content.read()
        assert len(server.received) == CALLS, "none was sent twice"
    await connections.aclose()


async def resets(writer: asyncio.StreamWriter) -> None:
    """End the connection as a load balancer does that has forgotten it."""
    ended = writer.get_extra_info("socket")
    ended.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()


ENDS = {"closed": raw(b""), "reset": resets}


@pytest.mark.parametrize("limit", [0, 1])
@pytest.mark.parametrize("how", ENDS)
async def test_a_kept_connection_that_ends_with_its_next_request_costs_no_call(
    how: str, limit: int
) -> None:
    """Others that are kept may have ended, too: the call goes over a new one."""
    connections = Connections(limit)
    async with RawModelServer().running() as server:
        url = f"{server.base_url}/chat/completions"
        server.answers(completion(), completion(), ENDS[how], completion())
        first = await asyncio.gather(*(connections.post(url, {}, b"{}") for _ in range(2 - limit)))
        for response in first:
            await response.content.read()
        if limit:
            await (await connections.post(url, {}, b"{}")).content.read()
        response = await connections.post(url, {}, b"{}")
        assert orjson.loads(await response.content.read())["model"], "it is answered"
        assert len(server.received) == 4
    await connections.aclose()


@pytest.mark.parametrize(
    ("first", "end", "seconds"),
    [
        ((), raw(b""), 1e9),  # a new connection: the server had the request
        ((completion(),), raw(b""), 0.0),  # it has worked on it for longer
        ((completion(),), raw(b"HTTP/1.1 200 OK\r\nContent-"), 1e9),  # it has begun to answer
    ],
)
async def test_a_call_that_a_server_may_have_worked_on_is_not_sent_again(
    monkeypatch: pytest.MonkeyPatch, first: tuple[Script, ...], end: Script, seconds: float
) -> None:
    monkeypatch.setattr(module, "STALE_SECONDS", seconds)
    connections = Connections()
    async with RawModelServer().running() as server:
        server.answers(*first, end, completion())
        for _ in first:
            await (await connections.post(f"{server.base_url}/x", {}, b"{}")).content.read()
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await connections.post(f"{server.base_url}/x", {}, b"{}")
        assert len(server.received) == len(first) + 1
    await connections.aclose()


async def test_answers_before_the_answer_are_passed_over() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    connections = Connections()
    async with RawModelServer().running() as server:
        server.answers(raw(interim + answer))
        response = await connections.post(f"{server.base_url}/x", {}, b"{}")
        assert (response.status, await response.content.read()) == (200, b"{}")
    await connections.aclose()


async def test_a_connection_with_half_a_request_in_it_serves_no_other_call() -> None:
    """The server has answered before it had read all, and keeps the connection open."""
    begun: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun.append(writer)
        head = await reader.readuntil(b"\r\n\r\n")
        code = b"413 No" if b"x-large" in head else b"200 Yes"
        writer.write(b"HTTP/1.1 %s\r\ncontent-length: 0\r\n\r\n" % code)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1024)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x"
    connections = Connections()
    refused = await connections.post(url, {"x-large": "1"}, bytes(50_000_000))
    taken = await asyncio.wait_for(connections.post(url, {}, b"{}"), 30)
    assert (refused.status, taken.status, len(begun)) == (413, 200, 2)
    await connections.aclose()
    for writer in begun:
        writer.close()
    server.close()


@pytest.mark.parametrize("sign", ["\r", "\n", "\0", "\x0b", "\x7f"])
async def test_a_value_cannot_add_a_header(sign: str) -> None:
    connections = Connections()
    async with RawModelServer().running() as server:
        with pytest.raises(ValueError, match="line break"):
            await connections.post(f"{server.base_url}/x", {"x-key": f"k{sign}a: b"}, b"{}")
        assert server.received == []
    await connections.aclose()


async def test_a_proxy_gets_its_credentials_with_each_request_and_a_server_none() -> None:
    async with RawModelServer().running() as server:
        address = server.base_url.removesuffix("/v1").replace("//", "//user:p%40ss@")
        connections = Connections(proxies={"http": address})
        server.answers(completion())
        for url in ("http://models.test/v1/x", "http://models.test/v1/x", f"{server.base_url}/x"):
            response = await connections.post(url, {"authorization": "Bearer k"}, b"{}")
            await response.content.read()
        given = [one.headers.get("proxy-authorization") for one in server.received]
        assert given == ["Basic dXNlcjpwQHNz", "Basic dXNlcjpwQHNz", None]
        assert [one.headers["authorization"] for one in server.received] == ["Bearer k"] * 3
    await connections.aclose()


async def test_headers_of_a_service_replace_the_common_ones_in_any_case() -> None:
    connections = Connections()
    async with RawModelServer().running() as server:
        server.answers(completion())
        await connections.post(f"{server.base_url}/x", {"Accept": "*/*"}, b"{}")
        sent = server.received[0].headers
        assert (sent["accept"], sent["user-agent"], sent["content-length"]) == (
            "*/*",
            "stepfleet",
            "2",
        )
    await connections.aclose()


async def test_a_connection_whose_answer_was_not_read_is_not_used_again() -> None:
    connections = Connections(1)
    async with RawModelServer().running() as server:
        server.answers(raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}"), completion())
        response = await connections.post(f"{server.base_url}/x", {}, b"{}")
        response.release()
        response = await connections.post(f"{server.base_url}/x", {}, b"{}")
        assert orjson.loads(await response.content.read())["model"]
        assert server.connections == 2
    await connections.aclose()
