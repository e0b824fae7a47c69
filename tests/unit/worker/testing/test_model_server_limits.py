"""The limits that the model server enforces, as its log and its answers show them."""

import contextlib
from collections.abc import Iterator
from http.client import HTTPConnection
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson
import pytest
from support.deadlines import wait_until

from stepfleet.worker.testing.rate_limits import RateLimit, RateLimiter
from stepfleet.worker.testing.scenario import Reply, Usage
from stepfleet.worker.testing.server import ModelServer
from stepfleet.worker.testing.service import RequestLog

SPENT = Usage(prompt_tokens=90, completion_tokens=10)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"model": "m", "input": "hi"},
    "/v1/messages": {
        "model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/models/m:generateContent": {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
    "/model/m/converse": {"messages": [{"role": "user", "content": [{"text": "hi"}]}]},
}  # fmt: skip


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with ModelServer(lambda _: Reply("x", usage=SPENT)) as running:
        yield running


def post(server: ModelServer, path: str = "/v1/chat/completions", key: str = "k") -> httpx.Response:
    root = server.url.removesuffix("/v1")
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(root + path, json=BODIES[path], headers=headers, timeout=60)


@pytest.mark.parametrize(
    ("limit", "each"),
    [
        (RateLimit(requests=600), 1),
        (RateLimit(tokens=60_000), 100),
        (RateLimit(input_tokens=54_000, requests=9_000), 90),
        (RateLimit(output_tokens=6_000), 10),
        (RateLimit(tokens=1_000, burst=0.5), 100),
    ],
)
def test_a_bucket_admits_its_rate_and_no_more_than_its_burst_beyond(
    limit: RateLimit, each: int
) -> None:
    limiter = RateLimiter({"": limit})
    kind, rate = list(limit.rates.items())[-1]
    admitted: list[float] = []
    for tick in range(30_000):  # 100 requests each second, 5 minutes
        admission = limiter.admit("m", "k", SPENT, tick / 100)
        assert admission is not None
        if not admission.refused:
            admitted.append(tick / 100)
            limiter.release("m", "k")
        else:
            assert admission.refused == kind
            assert 0 < admission.wait <= 60 * max(each, 1) / rate
    highest = rate / each * (60 + limit.burst) / 60 + 1
    counts = [0, *accumulate(1 for _ in admitted)]
    first = 0
    for last, moment in enumerate(admitted):
        while admitted[first] <= moment - 60:
            first += 1
        assert counts[last + 1] - counts[first] <= highest
    assert len(admitted) * each >= 0.99 * rate * 5


@pytest.mark.parametrize(
    "limit", [RateLimit(tokens=7_000, requests=70), RateLimit(tokens=1_000, burst=0.5)]
)
def test_a_request_that_waits_as_it_was_told_is_admitted(limit: RateLimit) -> None:
    limiter, now = RateLimiter({"": limit}), 0.0
    for _ in range(200):
        admission = limiter.admit("m", "k", SPENT, now)
        assert admission is not None
        if admission.refused:
            now += admission.wait
            again = limiter.admit("m", "k", SPENT, now)
            assert again is not None
            assert not again.refused


def test_models_and_keys_have_buckets_of_their_own(server: ModelServer) -> None:
    server.limit(RateLimit(requests=1))
    assert [post(server, key=key).status_code for key in ("a", "a", "b")] == [200, 429, 200]
    server.limit(RateLimit(requests=60_000), "m")
    assert [post(server, key="c").status_code for _ in range(3)] == [200] * 3
    server.limit(None, "m")
    server.limit(None)
    assert post(server, key="a").status_code == 200


@pytest.mark.parametrize("path", BODIES)
def test_a_429_has_the_providers_own_hints(server: ModelServer, path: str) -> None:
    server.limit(RateLimit(requests=6, tokens=6_000))
    first, second = post(server, path), post(server, path)
    assert (first.status_code, second.status_code) == (200, 429)
    said, error = second.headers, second.json().get("error", second.json())
    assert "requests per min" in error["message"]
    assert [one.limited for one in server.requests] == [None, "requests"]
    if "generate" in path:
        hint = error["details"][0]["retryDelay"]
        assert 8 < float(hint.removesuffix("s")) <= 10
        return
    assert said["retry-after"] in {"9", "10"}
    if "converse" in path:  # it has no headers of limits
        assert said["x-amzn-errortype"].startswith("ThrottlingException:")
        return
    if "messages" in path:
        assert first.headers["anthropic-ratelimit-requests-limit"] == "6"
        assert first.headers["anthropic-ratelimit-tokens-remaining"] == "100"
        assert said["anthropic-ratelimit-requests-remaining"] == "0"
        assert said["anthropic-ratelimit-requests-reset"].endswith("Z")
    else:
        assert 8_000 < int(said["retry-after-ms"]) <= 10_000
        assert first.headers["x-ratelimit-limit-tokens"] == "6000"
        assert first.headers["x-ratelimit-remaining-tokens"] == "100"
        assert said["x-ratelimit-remaining-requests"] == "0"
        assert said["x-ratelimit-reset-requests"].endswith("s")


def test_requests_in_flight_are_bounded_and_give_their_place_back(server: ModelServer) -> None:
    server.limit(RateLimit(in_flight=1))
    server.follow(lambda _: Reply("late", latency=600))
    url = urlsplit(server.url)
    path, headers = "/v1/chat/completions", {"authorization": "Bearer k"}
    with contextlib.closing(HTTPConnection("127.0.0.1", url.port, timeout=60)) as connection:
        connection.request("POST", path, orjson.dumps(BODIES[path]), headers)
        wait_until(lambda: server.log.in_flight == 1, within=60)
        assert post(server).status_code == 429
    wait_until(lambda: server.log.in_flight == 0, within=60)
    server.follow(lambda _: "now")
    assert [post(server).status_code for _ in range(2)] == [200, 200]


def test_limits_change_while_the_server_runs(server: ModelServer) -> None:
    url = server.url.removesuffix("/v1") + "/limits"
    assert httpx.put(url, json={"requests": 1, "burst": 1}).json()[""]["requests"] == 1
    assert [post(server).status_code for _ in range(2)] == [200, 429]
    assert httpx.put(url, json={"requests": 60_000}).status_code == 200
    wait_until(lambda: post(server).status_code == 200, within=60)
    assert httpx.put(url, json={}).json() == httpx.get(url).json() == {}
    wrong: Any
    for wrong in ({"requests": 0}, {"tokens": "many"}, {"rpm": 5}, {"in_flight": 1.5}, []):
        refused = httpx.put(url, json=wrong)
        assert refused.status_code == 400
        assert "in_flight" in refused.json()["error"]["message"]


def test_the_log_tells_utilisation_refusals_and_tokens(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log, limit = RequestLog(path=path, keep=0), RateLimit(tokens=6_000, burst=10)
    with ModelServer(lambda _: Reply("x", usage=SPENT), log=log, limits=limit) as server:
        for _ in range(40):
            post(server)
        wait_until(lambda: path.read_bytes().count(b"\n") == 40, within=60)
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    admitted = [line for line in lines if line["limited"] is None]
    refused = [line for line in lines if line["limited"]]
    seconds = lines[-1]["received"] - lines[0]["received"]
    spent = sum(line["prompt_tokens"] + line["completion_tokens"] for line in admitted)
    assert 1_000 <= spent <= 100 * (seconds + 10) + 100
    assert {(line["status"], line["limited"]) for line in refused} == {(429, "tokens")}
    assert len({line["account"] for line in lines}) == 1


@pytest.mark.parametrize("path", BODIES)
def test_a_prompt_longer_than_the_window_is_refused(path: str) -> None:
    with ModelServer(lambda _: "x", context_window=5) as server:
        response = post(server, path)
    assert response.status_code == 400
    message = response.json().get("error", response.json())["message"]
    assert "5" in message or "context window" in message
    assert server.requests[0].outcome == "context_length_exceeded"


@pytest.mark.parametrize(
    "wrong", [{"requests": 0}, {"tokens": float("nan")}, {"burst": None}, {"in_flight": 1.5}]
)
def test_what_is_no_limit_is_refused_with_its_field(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"RateLimit.{next(iter(wrong))}"):
        RateLimit(**wrong)
