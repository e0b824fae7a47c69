"""What a run tells on a real store: every change of status once, every step, tool and decision."""

import asyncio
from collections import Counter
from typing import Any

import jsonschema
import pytest
from support.runs.opened_runs import finish_with_waits, lease_runs_out, opened_run
from support.runs.scripted_steps import Crash, Hands, Script, call, say
from support.runs.stored_runs import Bench, answered, bench, called, failed

from stepfleet.orchestrator import Agent, AsyncFleet, ErrorPolicy, FinishReason, StopReason, tool
from stepfleet.orchestrator.errors import ModelError

TEXT = {"type": "string", "minLength": 1}
MAYBE = {"type": ["string", "null"]}
COUNT = {"type": "integer", "minimum": 0}


def exactly(optional: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": fields,
        "required": [name for name in fields if name not in optional],
        "additionalProperties": False,
    }


PAYLOADS = {
    "agent.status": exactly(
        status={
            "enum": [
                *("queued", "in_progress", "paused"),
                *("completed", "failed", "cancelled", "stopped"),
            ]
        },
        previous_status=MAYBE,
        step_count=COUNT,
        error_message=MAYBE,
        last_response=MAYBE,
    ),
    "agent.step.started": exactly(
        step_number=COUNT, message_count=COUNT, available_tools={"type": "array", "items": TEXT}
    ),
    "agent.step.completed": exactly(
        optional=("error_codes",),
        step_number=COUNT,
        has_tool_calls={"type": "boolean"},
        errors={"type": "array", "items": TEXT},
        error_codes={"type": "array", "items": TEXT, "minItems": 1},
        finish_reason=TEXT,
        usage={"type": ["object", "null"]},
        duration_ms={"type": "number", "minimum": 0},
    ),
    "agent.tool.started": exactly(
        tool_name=TEXT, tool_call_id=TEXT, args_summary={"type": "string"}
    ),
    "agent.tool.completed": exactly(
        tool_name=TEXT,
        tool_call_id=TEXT,
        success={"type": "boolean"},
        error=MAYBE,
        duration_ms={"type": ["number", "null"]},
        result_summary=MAYBE,
    ),
    "agent.step.retried": exactly(
        step_number=COUNT,
        error=TEXT,
        error_code=TEXT,
        attempt=COUNT,
        retry_in_seconds={"type": "number"},
        duration_ms={"type": "number"},
    ),
}
STAMP = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$"
ENVELOPE = exactly(
    sequence={"type": "integer", "minimum": 1},
    event_id=TEXT,
    type={"enum": list(PAYLOADS)},
    session_id=TEXT,
    execution_id=TEXT,
    timestamp={"type": "string", "pattern": STAMP},
    payload={"type": "object"},
)


@tool(read_only=True)
def look(what: str) -> str:
    """Look something up."""
    if what == "nothing":
        raise ValueError("nothing is there")
    return f"seen {what}"


BENCH: dict[str, Any] = {"lease": 0.5}


async def told(desk: Bench, run_id: str) -> list[dict[str, Any]]:
    events, _ = await desk.runs.events(run_id)
    assert [one["sequence"] for one in events] == list(range(1, len(events) + 1))
    return events


async def statuses(desk: Bench, run_id: str) -> list[str]:
    events = [one for one in await told(desk, run_id) if one["type"] == "agent.status"]
    names = [one["payload"]["status"] for one in events]
    assert [one["payload"]["previous_status"] for one in events] == [None, *names[:-1]]
    return names


