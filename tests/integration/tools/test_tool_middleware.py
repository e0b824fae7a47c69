"""Middleware around model and tool calls, tool versions and traces: whole steps on a real store."""

import pytest
from support.runs.opened_runs import Opened
from support.runs.scripted_steps import Hands, Script, call, say
from support.runs.stored_runs import bench
from support.runs.tools import look

from stepfleet.orchestrator import (
    Agent,
    AsyncFleet,
    ConfigurationError,
    ErrorPolicy,
    LLMResponse,
    Middleware,
    ModelRequest,
    ToolCall,
    ToolCallRecord,
    tool,
    tool_catalog,
)
from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.tools import NextModel, NextTool, ToolInvocation


@tool
def broken(what: str) -> str:
    """Fail."""
    raise ValueError(what)


class Noting(Middleware):
    """Notes when it is entered and left."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name = name
        self.notes = notes

    async def around_model(self, request: ModelRequest, call_next: NextModel) -> LLMResponse:
        self.notes.append(f"{self.name} > model")
        response = await call_next(request)
        self.notes.append(f"{self.name} < model")
        return response

    async def around_tool(
        self, call: ToolCall, invocation: ToolInvocation, call_next: NextTool
    ) -> ToolCallRecord:
        self.notes.append(f"{self.name} > {call.name} {invocation.step}.{invocation.index}")
        record = await call_next(call)
        self.notes.append(f"{self.name} < {record.result}")
        return record


async def test_layers_go_around_model_and_tool_calls_in_their_order(opened: Opened) -> None:
    """TOOL-22: the first is the outermost."""
    notes: list[str] = []
    layers = (Noting("a", notes), Noting("b", notes))
    script = (call(("look", {"what": "x"})), say("done"))
    async with opened(*script, tools=(look,), middleware=layers) as (desk, hands, run_id):
        await hands.finish(run_id)
        assert (await desk.stored(run_id)).result().success
    model = ["a > model", "b > model", "b < model", "a < model"]
    tools = ["a > look 1.0", "b > look 1.0", "b < seen x", "a < seen x"]
    assert notes == [*model, *tools, *model]


async def test_a_layer_may_answer_in_place_of_the_tool(opened: Opened) -> None:
    class Cached(Middleware):
        async def around_tool(
            self, call: ToolCall, invocation: ToolInvocation, call_next: NextTool
        ) -> ToolCallRecord:
            record = await call_next(call.model_copy(update={"arguments": {"what": "y"}}))
            return record.model_copy(update={"result": f"cached: {record.result}"})

    script = (call(("look", {"what": "x"})), say("done"))
    async with opened(*script, tools=(look,), middleware=(Cached(),)) as (desk, hands, run_id):
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.steps[0].tool_calls[0].result == "cached: seen y"


async def test_a_layer_that_raises_fails_its_call_and_no_other(opened: Opened) -> None:
    class Refusing(Middleware):
        async def around_tool(
            self, call: ToolCall, invocation: ToolInvocation, call_next: NextTool
        ) -> ToolCallRecord:
            if call.arguments["what"] == "no":
                message = "not allowed"
                raise PermissionError(message)
            return await call_next(call)

    script = (call(("look", {"what": "no"}), ("look", {"what": "yes"})), say("done"))
    async with opened(
        *script,
        tools=(look,),
        middleware=(Refusing(),),
        error_policy=ErrorPolicy.ignore_tool_errors(),
    ) as (desk, hands, run_id):
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    refused, seen = result.steps[0].tool_calls
    assert refused.error is not None
    assert "PermissionError: not allowed" in refused.error.message
    assert seen.result == "seen yes"


async def test_what_a_layer_raises_around_the_model_is_the_steps_error(opened: Opened) -> None:
    class Guard(Middleware):
        async def around_model(self, request: ModelRequest, call_next: NextModel) -> LLMResponse:
            message = "blocked by policy"
            raise ModelError(message)

    async with opened(say("never"), middleware=(Guard(),)) as (desk, hands, run_id):
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.error is not None
    assert "blocked by policy" in result.error


async def test_a_run_goes_on_with_the_version_of_a_tool_that_it_began_with(redis_url: str) -> None:
    """TOOL-19: the agent has a newer one by then."""

    def search_of(number: str) -> object:
        @tool(name="versioned_search", version=number)
        def search() -> str:
            """Search."""
            return f"by version {number}"

        return search

    script = Script((call(("versioned_search", {})), say("done")))
    old = Agent("scripted", model=script, tools=[search_of("1")])
    new = Agent("scripted", model=script, tools=[search_of("2")])
    tool_catalog().register(old.tools.get("versioned_search"))
    async with bench(redis_url, old) as desk:
        run_id = await desk.create()
        desk.agent = new
        later = await desk.create()
        hands = Hands(desk, new)
        await hands.finish(run_id)
        await hands.finish(later)
        stored, second = await desk.stored(run_id), await desk.stored(later)
    assert stored.result().steps[0].tool_calls[0].result == "by version 1"
    assert [(one.name, one.version) for one in stored.config.tools] == [("versioned_search", "1")]
    assert second.result().steps[0].tool_calls[0].result == "by version 2"


async def test_tool_traces_are_asked_for_by_name_and_outcome_and_cleared(
    opened: Opened, redis_url: str
) -> None:
    """TOOL-17: by another client than the worker."""
    script = (
        call(("look", {"what": "a"}), ("broken", {"what": "b"})),
        call(("look", {"what": "c"})),
        say("done"),
    )
    async with opened(
        *script, tools=(look, broken), error_policy=ErrorPolicy.ignore_tool_errors()
    ) as (_, hands, run_id):
        await hands.step(run_id, 0)
        async with AsyncFleet(redis_url) as fleet:
            first = await fleet.history.tool_traces(run_id)
            assert [(one.step, one.index) for one in first.all()] == [(1, 0), (1, 1)]
            assert [one.call.tool_name for one in first.failed()] == ["broken"]
            assert await fleet.history.clear_tool_traces(run_id) == 2
            await hands.finish(run_id)
            traces = await fleet.history.tool_traces(run_id)
            last = traces.last()
            assert last is not None
            assert last.call.result == "seen c"
            assert traces.by_name("look") == traces.all() == (last,)
            assert traces.failed() == ()
            assert len((await fleet.runs.result(run_id)).steps[0].tool_calls) == 2
            with pytest.raises(ConfigurationError):
                await fleet.history.tool_traces("nobody")
