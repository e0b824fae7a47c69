import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpx
import orjson
import pytest
from support.deadlines import until, wait_until

from stepfleet.worker.testing.scenario import Fault, FaultKind, Faults, Latency, Planned, Reply
from stepfleet.worker.testing.server import ModelServer

TEXT = "a text that is long enough to be cut in the middle"


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with ModelServer(lambda _: Reply(TEXT, piece=5)) as running:
        yield running


def body(*, stream: bool = False, question: str = "hi") -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": "m", "messages": messages} | ({"stream": True} if stream else {})


def post(server: ModelServer, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/chat/completions", json=body(**fields), timeout=60)


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("rate_limited", 429, "rate_limit_exceeded"),
        ("server_error", 500, None),
        ("overloaded", 503, None),
        ("context_length_exceeded", 400, "context_length_exceeded"),
        ("content_filter", 400, "content_filter"),
        ("unauthorized", 401, "invalid_api_key"),
        ("forbidden", 403, None),
        ("not_found", 404, "model_not_found"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_has_its_status_and_code(
    server: ModelServer, kind: str, status: int, code: str | None, stream: bool
) -> None:
    server.fail(Fault(kind, message="sorry"))
    response = post(server, stream=stream)
    assert response.status_code == status
    assert response.json()["error"] == {**response.json()["error"], "code": code}
    assert response.json()["error"]["message"] == "sorry"
    assert server.requests[0].outcome == kind
    assert post(server).status_code == 200


def test_retry_after_is_sent_in_seconds(server: ModelServer) -> None:
    server.fail(Fault("rate_limited", retry_after=0.2))
    assert post(server).headers["retry-after"] == "0.2"


@pytest.mark.parametrize("stream", [False, True])
def test_a_reset_comes_before_the_first_byte(server: ModelServer, stream: bool) -> None:
    server.fail("reset")
    with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
        post(server, stream=stream)
    wait_until(lambda: [one.outcome for one in server.requests] == ["reset"], within=60)


@pytest.mark.parametrize("stream", [False, True])
def test_a_reset_in_the_body_leaves_headers_and_a_part(server: ModelServer, stream: bool) -> None:
    server.fail("reset_mid_body")
    url = urlsplit(server.url)
    # aiohttp's and httpx's clients forget what they have not passed on when a reset comes.
    connection = HTTPConnection("127.0.0.1", url.port, timeout=60)
    with contextlib.closing(connection):
        sent = orjson.dumps(body(stream=stream))
        connection.request("POST", f"{url.path}/chat/completions", sent)
        response = connection.getresponse()
        got: list[bytes] = []
        assert response.status == 200
        with pytest.raises(ConnectionResetError):
            _read_on(response, got)
    assert got[0].startswith(b"data: " if stream else b"{")
    assert b"[DONE]" not in b"".join(got)


def test_a_truncated_stream_ends_without_done(server: ModelServer) -> None:
    server.fail("truncated_stream")
    response = post(server, stream=True)
    assert response.status_code == 200
    assert '"a tex"' in response.text
    assert "[DONE]" not in response.text
    assert '"finish_reason":"stop"' not in response.text


def test_a_truncated_body_breaks_off(server: ModelServer) -> None:
    server.fail("truncated_stream")
    with pytest.raises(httpx.RemoteProtocolError):
        post(server)


@pytest.mark.parametrize("stream", [False, True])
def test_broken_json_comes_with_status_200(server: ModelServer, stream: bool) -> None:
    server.fail("broken_json")
    response = post(server, stream=stream)
    assert response.status_code == 200
    with pytest.raises(orjson.JSONDecodeError):
        orjson.loads(response.text.removeprefix("data: "))


@pytest.mark.parametrize("stream", [False, True])
def test_choices_can_be_empty_or_without_a_message(server: ModelServer, stream: bool) -> None:
    server.fail("empty_choices", attempt=1)
    server.fail("no_message", attempt=2)
    empty, bare = (
        orjson.loads(post(server, stream=stream).text.removeprefix("data: ").split("\n")[0])
        for _ in range(2)
    )
    assert empty["choices"] == []
    assert bare["choices"] == [{"index": 0, "finish_reason": "stop"}]


EVENTS = {
    "chat/completions": ('data: {"error":{"message":"oh"', 'data: {"error":{"message":"oh"'),
    "responses": ('event: error\ndata: {"type":"error"', "event: response.failed\n"),
    "messages": ('event: error\ndata: {"type":"error"', "event: error\n"),
    "models/m:streamGenerateContent": ('data: {"error":{"code":503', 'data: {"error":{"code":503'),
}


@pytest.mark.parametrize("path", EVENTS)
@pytest.mark.parametrize("kind", ["error_event", "failed"])
def test_a_stream_can_end_in_the_protocols_own_error_event(
    server: ModelServer, path: str, kind: str
) -> None:
    server.fail(Fault(kind, message="oh"))
    sent = body(stream=True)
    if path == "responses":
        sent["input"] = sent.pop("messages")
    elif path == "messages":
        sent["max_tokens"] = 9
    elif path != "chat/completions":
        sent = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
    response = httpx.post(f"{server.url}/{path}", json=sent, timeout=60)
    assert response.status_code == 200
    *before, last = response.text.strip().split("\n\n")
    assert "a tex" in "".join(before)
    assert last.startswith(EVENTS[path][kind == "failed"])
    assert '"oh"' in last


def test_usage_can_be_missing_from_a_right_answer(server: ModelServer) -> None:
    server.fail("missing_usage")
    without, with_usage = post(server).json(), post(server).json()
    assert "usage" not in without
    assert with_usage.pop("usage")
    assert without == with_usage


async def test_a_hanging_request_lasts_until_the_client_goes(server: ModelServer) -> None:
    server.fail("hang")
    async with aiohttp.ClientSession() as session:
        asked = asyncio.ensure_future(session.post(f"{server.url}/chat/completions", json=body()))
        await _so(lambda: server.log.in_flight == 1)
        assert not asked.done()
        asked.cancel()
        await _so(lambda: server.log.outcomes == {"hang": 1})
    assert server.log.in_flight == 0


async def test_a_client_that_goes_while_the_model_thinks_is_seen(server: ModelServer) -> None:
    server.follow(lambda _: Reply("late", latency=60))
    async with aiohttp.ClientSession() as session:
        asked = asyncio.ensure_future(session.post(f"{server.url}/chat/completions", json=body()))
        await _so(lambda: server.log.in_flight == 1)
        asked.cancel()
        await _so(lambda: server.log.outcomes == {"disconnected": 1})
    assert server.log.in_flight == 0


async def test_open_requests_end_with_the_server() -> None:
    async with aiohttp.ClientSession() as session:
        with ModelServer(lambda _: Fault("hang")) as server:
            asked = asyncio.ensure_future(
                session.post(f"{server.url}/chat/completions", json=body())
            )
            await _so(lambda: server.log.in_flight == 1)
        with pytest.raises(aiohttp.ClientError):
            await asked


def test_faults_hit_only_the_planned_place(server: ModelServer) -> None:
    server.fail(Fault("overloaded"), key="other", turn=1, attempt=2)
    assert [post(server).status_code for _ in range(2)] == [200, 200]
    assert [post(server, question="other").status_code for _ in range(3)] == [200, 503, 200]
    assert server.count("other", 1) == 3


def test_a_scripted_fault_fails_every_attempt(server: ModelServer) -> None:
    """LLM-07: errors."""
    server.script("hi", Fault("overloaded"))
    assert [post(server).status_code for _ in range(2)] == [503, 503]


def test_a_fault_after_a_turn_waits_for_that_turn(server: ModelServer) -> None:
    faults = Faults(planned=(Planned(Fault("server_error"), turn=2, attempt=None),))
    assert faults.decide("k", 1, 1) is None
    assert faults.decide("k", 2, 9) == Fault("server_error")


def test_a_rate_hits_its_share_and_always_the_same_requests() -> None:
    faults = Faults(rate=0.05, seed=7, retry_after=0.1)
    first = [faults.decide(f"question {i}", 1, 1) for i in range(20_000)]
    again = [faults.decide(f"question {i}", 1, 1) for i in reversed(range(20_000))]
    assert first == again[::-1]
    hit = [one for one in first if one]
    assert 0.04 < len(hit) / 20_000 < 0.06
    kinds = Counter(str(one.kind) for one in hit)
    assert set(kinds) == {str(kind) for kind in Faults().kinds}
    assert all((one.kind == "rate_limited") == (one.retry_after == 0.1) for one in hit)
    other = Faults(rate=0.05, seed=8, retry_after=0.1)
    assert [other.decide(f"question {i}", 1, 1) for i in range(20_000)] != first


def test_kinds_are_weighed() -> None:
    faults = Faults(rate=1, kinds={"reset": 3, "overloaded": 1, "hang": 0})
    kinds = Counter(str(one.kind) for i in range(4000) if (one := faults.decide("k", i, 1)))
    assert set(kinds) == {"reset", "overloaded"}
    assert 0.7 < kinds["reset"] / 4000 < 0.8


def test_attempts_after_the_first_ones_never_fail_by_rate() -> None:
    faults = Faults(rate=1, first_attempts=2)
    assert [bool(faults.decide("k", 1, attempt)) for attempt in (1, 2, 3)] == [True, True, False]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Fault("nonsense"), "one of: rate_limited"),
        (lambda: Faults(rate=2), "from 0 to 1"),
        (lambda: Faults(kinds={}), "a weight above 0"),
        (lambda: Faults(kinds={"reset": -1}), "a weight above 0"),
        (lambda: Latency(-1), "not a latency"),
        (lambda: Latency(2, 1), "low <= high"),
        (lambda: Latency.parse("soon"), "write 0.05"),
        (lambda: Reply("x", piece=0), "at least 1 character"),
    ],
)
def test_what_cannot_be_is_refused_with_the_fix(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_latencies_follow_their_form_and_are_repeatable() -> None:
    even, tailed = Latency.parse("0.2-1.5"), Latency.parse("1.0~0.5")
    assert Latency.parse("0.05").seconds("any") == 0.05
    drawn = [even.seconds(i) for i in range(5000)]
    assert 0.2 <= min(drawn) < 0.21
    assert 1.49 < max(drawn) <= 1.5
    sorted_tail = sorted(tailed.seconds(i) for i in range(5000))
    assert 0.95 < sorted_tail[2500] < 1.05
    assert sorted_tail[-1] > 3
    assert drawn == [even.seconds(i) for i in range(5000)]


def test_an_answer_waits_for_its_latency() -> None:
    """LLM-07: delays."""
    with ModelServer(lambda _: "late", latency=0.2) as server:
        post(server)
        request = server.requests[0]
        assert request.answered is not None
        assert 0.2 <= request.answered - request.received < 60


async def test_a_stream_pauses_between_its_events() -> None:
    """One whose pauses nobody outwaits shows its beginning, and a quick one takes them all."""
    with ModelServer(lambda _: Reply("word " * 4, piece=5, pause=600)) as server:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{server.url}/chat/completions", json=body(stream=True)) as response,
        ):
            assert (await response.content.readany()).startswith(b"data: ")
    with ModelServer(lambda _: Reply("word " * 4, piece=5, pause=0.05)) as server:
        begun = time.monotonic()
        parts = await asyncio.to_thread(post, server, stream=True)
        assert time.monotonic() - begun >= 0.05 * 4
        assert parts.text.count("word ") == 4
        assert "[DONE]" in parts.text


def test_every_kind_is_among_the_kinds_tested_here() -> None:
    tested = {
        "rate_limited", "server_error", "overloaded", "context_length_exceeded", "content_filter",
        "unauthorized", "forbidden", "not_found", "reset", "reset_mid_body", "truncated_stream",
        "error_event", "failed", "refusal", "broken_json", "empty_choices", "no_message",
        "missing_usage", "hang",
    }  # fmt: skip
    assert tested == {str(kind) for kind in FaultKind}


def _read_on(response: HTTPResponse, got: list[bytes]) -> None:
    while chunk := response.read1():
        got.append(chunk)


async def _so(check: Callable[[], bool]) -> None:
    async def asked() -> bool:
        return check()

    await until(asked, within=60)