async def test_every_envelope_and_payload_has_its_form(redis_url: str) -> None:
    """EVT-02, EVT-05, EVT-06, EVT-07, EVT-08: a run with good tools and a bad one."""
    answers = (
        call(("look", {"what": "this"}), ("look", {"what": "nothing"})),
        ModelError("away", retryable=True),
        say("done"),
    )
    tries = Counter[int]()

    async def second(request: Any) -> Any:
        tries[0] += 1
        if tries[0] == 1:
            raise answers[1]
        return answers[2]

    async with opened_run(
        redis_url,
        answers[0],
        second,
        tools=(look,),
        error_policy=ErrorPolicy.ignore_tool_errors(),
    ) as (desk, hands, run_id):
        await finish_with_waits(hands, run_id, within=60)
        events = await told(desk, run_id)
        result = (await desk.stored(run_id)).result()
    for event in events:
        jsonschema.validate(event, ENVELOPE)
        jsonschema.validate(event["payload"], PAYLOADS[event["type"]])
    assert [one["type"].removeprefix("agent.") for one in events] == [
        *("status", "status", "step.started"),
        *("tool.started", "tool.completed", "tool.started", "tool.completed"),
        *("step.completed", "step.retried", "step.started", "step.completed", "status"),
    ]
    by_type: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        by_type.setdefault(event["type"], []).append(event["payload"])
    assert [one["args_summary"] for one in by_type["agent.tool.started"]] == [
        'what: "this"',
        'what: "nothing"',
    ]
    good, bad = by_type["agent.tool.completed"]
    assert (good["success"], good["error"], good["result_summary"]) == (True, None, "seen this")
    assert (bad["success"], bad["result_summary"]) == (False, None)
    assert "nothing is there" in bad["error"]
    ids = [call.call_id for call in result.steps[0].tool_calls]
    assert [one["tool_call_id"] for one in by_type["agent.tool.started"]] == ids
    first = by_type["agent.step.completed"][0]
    assert first["usage"]["total_tokens"] == 15
    assert first["duration_ms"] == round(result.steps[0].duration_ms, 3)
    assert by_type["agent.step.started"][0]["available_tools"] == ["look"]


async def test_the_trace_is_reported_where_it_is_asked_for_and_nowhere_else(redis_url: str) -> None:
    """EVT-09, EVT-23: off by default; evaluations with short names, whole arguments in debug."""
    answers = (call(("look", {"what": "x" * 600})), say("done"))
    async with opened_run(redis_url, *answers, tools=(look,)) as (desk, hands, run_id):
        await hands.finish(run_id)
        plain = await told(desk, run_id)
    async with opened_run(redis_url, *answers, tools=(look,), broadcast="debug") as opened:
        desk, hands, run_id = opened
        await hands.finish(run_id)
        debug = await told(desk, run_id)
        result = (await desk.stored(run_id)).result()
    assert "agent.continuation" not in {one["type"] for one in plain}
    traces = [one["payload"] for one in debug if one["type"] == "agent.continuation"]
    assert [one["step_number"] for one in traces] == [1, 2]
    assert [one["should_continue"] for one in traces] == [True, False]
    assert [one["stop_reason"] for one in traces] == [None, "completed"]
    assert result.outcome is not None
    assert traces[1]["resolved_by"] == result.outcome.resolved_by
    names = [one["criterion"] for one in traces[0]["evaluations"]]
    assert names
    assert all("." not in name for name in names)
    assert all(set(one) == {"criterion", "decision", "reason"} for one in traces[0]["evaluations"])
    (started,) = [one["payload"] for one in debug if one["type"] == "agent.tool.started"]
    assert started["args"] == {"what": "x" * 497 + "..."}
    steps = [one["payload"] for one in debug if one["type"] == "agent.step.completed"]
    assert steps[1]["continuation"] == {
        "should_continue": False,
        "stop_reason": "completed",
        "resolved_by": result.outcome.resolved_by,
    }


