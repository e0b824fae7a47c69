"""Errors in every phase of a step over a real Redis: how each ends, repeats or prunes."""

import json
from typing import Any

import pytest
from support.runs.opened_runs import Opened
from support.runs.scripted_steps import call, requests, say
from support.runs.tools import broken, look

from stepfleet.orchestrator import (
    AgentState,
    ContinuationDecision,
    ErrorPolicy,
    ErrorType,
    FinishReason,
    LLMResponse,
    Middleware,
    ModelRequest,
    RunStatus,
    StopReason,
    tool,
    when,
)
from stepfleet.orchestrator.errors import (
    ContextWindowError,
    ModelError,
    RateLimitError,
)
from stepfleet.orchestrator.protocol.claim import Refused
from stepfleet.orchestrator.records.steps import StepType
from stepfleet.orchestrator.tools.middleware import NextModel


async def test_a_tool_error_reaches_the_model_and_ends_the_run_by_default(opened: Opened) -> None:
    """ERR-17, ERR-21, TOOL-11, TOOL-25, STATE-11."""
    async with opened(call(("broken", {})), tools=(broken,)) as (desk, hands, run_id):
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
        result = stored.result()
    assert result.stop_reason is StopReason.ERROR
    assert result.steps[0].type is StepType.ERROR
    assert result.error is not None
    assert "no luck" in result.error
    text = stored.state.messages[-1].text
    assert json.loads(text[text.index("{") :])["error"]["code"] == "TOOL_EXECUTION_ERROR"
    assert stored.state.last_error is not None


async def test_retries_stop_at_the_policys_count_with_their_own_reason(opened: Opened) -> None:
    """ERR-09, ERR-13, ERR-19: retry, retry, stop."""
    policy = ErrorPolicy.retry_tool_errors(3)
    async with opened(call(("broken", {})), tools=(broken,), error_policy=policy) as (
        desk,
        hands,
        run_id,
    ):
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.stop_reason is StopReason.RETRY_LIMIT
    assert len(result.steps) == 3
    assert result.status is RunStatus.ERROR


async def test_a_criterion_that_raises_stops_the_run_with_an_explanation(opened: Opened) -> None:
    """CONT-26, ERR-25"""

    def raises(_: AgentState) -> ContinuationDecision:
        message = "criterion bug"
        raise RuntimeError(message)

    async with opened(call(("look", {"what": "a"})), tools=(look,), criteria=(when(raises),)) as (
        desk,
        hands,
        run_id,
    ):
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.stop_reason is StopReason.ERROR
    assert result.error is not None
    assert "criterion bug" in result.error
    assert requests(hands) == []


async def test_a_permanent_model_failure_ends_the_run_at_once(opened: Opened) -> None:
    """RUN-16, ERR-25, ERR-31, STATE-11"""
    async with opened(ModelError("bad request")) as (desk, hands, run_id):
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.stop_reason is StopReason.ERROR
    assert result.steps[0].type is StepType.ERROR
    assert result.steps[0].finish_reason is FinishReason.ERROR
    assert len(requests(hands)) == 1


async def test_a_rate_limit_waits_as_long_as_the_provider_asks(opened: Opened) -> None:
    """ERR-22: Retry-After is honoured and no slot is held."""
    refusal = RateLimitError("slow down", retry_after=300.0)
    async with opened(refusal, time_limit=3600) as (desk, hands, run_id):
        report = await hands.step(run_id, 0)
        assert report.verdict is not None
        assert 300 <= report.verdict.delay <= 330
        assert len(hands.leases) == 0
        refused = await desk.refused(run_id)
    assert refused.why is Refused.EARLY
    assert int(refused.detail) > 200_000


async def test_a_conversation_that_is_too_long_is_pruned_once(opened: Opened) -> None:
    """ERR-23, LLM-08: two calls, then the step's error."""
    failure = ContextWindowError("too long", limit=10)

    async def too_long_with_b(request: ModelRequest) -> LLMResponse:
        if any(message.text == "seen b" for message in request.messages):
            raise failure
        return call(("look", {"what": "b"}))

    script = (call(("look", {"what": "a"})), too_long_with_b, failure)
    async with opened(*script, tools=(look,)) as (desk, hands, run_id):
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.stop_reason is StopReason.ERROR
    assert len(requests(hands)) == 4
    assert [len(one.messages) for one in requests(hands)] == [1, 3, 5, 3]
    assert [step.type for step in result.steps].count(StepType.ERROR) == 1
    assert [error.type for error in result.steps[-1].errors] == [ErrorType.MODEL]


async def test_an_exception_in_the_model_object_is_a_recorded_step(opened: Opened) -> None:
    """ERR-25"""

    async def explode(_: ModelRequest) -> LLMResponse:
        message = "bug in the adapter"
        raise KeyError(message)

    async with opened(explode) as (desk, hands, run_id):
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
        events, _ = await desk.runs.events(run_id)
    assert result.stop_reason is StopReason.ERROR
    assert result.error is not None
    assert "bug in the adapter" in result.error
    assert len(result.steps) == 1
    assert result.outcome is not None
    assert result.outcome.resolved_by == "ErrorPolicyCriterion"
    assert result.cumulative_execution_seconds > 0
    assert events[-1]["payload"]["status"] == "failed"


LONE = "bad \ud800 text"
KEPT = r"bad \ud800 text"


def raises_it(_: AgentState) -> ContinuationDecision:
    """Fail with a text that no JSON holds."""
    raise RuntimeError(LONE)


@tool
def raising() -> str:
    """Fail with a text that no JSON holds."""
    raise RuntimeError(LONE)


class Unreadable(Middleware):
    """Puts a text into the answer that no JSON holds."""

    async def around_model(self, request: ModelRequest, call_next: NextModel) -> LLMResponse:
        return (await call_next(request)).model_copy(update={"content": LONE})


@pytest.mark.parametrize(
    ("answer", "config"),
    [
        (RuntimeError(LONE), {}),
        (ModelError(LONE), {}),
        (call(("raising", {})), {"tools": (raising,)}),
        (say("fine"), {"criteria": (when(raises_it),)}),
    ],
    ids=["model object", "ModelError", "tool", "criterion"],
)
async def test_an_error_that_is_no_valid_unicode_is_committed(
    opened: Opened, answer: Any, config: dict[str, Any]
) -> None:
    """The step ends, and its call is not paid again with every lease."""
    async with opened(answer, **config) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        result = (await desk.stored(run_id)).result()
    assert result.status is RunStatus.ERROR
    assert result.error is not None
    assert KEPT in result.error


@pytest.mark.parametrize("middleware", [(), (Unreadable(),)], ids=["model", "middleware"])
async def test_an_answer_that_is_no_valid_unicode_is_committed(
    opened: Opened, middleware: tuple[Middleware, ...]
) -> None:
    async with opened(say("fine" if middleware else LONE), middleware=middleware) as (
        desk,
        hands,
        run_id,
    ):
        await hands.step(run_id, 0)
        result = (await desk.stored(run_id)).result()
    assert result.status is RunStatus.COMPLETED
    assert result.output == KEPT


async def test_a_call_with_arguments_of_no_valid_unicode_is_answered_and_not_run(
    opened: Opened,
) -> None:
    script = (call(("look", {"what": LONE})), say("done"))
    policy = ErrorPolicy.retry_all()
    async with opened(*script, tools=(look,), error_policy=policy) as (desk, hands, run_id):
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.output == "done"
    told = requests(hands)[-1].messages[-1].text
    assert "lone surrogate" in told
