"""Empty answers over a real Redis: asked again, then a named failure; each call is listed."""

from collections.abc import Callable
from typing import Any

import pytest
from support.runs.opened_runs import Opened, finish_with_waits
from support.runs.scripted_steps import call, requests, say
from support.runs.tools import look

from stepfleet.orchestrator import (
    ErrorPolicy,
    FinishReason,
    LLMResponse,
    Message,
    ModelErrorCode,
    RunStatus,
    StopReason,
)
from stepfleet.orchestrator.protocol.revision import further_turn
from stepfleet.orchestrator.records.errors import ErrorType
from stepfleet.orchestrator.records.usage import LostUse


def in_turn(*answers: LLMResponse) -> Callable[[Any], Any]:
    """Return a model that gives these answers, call by call, and the last one from then on."""
    left = list(answers)

    async def answer(_: Any) -> LLMResponse:
        return left.pop(0) if len(left) > 1 else left[0]

    return answer


async def test_an_empty_answer_is_asked_again_and_what_it_cost_is_listed(opened: Opened) -> None:
    model = in_turn(say(""), say("here it is"))
    async with opened(model) as (desk, hands, run_id):
        await finish_with_waits(hands, run_id)
        result = (await desk.stored(run_id)).result()
    assert (result.status, result.output) == (RunStatus.COMPLETED, "here it is")
    (lost,) = result.lost_attempts
    assert (lost.kind, lost.tokens, lost.estimated) == ("deferred", 15, False)
    assert lost.cost_usd == pytest.approx(0.015)
    assert "the answer is empty" in (lost.reason or "")
    assert len(result.steps) == 1


async def test_a_model_that_gives_nothing_ends_the_run_with_the_name_of_that(
    opened: Opened,
) -> None:
    async with opened(say(" \n"), model_attempts=3) as (desk, hands, run_id):
        await finish_with_waits(hands, run_id)
        result = (await desk.stored(run_id)).result()
    assert (result.status, result.stop_reason) == (RunStatus.ERROR, StopReason.ERROR)
    assert result.output is None
    assert result.last_error is not None
    assert result.last_error.code == ModelErrorCode.EMPTY_ANSWER
    assert result.last_error.type is ErrorType.MODEL
    assert result.steps[0].finish_reason is FinishReason.STOP
    assert len(requests(hands)) == len(result.lost_attempts) == 3
    assert [one.tokens for one in result.lost_attempts] == [15, 15, 15]


@pytest.mark.parametrize(
    ("limits", "reason", "says"),
    [
        (
            {"budget_usd": 0.04},
            StopReason.GUARD,
            "0.045 USD (0.045 USD of them of attempts that were not committed) has reached",
        ),
        (
            {"token_limit": 40},
            StopReason.TOKEN_LIMIT,
            "45 (45 of them of attempts that were not committed) has reached",
        ),
        ({"budget_usd": 0.04, "model_attempts": 1}, StopReason.GUARD, "0.045 USD (0.045 USD"),
        ({"budget_usd": 0.04, "model_attempts": 2}, StopReason.GUARD, "0.045 USD (0.045 USD"),
    ],
)
async def test_the_limits_of_a_run_count_answers_that_were_of_no_use(
    opened: Opened, limits: dict[str, Any], reason: StopReason, says: str
) -> None:
    """Looked at before each further attempt; a step that failed is not retried at the limit."""
    policy = ErrorPolicy.retry_all(9)
    config = {"model_attempts": 9, "error_policy": policy, **limits}
    async with opened(say(""), **config) as (desk, hands, run_id):
        await finish_with_waits(hands, run_id)
        stored = await desk.stored(run_id)
        result = stored.result()
        following = further_turn(stored.state, stored.log, {}, await desk.runs.now())
        await desk.control.retry(stored, following, (Message.user("go on"),))
        again = await desk.stored(run_id)
        timelines = desk.opened.timelines
        seen = await timelines.read(run_id, 1, 10, content=False)
    assert len(requests(hands)) == 3
    assert result.stop_reason is reason
    assert result.outcome is not None
    assert says in result.outcome.reason
    assert result.lost_cost_usd == pytest.approx(0.045)
    assert seen.lost_cost_usd == pytest.approx(0.045)
    assert "and 0.045000 USD" in result.explain()
    assert stored.state.lost == stored.state.session_lost == again.state.session_lost
    assert again.state.lost == LostUse(), "limits are those of an execution"