ENDINGS: dict[StopReason, tuple[tuple[Any, ...], dict[str, Any]]] = {
    StopReason.COMPLETED: ((say("done"),), {}),
    StopReason.STEPS_LIMIT: ((call(("look", {"what": "a"})),), {"max_steps": 1}),
    StopReason.TOKEN_LIMIT: ((call(("look", {"what": "a"})),), {"token_limit": 5}),
    StopReason.TIME_LIMIT: ((call(("look", {"what": "a"})),), {"cumulative_timeout": 1e-9}),
    StopReason.ERROR: ((ModelError("no"),), {}),
    StopReason.RETRY_LIMIT: (
        (call(("look", {"what": "nothing"})),),
        {"error_policy": ErrorPolicy.retry_tool_errors(1)},
    ),
    StopReason.FINISH_REASON: (
        (say("cut", finish_reason=FinishReason.LENGTH),),
        {"finish_reasons": (FinishReason.LENGTH,)},
    ),
    StopReason.GUARD: ((call(("look", {"what": "a"})),), {"budget_usd": 1e-9}),
}
STATES = {
    StopReason.COMPLETED: "completed",
    StopReason.FINISH_REASON: "completed",
    StopReason.ERROR: "failed",
    StopReason.RETRY_LIMIT: "failed",
}


@pytest.mark.parametrize("reason", ENDINGS)
async def test_every_ending_tells_its_statuses_once(redis_url: str, reason: StopReason) -> None:
    """EVT-10: for each stop reason; the last one says the steps, the error, the last answer."""
    answers, config = ENDINGS[reason]
    async with opened_run(redis_url, *answers, tools=(look,), **config) as (desk, hands, run_id):
        await finish_with_waits(hands, run_id, within=60)
        result = (await desk.stored(run_id)).result()
        assert result.stop_reason is reason
        end = STATES.get(reason, "stopped")
        assert await statuses(desk, run_id) == ["queued", "in_progress", end]
        last = (await told(desk, run_id))[-1]["payload"]
    assert last["step_count"] == len(result.steps)
    assert last["error_message"] == result.error
    assert last["last_response"] == result.output


async def test_a_cancel_of_a_step_under_way_is_reported_once(redis_url: str) -> None:
    """EVT-10: for the stop reason user_requested; the worker learns of it at its commit."""
    async with opened_run(redis_url) as (desk, _, run_id):

        async def cancelled_meanwhile(_: Any) -> Any:
            answer = await desk.control.cancel(await desk.stored(run_id), "enough")
            assert answer.outcome == "requested"
            return say("done")

        agent = Agent("scripted", model=Script([cancelled_meanwhile]))
        await Hands(desk, agent).finish(run_id)
        result = (await desk.stored(run_id)).result()
        assert result.stop_reason is StopReason.USER_REQUESTED
        assert await statuses(desk, run_id) == ["queued", "in_progress", "cancelled"]
        last = (await told(desk, run_id))[-1]["payload"]
    assert (last["step_count"], last["last_response"]) == (1, "done")


async def test_pauses_and_cancels_while_nobody_works_are_reported(desk: Bench) -> None:
    """EVT-10: paused, resumed and cancelled before the first step, each once."""
    run_id = await desk.create(parent="the parent")
    for _ in range(2):
        await desk.control.pause(run_id)
    assert await statuses(desk, run_id) == ["queued", "paused"]
    for _ in range(2):
        await desk.control.resume(await desk.stored(run_id))
    assert await statuses(desk, run_id) == ["queued", "paused", "queued"]
    await desk.control.pause(run_id)
    for _ in range(2):
        await desk.control.cancel(await desk.stored(run_id), "enough")
    assert await statuses(desk, run_id) == [
        *("queued", "paused", "queued", "paused"),
        "cancelled",
    ]
    events = await told(desk, run_id)
    assert {one["parent_agent_id"] for one in events} == {"the parent"}
    assert {one["execution_id"] for one in events} == {f"{run_id}:1"}


async def test_a_pause_at_a_commit_and_its_end_are_reported(desk: Bench) -> None:
    """EVT-10: with what the run had come to."""
    run_id = await desk.create()
    first = await desk.claim(run_id)
    await desk.control.pause(run_id)
    assert await statuses(desk, run_id) == ["queued", "in_progress"]
    await desk.commit(first, called(first))
    assert await statuses(desk, run_id) == ["queued", "in_progress", "paused"]
    last = (await told(desk, run_id))[-1]["payload"]
    assert (last["step_count"], last["last_response"]) == (1, "looking")
    await desk.control.resume(await desk.stored(run_id))
    second = await desk.claim(run_id, 1)
    await desk.commit(second, answered(second))
    assert await statuses(desk, run_id) == [
        *("queued", "in_progress", "paused", "in_progress", "completed")
    ]


