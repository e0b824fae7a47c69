"""The keeper's HTTP server: what it answers, and what it refuses."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping

import pytest
from support.deadlines import until

from stepfleet.orchestrator.errors import ConfigurationError, StoreError
from stepfleet.worker.runtime import small_server
from stepfleet.worker.runtime.small_server import MOST_AT_ONCE, HttpPage, SmallServer, json_page

Place = tuple[str, int]


class Pages:
    """Counts how often its pages are made; `slow` ones wait for `go`."""

    def __init__(self) -> None:
        self.made: Counter[str] = Counter()
        self.begun, self.go = asyncio.Event(), asyncio.Event()

    async def counted(self, query: Mapping[str, str]) -> HttpPage:
        self.made["counted"] += 1
        return json_page({"times": self.made["counted"], **query})

    async def slow(self, _: Mapping[str, str]) -> HttpPage:
        self.made["slow"] += 1
        self.begun.set()
        await self.go.wait()
        return json_page({"slow": True})

    async def wrong(self, _: Mapping[str, str]) -> HttpPage:
        raise ConfigurationError("no queue has that name")

    async def away(self, _: Mapping[str, str]) -> HttpPage:
        raise StoreError("Redis is away")

    async def broken(self, _: Mapping[str, str]) -> HttpPage:
        raise KeyError("secret")


@pytest.fixture
def pages() -> Pages:
    return Pages()


@pytest.fixture
async def place(pages: Pages) -> AsyncIterator[Place]:
    kept = {f"/{name}": getattr(pages, name) for name in ("counted", "slow", "wrong", "away")}
    server = SmallServer({**kept, "/broken": pages.broken}, {"/live": pages.counted})
    async with server.serve("127.0.0.1", 0) as address:
        host, _, port = address.removeprefix("http://").rpartition(":")
        yield host, int(port)


async def sent(place: Place, request: bytes) -> str:
    reader, writer = await asyncio.open_connection(*place)
    writer.write(request)
    answer = await reader.read()
    await closed(writer)
    return answer.decode()


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def got(place: Place, path: str) -> tuple[int, str]:
    answer = await sent(place, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    head, _, body = answer.partition("\r\n\r\n")
    assert f"Content-Length: {len(body)}" in head
    return int(head.split(" ")[1]), body


async def test_pages_are_answered_anew_after_a_second_by_their_query(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPS-03: scrapers cost no more than one read a second."""
    assert await got(place, "/counted") == (200, '{"times":1}')
    assert await got(place, "/counted") == (200, '{"times":1}')
    assert await got(place, "/counted?queue=gpu") == (200, '{"times":2,"queue":"gpu"}')
    monkeypatch.setattr(small_server, "KEPT_SECONDS", 0.0)
    assert await got(place, "/counted") == (200, '{"times":3}')


async def test_a_live_page_is_never_kept(place: Place) -> None:
    assert [(await got(place, "/live"))[1] for _ in range(2)] == ['{"times":1}', '{"times":2}']


async def test_those_who_ask_together_share_one_answer(place: Place, pages: Pages) -> None:
    asking = [asyncio.create_task(got(place, "/slow")) for _ in range(3)]
    await pages.begun.wait()
    pages.go.set()
    assert {await one for one in asking} == {(200, '{"slow":true}')}
    assert pages.made["slow"] == 1


async def test_errors_are_worded_and_none_of_ours_is_shown(place: Place) -> None:
    assert await got(place, "/wrong") == (400, '{"error":"no queue has that name"}')
    assert await got(place, "/away") == (503, '{"error":"Redis is away"}')
    assert await got(place, "/broken") == (500, '{"error":"the log says why"}')
    status, body = await got(place, "/else")
    assert (status, "/counted" in body) == (404, True)


async def test_what_takes_too_long_is_given_up(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_server, "ANSWER_SECONDS", 0.01)
    status, body = await got(place, "/slow")
    assert (status, body) == (503, '{"error":"no answer within 0.01 s"}')


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"POST /counted HTTP/1.1\r\n\r\n", 405),
        (b"GET\r\n\r\n", 404),
        (b"\xff\x00\r\n\r\n", 405),
        (b"GET http://[ HTTP/1.1\r\n\r\n", 400),
        (b"GET /counted?" + b"&".join([b"a=1"] * 20) + b" HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 5_000, 431),
    ],
)
async def test_other_requests_are_refused(place: Place, request_: bytes, status: int) -> None:
    assert (await sent(place, request_)).startswith(f"HTTP/1.1 {status} ")


async def no_more(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Wait until the server has dropped a connection."""
    with contextlib.suppress(ConnectionError):  # it was reset
        async with asyncio.timeout(10):
            assert await reader.read() == b""
    await closed(writer)


async def until_all(pages: Pages, many: int) -> None:
    async def are_asked() -> bool:
        return pages.made["slow"] == many

    await until(are_asked, what="all requests")


async def test_few_are_served_at_once_and_silent_ones_are_dropped(
    place: Place, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPS-03: somebody who opens connections and says nothing keeps nobody out."""
    monkeypatch.setattr(small_server, "MOST_OPEN", 20)
    silent = [await asyncio.open_connection(*place) for _ in range(40)]
    assert (await got(place, "/live"))[0] == (await got(place, "/counted"))[0] == 200
    for reader, writer in silent[:20]:  # dropped for those that came after them
        await no_more(reader, writer)
    monkeypatch.setattr(small_server, "READ_SECONDS", 0.01)
    late = await asyncio.open_connection(*place)
    await no_more(*late)
    for _, writer in silent[20:]:
        await closed(writer)
    asking = [asyncio.create_task(got(place, f"/slow?a={n}")) for n in range(MOST_AT_ONCE)]
    await pages.begun.wait()
    await until_all(pages, MOST_AT_ONCE)
    assert (await got(place, "/counted"))[0] == 503
    assert (await got(place, "/live"))[0] == 200
    pages.go.set()
    assert {status for status, _ in await asyncio.gather(*asking)} == {200}


async def test_a_port_that_is_taken_is_named(place: Place) -> None:
    with pytest.raises(ConfigurationError, match=f"{place[1]}.*--port"):
        async with SmallServer({}, {}).serve(*place):
            pass
