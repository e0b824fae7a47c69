"""One walk of values: each enters by file, tool, model, metadata, decision and sub-agent.

A value of JSON, its whole numbers of any size, is the same to every reader. What JSON does not have
is refused where it enters, or becomes what the place says; no run hangs, and every reader reads.
"""

import asyncio
import io
import json
import math
import uuid
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.runs.asking_runs import waiting, worked_on
from support.runs.scripted_steps import Script, call, say

from stepfleet.orchestrator import (
    Agent,
    AgentCheckpoint,
    AgentRunResult,
    AsyncFleet,
    ConfigurationError,
    ErrorPolicy,
    tool,
)
from stepfleet.orchestrator.batches.files.openai_format import to_openai_line
from stepfleet.orchestrator.batches.files.tables import ResultTable, cells, select
from stepfleet.orchestrator.batches.results import as_line, full, slim
from stepfleet.orchestrator.cli.approvals import waiting_picture
from stepfleet.orchestrator.cli.look import read_tree, run_data
from stepfleet.orchestrator.cli.terminal import print_json, screen
from stepfleet.orchestrator.cli.trace import trace
from stepfleet.orchestrator.client.fleet import store_of
from stepfleet.orchestrator.client.runs import inputs_of
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.tools.schemas.bounded_json import canonical_json

ANY = {"type": "object", "properties": {"value": {}}, "required": ["value"]}
LARGE = [2**63, 2**64, 18446744073709551616, math.factorial(25), -(10**40), 10**4299]


def deep(levels: int) -> Any:
    value: Any = 2**64
    for _ in range(levels):
        value = [value]
    return value


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=8)
numbers = st.sampled_from(LARGE) | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
sound = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
TAKEN = {
    "NaN": math.nan,
    "infinity": -math.inf,
    "NUL": "\x00",
    "a date": date(2026, 11, 27),
    "a time": datetime(2026, 11, 27, tzinfo=UTC),
    "bytes": b"\xff\x00",
    "a decimal": Decimal("1.10"),
}
"""Metadata and inputs have them as null, as they are, as ISO 8601, as base64, as text."""
REFUSED = {
    "a lone surrogate": ["half \ud83d"],
    "a key of one": {"\udfff": 1},
    "150 levels": deep(150),
    "240 levels": deep(240),
    "1,500 levels": deep(1_500),
    "4,301 digits": 10**4300,
    "5,001 digits": -(10**5000),
    "a key that is a number": {1: 2},
    "a set": {2**70},
    "an object": object(),
}
walking = settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def walker(value: Any, given: Any) -> Agent:
    """Return an agent whose tool, model, sub-agent, question and answer have the value."""

    @tool(read_only=True)
    def echo(value: Any) -> Any:
        """Return something."""
        return given

    @tool(approval=True)
    def pay(value: Any) -> Any:
        """Pay something."""
        return value

    answer = call(("structured_response", {"structured": {"value": value}}))
    child = Agent(
        "child",
        model=Script([answer.model_copy(update={"usage": None}), say("nothing")]),
        output_type={"title": "Found", **ANY},
        time_limit=None,
        token_limit=None,
        max_steps=2,
    )
    turns = [
        *(call((name, {"value": value})) for name in ("echo", "child", "pay")),
        answer,
        say("nothing"),
    ]
    return Agent(
        "walker",
        model=Script([one.model_copy(update={"usage": None}) for one in turns]),
        tools=[echo, pay, child.as_tool(input_type=ANY)],
        output_type={"title": "Found", **ANY},
        prompt="Look at {value}.",
        broadcast="debug",
        error_policy=ErrorPolicy.ignore_tool_errors(),
        time_limit=None,
        token_limit=None,
        max_steps=5,
    )


