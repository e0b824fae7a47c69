"""Failed model calls against real servers: the code of each, what repeats, and what it cost."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from support.runs.opened_runs import finish_with_waits
from support.runs.scripted_steps import Hands
from support.runs.stored_runs import Bench, bench
from support.servers.raw_model_server import (
    RawModelServer,
    completion,
    completion_body,
    endless,
    events,
    raw,
    reply,
)

from stepfleet.orchestrator import (
    Agent,
    ErrorHandlingDecision,
    ErrorPolicy,
    ErrorType,
    ModelErrorCode,
    ModelSettings,
    StopReason,
)
from stepfleet.orchestrator.events.envelope import EventType
from stepfleet.orchestrator.records.run.facts import LostAttempt
from stepfleet.worker.testing.scenario import Fault, Reply
from stepfleet.worker.testing.server import ModelServer

CODE = ModelErrorCode
IGNORING = ErrorPolicy.ignore_tool_errors().with_handling(
    ErrorType.MODEL, ErrorHandlingDecision.IGNORE
)
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
DELTA = b'data: {"choices":[{"delta":{"content":"four and twenty words, as it were"}}]}\n\n'
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@asynccontextmanager
async def opened(
    url: str, base_url: str, *, stream: bool = False, seconds: float = 60, **config: Any
) -> AsyncIterator[tuple[Bench, Hands, str]]:
    settings = ModelSettings(base_url=base_url, stream=stream, max_tokens=500, timeout=seconds)
    agent = Agent("real", model="openai:m", settings=settings, **config)
    async with bench(url, agent, lease=600, grace=60) as desk:
        hands = Hands(desk, agent)
        try:
            yield desk, hands, await desk.create()
        finally:
            await hands.models.aclose()


@pytest.fixture
def model() -> Iterator[ModelServer]:
    with ModelServer(lambda _: Reply("done")) as running:
        yield running


@pytest.mark.parametrize(
    ("kind", "code", "calls"),
    [
        ("unauthorized", CODE.INVALID_API_KEY, 1),
        ("forbidden", CODE.PERMISSION_DENIED, 1),
        ("not_found", CODE.MODEL_NOT_FOUND, 1),
        ("content_filter", CODE.CONTENT_FILTER, 1),
        ("context_length_exceeded", CODE.CONTEXT_OVERFLOW, 1),
    ],
)
@pytest.mark.parametrize("policy", [ErrorPolicy.retry_all(5), IGNORING], ids=["retry", "ignore"])
async def test_a_permanent_failure_is_met_once_under_every_policy(
    redis_url: str, model: ModelServer, kind: str, code: str, calls: int, policy: ErrorPolicy
) -> None:
    """ERR-11, RUN-16: the code stands in the record, the explanation and the events."""
    model.fail(Fault(kind), attempt=None)
    async with opened(redis_url, model.url, error_policy=policy) as (desk, hands, run_id):
        await finish_with_waits(hands, run_id)
        result = (await desk.stored(run_id)).result()
        told, _ = await desk.runs.events(run_id)
    assert not model.violations
    assert len(model.requests) == calls
    assert result.stop_reason is StopReason.ERROR
    assert [error.code for step in result.steps for error in step.errors] == [code]
    assert result.last_failure is not None
    assert result.last_failure.permanent
    assert code in (result.error or "")
    assert code in result.explain()
    completed = [one for one in told if one["type"] == EventType.STEP_COMPLETED]
    assert [one["payload"]["error_codes"] for one in completed] == [[code]]


async def test_what_may_pass_is_still_retried(redis_url: str, model: ModelServer) -> None:
    """ERR-11: a rate limit, trouble of the server, then an answer."""
    model.fail(Fault("rate_limited", retry_after=0.01), attempt=1)
    model.fail(Fault("server_error"), attempt=2)
    async with opened(redis_url, model.url, error_policy=ErrorPolicy.retry_all(5)) as (
        desk,
        hands,
        run_id,
    ):
        await finish_with_waits(hands, run_id)
        result = (await desk.stored(run_id)).result()
    assert result.success
    assert [one.ambiguous for one in result.lost_attempts] == [False, False]


CUT = {
    "a body that is cut": (
        raw(WHOLE + b"Content-Length: 4000\r\n\r\n" + b'{"choices": [{"message": "' + b"x" * 400),
        False,
        100,
    ),
    "a body that is no JSON": (reply(200, b'{"choices": [' + b"x" * 400), False, 100),
    "a body without choices": (reply(200, {"choices": [], "pad": "x" * 400}), False, 100),
    "an empty body": (reply(200, b""), False, 0),
    "an empty stream": (raw(STREAM), True, 0),
    "a stream without an end": (raw(STREAM + DELTA * 4), True, 33),
    "an event that is no JSON": (raw(STREAM + DELTA + b"data: {\n\n"), True, 8),
    "an error behind text": (raw(STREAM + DELTA + b'data: {"error":{"code":500}}\n\n'), True, 8),
    "a rate limit behind text": (
        raw(STREAM + DELTA + b'data: {"error":{"code":429,"message":"slow down"}}\n\n'),
        True,
        8,
    ),
    "a connection that ends before the answer": (raw(b""), False, 0),
}


@pytest.mark.parametrize("case", CUT)
async def test_a_broken_answer_is_listed_with_what_it_may_have_cost(
    redis_url: str, case: str
) -> None:
    """Ambiguous, with the tokens of the request and of what had arrived."""
    script, stream, received = CUT[case]
    async with (
        RawModelServer().running() as server,
        opened(redis_url, server.base_url, stream=stream) as (desk, hands, run_id),
    ):
        server.answers(script, completion("done"))
        await finish_with_waits(hands, run_id)
        result = (await desk.stored(run_id)).result()
    assert result.success
    (lost,) = result.lost_attempts
    assert (lost.kind, lost.ambiguous, lost.estimated) == ("deferred", True, True)
    prompt = _prompt(lost, received)
    assert prompt > 0
    assert lost.cost_usd == pytest.approx(lost.tokens / 1000)
    assert "about" in result.explain()


def _prompt(lost: LostAttempt, received: int) -> int:
    """Return the tokens that were not received: more or less those of the request."""
    left = lost.tokens - received
    assert left < 60, (lost.tokens, received)
    return left


async def test_an_answer_above_the_limit_is_bounded_by_what_could_be_asked_for(
    redis_url: str,
) -> None:
    """The failed step itself has no cost; its call is listed beside it."""
    async with (
        RawModelServer().running() as server,
        opened(redis_url, server.base_url) as (desk, hands, run_id),
    ):
        server.answers(endless())
        await finish_with_waits(hands, run_id)
        result = (await desk.stored(run_id)).result()
    assert result.stop_reason is StopReason.ERROR
    assert result.steps[0].usage is None
    (lost,) = result.lost_attempts
    assert (lost.kind, lost.step, lost.ambiguous) == ("failed", 1, True)
    assert 500 < lost.tokens < 600


BROKEN: dict[str, dict[str, Any]] = {
    "no choices": {"choices": []},
    "an error in a choice": {"choices": [{"error": {"code": 502, "message": "behind me"}}]},
    "an error beside choices": {"error": {"message": "oops"}},
    "a rate limit beside choices": {"error": {"code": 429, "message": "slow down"}},
    "a reason": {"choices": [{"message": {"content": "Half"}, "finish_reason": "error"}]},
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("case", BROKEN)
async def test_what_a_broken_answer_says_of_its_usage_is_no_estimate(
    redis_url: str, case: str, stream: bool
) -> None:
    """COST-09: usage is recorded where it is present."""
    async with (
        RawModelServer().running() as server,
        opened(redis_url, server.base_url, stream=stream) as (desk, hands, run_id),
    ):
        broken = completion_body() | BROKEN[case]
        server.answers(events(broken) if stream else reply(200, broken), completion("done"))
        await finish_with_waits(hands, run_id)
        result = (await desk.stored(run_id)).result()
    assert result.success
    (lost,) = result.lost_attempts
    assert (lost.tokens, lost.estimated, lost.ambiguous) == (15, False, True)


OVERLOADED = b'data: {"error":{"code":503,"message":"overloaded"}}\n\n'
CHUNKED = STREAM.replace(b"Connection: close", b"Transfer-Encoding: chunked")


@pytest.mark.parametrize("ending", ["error", "rate limit", "end", "reset", "timeout"])
@pytest.mark.parametrize(("reported", "output", "estimated"), [(1, 33, True), (90, 90, False)])
async def test_however_a_stream_breaks_it_costs_the_same(
    redis_url: str, ending: str, reported: int, output: int, estimated: bool
) -> None:
    """The reported input; of the output what was reported, or what had come where that is more."""
    usage = {"prompt_tokens": 1000, "completion_tokens": reported}
    parts = b"data: " + orjson.dumps({"choices": [], "usage": usage}) + b"\n\n" + DELTA * 4
    script = {
        "error": raw(STREAM + parts + OVERLOADED),
        "rate limit": raw(STREAM + parts + OVERLOADED.replace(b"503", b"429")),
        "end": raw(STREAM + parts),
        "reset": raw(CHUNKED + f"{len(parts):x}\r\n".encode() + parts + b"\r\n"),
        "timeout": raw(STREAM + parts, close=False),
    }[ending]
    async with (
        RawModelServer().running() as server,
        opened(redis_url, server.base_url, stream=True, seconds=2) as (desk, hands, run_id),
    ):
        server.answers(script, completion("done"))
        await finish_with_waits(hands, run_id)
        result = (await desk.stored(run_id)).result()
    assert result.success
    (lost,) = result.lost_attempts
    assert lost.usage is not None
    assert (lost.usage.prompt_tokens, lost.usage.completion_tokens) == (1000, output)
    assert (lost.tokens, lost.ambiguous, lost.estimated) == (1000 + output, True, estimated)


@pytest.mark.parametrize("code", ["tool_use_failed", "json_validate_failed"])
@pytest.mark.parametrize("policy", [ErrorPolicy.retry_all(5), None], ids=["retry", "default"])
async def test_what_a_server_could_not_read_of_its_model_is_asked_for_again(
    redis_url: str, code: str, policy: ErrorPolicy | None
) -> None:
    """Groq answers 400; the model was at work."""
    error = {"message": "Failed.", "type": "invalid_request_error", "code": code}
    config: dict[str, Any] = {} if policy is None else {"error_policy": policy}
    async with (
        RawModelServer().running() as server,
        opened(redis_url, server.base_url, **config) as (desk, hands, run_id),
    ):
        server.answers(reply(400, {"error": error}), completion("done"))
        await finish_with_waits(hands, run_id)
        result = (await desk.stored(run_id)).result()
    assert (result.success, len(server.received)) == (True, 2)
    (lost,) = result.lost_attempts
    assert (lost.ambiguous, lost.estimated) == (True, True)


async def test_a_server_that_was_never_reached_costs_nothing(redis_url: str) -> None:
    """Neither does a refusal."""
    async with RawModelServer().running() as server:
        nowhere = server.base_url
    async with opened(redis_url, nowhere) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        (lost,) = (await desk.stored(run_id)).result().lost_attempts
    assert (lost.ambiguous, lost.tokens, lost.cost_usd) == (False, 0, None)
    async with (
        RawModelServer().running() as server,
        opened(redis_url, server.base_url) as (desk, hands, run_id),
    ):
        server.answers(reply(503, b""), events(done=True), completion("done"))
        await hands.step(run_id, 0)
        (lost,) = (await desk.stored(run_id)).result().lost_attempts
    assert not lost.ambiguous
