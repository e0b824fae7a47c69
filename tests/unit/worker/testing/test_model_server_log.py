from pathlib import Path
from typing import Any

import httpx
import orjson
from support.deadlines import wait_until

from stepfleet.worker.testing.scenario import Reply as Said
from stepfleet.worker.testing.scenario import Usage
from stepfleet.worker.testing.server import ModelServer
from stepfleet.worker.testing.service import RequestLog


def post(server: ModelServer, question: str = "hi", **headers: str) -> httpx.Response:
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": question}]}
    return httpx.post(f"{server.url}/chat/completions", json=body, headers=headers, timeout=60)


def test_a_request_is_logged_with_its_times_and_outcome() -> None:
    with ModelServer({"hi": [Said("x", usage=Usage(1, 2))]}) as server:
        post(server)
        (request,) = server.requests
    assert (request.key, request.turn, request.attempt) == ("hi", 1, 1)
    assert request.body["model"] == "m"
    assert request.answered is not None
    assert request.received <= request.answered
    assert (request.outcome, request.status, request.usage) == ("replied", 200, Usage(1, 2))


def test_secrets_never_enter_the_log() -> None:
    with ModelServer(lambda _: "x") as server:
        post(server, authorization="Bearer hush", **{"X-Api-Key": "hush", "X-Run": "run 7"})
        (request,) = server.requests
    assert request.headers["authorization"] == "[secret]"
    assert request.headers["x-run"] == "run 7"
    assert "hush" not in repr(request)


def test_repeated_calls_are_counted_by_conversation_and_turn() -> None:
    with ModelServer(lambda _: "x") as server:
        for question in ("a", "b", "a"):
            post(server, question)
        assert server.count("a", 1) == 2
        assert server.log.counts == {("a", 1): 2, ("b", 1): 1}
        assert [one.attempt for one in server.requests] == [1, 1, 2]
        assert server.count("c", 1) == 0


def test_the_log_keeps_no_more_than_it_is_asked_to() -> None:
    with ModelServer(lambda _: "x", log=RequestLog(keep=2)) as server:
        for question in ("a", "b", "c"):
            post(server, question)
        wait_until(lambda: [one.key for one in server.requests] == ["b", "c"], within=60)
        assert server.log.total == 3
        assert server.count("a", 1) == 1


def test_the_key_of_a_conversation_can_be_chosen() -> None:
    def by_model(body: dict[str, Any]) -> str:
        return str(body["model"])

    with ModelServer({"m": ["by model"]}, key=by_model) as server:
        assert post(server, "whatever").status_code == 200


def test_the_file_has_a_line_for_every_request_that_ended(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    with ModelServer(lambda _: Said("x", usage=Usage(3, 4)), log=RequestLog(path=path)) as server:
        server.fail("overloaded")
        post(server, authorization="Bearer hush")
        post(server)
        wait_until(lambda: path.read_bytes().count(b"\n") == 2, within=60)
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    assert [line["outcome"] for line in lines] == ["overloaded", "replied"]
    assert [line["attempt"] for line in lines] == [1, 2]
    assert (lines[1]["prompt_tokens"], lines[1]["completion_tokens"]) == (3, 4)
    assert lines[0]["prompt_tokens"] is None
    assert b"hush" not in path.read_bytes()


def test_the_statistics_are_served() -> None:
    with ModelServer(lambda _: "x") as server:
        post(server)
        statistics = httpx.get(server.url.removesuffix("/v1") + "/stats").json()
    assert statistics["requests"] == 1
    assert statistics["outcomes"] == {"replied": 1}
    assert statistics["violations"] == []