async def test_a_pause_that_a_lost_worker_leaves_behind_is_reported(redis_url: str) -> None:
    """EVT-10: the next worker finds the pause and tells it."""
    async with opened_run(redis_url, say("done")) as (desk, _, run_id):
        await desk.claim(run_id)
        await desk.control.pause(run_id)
        await lease_runs_out(desk, run_id)
        await desk.refused(run_id)
        assert await statuses(desk, run_id) == ["queued", "in_progress", "paused"]


async def test_a_run_whose_first_worker_is_lost_begins_once(redis_url: str) -> None:
    """EVT-10"""
    async with opened_run(redis_url, say("done")) as (desk, hands, run_id):
        hands.crash_at = "before-commit"
        with pytest.raises(Crash):
            await hands.step(run_id, 0)
        await lease_runs_out(desk, run_id)
        await hands.finish(run_id)
        assert await statuses(desk, run_id) == ["queued", "in_progress", "completed"]


async def test_a_retry_and_a_further_turn_are_reported_once(redis_url: str, desk: Bench) -> None:
    """EVT-10: also where the first step had failed."""
    async with AsyncFleet(redis_url) as fleet:
        run_id = await fleet.submit(desk.agent, "hello")
        claim = await desk.claim(run_id)
        await desk.commit(claim, failed(claim))
        await fleet.runs.retry(run_id)
        claim = await desk.claim(run_id)
        await desk.commit(claim, answered(claim))
        assert await statuses(desk, run_id) == [
            *("queued", "in_progress", "failed"),
            *("in_progress", "completed"),
        ]
        await fleet.runs.send(run_id, "more")
        claim = await desk.claim(run_id, 1)
        await desk.commit(claim, answered(claim))
    assert (await statuses(desk, run_id))[5:] == ["in_progress", "completed"]
    events = await told(desk, run_id)
    assert events[-1]["execution_id"] == f"{run_id}:2"


async def test_at_each_event_the_store_shows_what_it_tells(redis_url: str) -> None:
    """EVT-22, STRM-04: read at the moment when a follower hears of it."""
    agent = Agent(
        "scripted", model=Script([call(("look", {"what": "a"})), say("done")]), tools=[look]
    )
    heard: list[str] = []
    async with bench(redis_url, agent) as desk, AsyncFleet(redis_url) as fleet:
        hands = Hands(desk, agent)
        run_id = await fleet.submit(agent, "hello")
        heard_of: dict[str, asyncio.Event] = {}

        async def hear() -> None:
            async for event in fleet.runs.events(run_id, follow=True):
                stored = await fleet.runs.show(run_id)
                payload = event["payload"]
                if event["type"] == "agent.status":
                    assert stored.state.status == payload["status"]
                    heard.append(payload["status"])
                    heard_of.setdefault(payload["status"], asyncio.Event()).set()
                elif event["type"].startswith("agent.step"):
                    assert len(stored.log) >= payload["step_number"]
                    heard_of.setdefault(str(payload["step_number"]), asyncio.Event()).set()
                else:
                    assert event["type"].startswith("agent.tool")
                    done = [one.call_id for step in stored.log for one in step.result.tool_calls]
                    assert payload["tool_call_id"] in done

        async def wait_for(name: str) -> None:
            async with asyncio.timeout(30):
                await heard_of.setdefault(name, asyncio.Event()).wait()

        following = asyncio.create_task(hear())
        await wait_for("queued")
        claim = await desk.claim(run_id)
        await wait_for("in_progress")
        await desk.commit(claim, called(claim))
        await wait_for("1")
        await hands.finish(run_id)
        await asyncio.wait_for(following, 30)
    assert heard == ["queued", "in_progress", "completed"]