async def test_an_empty_answer_after_a_tool_fails_too(opened: Opened) -> None:
    script = (call(("look", {"what": "a"}), text="I will look"), say(""))
    async with opened(*script, tools=(look,), model_attempts=1) as (desk, hands, run_id):
        await finish_with_waits(hands, run_id)
        result = (await desk.stored(run_id)).result()
    assert result.stop_reason is StopReason.ERROR
    assert result.last_error is not None
    assert result.last_error.code == ModelErrorCode.EMPTY_ANSWER


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (FinishReason.LENGTH, ModelErrorCode.EMPTY_ANSWER),
        (FinishReason.CONTENT_FILTER, ModelErrorCode.CONTENT_FILTER),
    ],
)
async def test_what_a_limit_cut_or_a_filter_withheld_is_bought_once_and_named(
    opened: Opened, reason: FinishReason, code: ModelErrorCode
) -> None:
    async with opened(say("", finish_reason=reason)) as (desk, hands, run_id):
        await finish_with_waits(hands, run_id)
        result = (await desk.stored(run_id)).result()
    assert result.stop_reason is StopReason.ERROR
    assert result.steps[0].finish_reason is reason
    assert result.last_error is not None
    assert result.last_error.code == code
    assert reason.value in (result.error or "")
    assert len(requests(hands)) == len(result.lost_attempts) == 1


async def test_an_agent_that_allows_empty_answers_completes_with_one(opened: Opened) -> None:
    async with opened(say(""), allow_empty_answer=True) as (desk, hands, run_id):
        await finish_with_waits(hands, run_id)
        result = (await desk.stored(run_id)).result()
    assert (result.status, len(requests(hands))) == (RunStatus.COMPLETED, 1)


async def test_words_of_a_refusal_end_a_run_that_wants_data_at_once(opened: Opened) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    refused = say("I can't.", finish_reason=FinishReason.CONTENT_FILTER)
    async with opened(refused, output_schema=schema) as (desk, hands, run_id):
        await finish_with_waits(hands, run_id)
        result = (await desk.stored(run_id)).result()
    assert result.stop_reason is StopReason.ERROR
    assert result.last_error is not None
    assert result.last_error.code == ModelErrorCode.CONTENT_FILTER
    assert "I can't." in (result.error or "")
    assert len(requests(hands)) == len(result.lost_attempts) == 1


async def test_calls_of_a_refused_answer_are_not_executed(opened: Opened) -> None:
    refused = call(("look", {"what": "a"})).model_copy(
        update={"finish_reason": FinishReason.CONTENT_FILTER}
    )
    async with opened(refused, tools=(look,)) as (desk, hands, run_id):
        await finish_with_waits(hands, run_id)
        result = (await desk.stored(run_id)).result()
    assert result.last_error is not None
    assert result.last_error.code == ModelErrorCode.CONTENT_FILTER
    assert [one.tool_calls for one in result.steps] == [()]
    assert len(requests(hands)) == 1


async def test_the_last_call_of_a_cut_answer_is_answered_with_the_limit(opened: Opened) -> None:
    cut = call(("look", {"what": "a"}), ("look", {"what": "b"})).model_copy(
        update={"finish_reason": FinishReason.LENGTH}
    )
    async with opened(cut, say("done"), tools=(look,)) as (desk, hands, run_id):
        await finish_with_waits(hands, run_id)
        result = (await desk.stored(run_id)).result()
    first, last = result.steps[0].tool_calls
    assert first.error is None
    assert last.error is not None
    assert "settings.max_tokens" in last.error.message


async def test_an_answer_by_a_call_that_was_cut_is_not_taken(opened: Opened) -> None:
    given = call(("final_answer", {"answer": "half of"})).model_copy(
        update={"finish_reason": FinishReason.LENGTH}
    )
    sound = call(("final_answer", {"answer": "short"}))
    async with opened(given, sound, require_final_answer=True) as (desk, hands, run_id):
        await finish_with_waits(hands, run_id)
        result = (await desk.stored(run_id)).result()
    assert result.output == "short"


async def test_an_image_in_the_place_of_a_text_is_bought_once_and_named(opened: Opened) -> None:
    image = say("").model_copy(update={"unread": "an image"})
    async with opened(image) as (desk, hands, run_id):
        await finish_with_waits(hands, run_id)
        result = (await desk.stored(run_id)).result()
    assert result.last_error is not None
    assert result.last_error.code == ModelErrorCode.INVALID_REQUEST
    assert "an image" in (result.error or "")
    assert len(requests(hands)) == len(result.lost_attempts) == 1
    assert result.lost_attempts[0].tokens == 15