async def read_by_all(fleet: AsyncFleet, run_id: str) -> AgentRunResult:
    """Read a run in every way that there is; return its result."""
    result = await fleet.runs.result(run_id)
    written = [as_line(make(result)) for make in (full, slim, to_openai_line)]
    written.append(as_line(cells(result, select("id,structured.*,metadata,steps"))))
    assert all(isinstance(json.loads(line), dict) for line in written)
    print_json(full(result))
    timeline = await fleet.runs.timeline(run_id)
    texts = (await store_of(fleet)).timelines
    for step in timeline.steps:
        assert await texts.text(run_id, step.step, "step")
    print_json(timeline.to_dict())
    print_json((await fleet.runs.view(run_id)).to_dict())
    shown = await read_tree(run_id, None, fleet)
    print_json(run_data(shown))
    screen().print(trace(result, inputs_of(shown.run), full=True, debug=True))
    print_json(await fleet.history.snapshot(run_id))
    await fleet.history.tool_traces(run_id)
    checkpoint = await fleet.history.checkpoint(run_id)
    assert AgentCheckpoint.from_json(checkpoint.to_json()) == checkpoint
    copy = await fleet.history.restore(checkpoint, run_id=str(uuid.uuid4()))
    fork = await fleet.history.fork(run_id, at=0)
    for other in (copy, fork):
        await fleet.runs.result(other)
    events = [one async for one in fleet.runs.events(run_id)]
    assert exact_json.loads(exact_json.dumps({"events": events})) == {"events": events}
    assert all((result.summary(), result.replay(), result.explain(), result.trace()))
    with ResultTable(select("id,structured.*,metadata")) as table:
        table.add(result)
        table.write_csv(io.BytesIO())
        table.write_parquet(io.BytesIO())
    return result


async def walk(
    fleet: AsyncFleet, url: str, value: Any, given: Any, metadata: Any
) -> AgentRunResult:
    agent = walker(value, given)
    run_id = await fleet.submit(agent, {"value": metadata}, metadata={"value": metadata})
    async with asyncio.timeout(60), worked_on(url, agent, run_id):
        ended = asyncio.create_task(fleet.runs.wait(run_id))
        asked = asyncio.create_task(waiting(fleet, 1))
        await asyncio.wait([ended, asked], return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            screen().print(waiting_picture(asked.result()))
            print_json(asked.result()[0].to_dict())
            await fleet.decide(run_id)
        asked.cancel()
        await ended
    return await read_by_all(fleet, run_id)


def same(found: Any, value: Any) -> None:
    """Fail unless both are equal, and a whole number is one in both."""
    assert json.dumps(found, sort_keys=True) == json.dumps(value, sort_keys=True)


@given(sound)
@example({"wei": math.factorial(25), "all": LARGE})
@example(deep(90))
@example({"none": 0.0})
@walking
def test_a_value_of_json_is_the_same_to_every_reader(redis_url: str, value: Any) -> None:
    async def run() -> None:
        async with AsyncFleet(redis_url) as fleet:
            result = await walk(fleet, redis_url, value, value, value)
            same(result.metadata, {"value": value})
            assert result.status == "completed"
            same(result.structured, {"value": value})
            same(json.loads(as_line(slim(result)))["structured"], {"value": value})
            content = to_openai_line(result)["response"]["body"]["choices"][0]["message"]["content"]
            same(json.loads(content), {"value": value})
            echo, child, pay = (one.tool_calls[0] for one in result.steps[:3])
            for made in (echo, child, pay):
                assert made.error is None
                same(made.arguments, {"value": value})
            same(echo.result, value)
            assert pay.result == value  # a tool gets 3.0 as 3: JSON has one number type
            same(json.loads(child.result), {"value": value})
            assert child.run is not None
            below = await read_by_all(fleet, child.run.run_id)
            same(below.structured, {"value": value})

    asyncio.run(run())


@pytest.mark.parametrize("name", [*TAKEN, *REFUSED])
async def test_a_value_that_json_does_not_have_never_stops_a_run_or_a_reader(
    fleet: AsyncFleet, redis_url: str, name: str
) -> None:
    """It enters by tool and model, and by metadata and input where these take it."""
    value = (TAKEN | REFUSED)[name]
    returned = await walk(fleet, redis_url, 1, value, 1)
    assert returned.structured == {"value": 1}
    assert returned.steps[0].tool_calls[0].arguments == {"value": 1}
    if name in REFUSED:
        with pytest.raises(
            ConfigurationError, match=r"'input' is (not valid JSON data|nested deeper)"
        ):
            await fleet.submit(walker(1, 1), {"value": value})
        with pytest.raises(
            ConfigurationError, match=r"'metadata' is (not valid JSON data|nested deeper)"
        ):
            await fleet.submit(walker(1, 1), {"value": 1}, metadata={"value": value})
    result = await walk(fleet, redis_url, value, 1, value if name in TAKEN else 1)
    assert canonical_json(result.metadata)
    calls = [call for step in result.steps for call in step.tool_calls]
    assert all(one.error or canonical_json(one.arguments) for one in calls)
    assert result.status is not None
