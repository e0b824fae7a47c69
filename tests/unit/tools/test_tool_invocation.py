import asyncio
from typing import Any

import pytest

from stepfleet.orchestrator import ToolCall, current_invocation
from stepfleet.orchestrator.errors import ToolExecutionError
from stepfleet.orchestrator.tools import ToolInvocation, context_of, running

CALL = ToolCall(id="c1", name="pay", arguments={"to": "Ann", "amount": 5})


def invocation(call: ToolCall = CALL, **changes: Any) -> ToolInvocation:
    where = {"run_id": "r", "execution": 1, "step": 2, "index": 0, **changes}
    return ToolInvocation.of(call, **where)


def test_the_idempotency_key_is_the_same_for_every_attempt_at_a_call() -> None:
    """TOOL-26: neither attempt, nor call id, nor the order of the arguments change it."""
    same = ToolCall(id="c2", name="pay", arguments={"amount": 5, "to": "Ann"})
    assert invocation().idempotency_key == invocation(same, attempt=2).idempotency_key
    assert invocation().idempotency_key == "eff2434d05035aa9c8901804fc7365a2"


@pytest.mark.parametrize(
    "other",
    [
        invocation(run_id="r2"),
        invocation(execution=2),
        invocation(step=3),
        invocation(index=1),
        invocation(CALL.model_copy(update={"name": "refund"})),
        invocation(CALL.model_copy(update={"arguments": {"to": "Ann", "amount": "5"}})),
    ],
)
def test_the_idempotency_key_differs_between_calls(other: ToolInvocation) -> None:
    """TOOL-26: run, execution, step, index, tool and arguments each count."""
    assert other.idempotency_key != invocation().idempotency_key


async def test_the_current_invocation_is_readable_inside_tasks_and_threads() -> None:
    """TOOL-26: tools can read the key."""

    async def in_task() -> str:
        return current_invocation().idempotency_key

    def in_thread() -> str:
        return current_invocation().idempotency_key

    known = invocation()
    with running(known):
        keys = {await asyncio.create_task(in_task()), await asyncio.to_thread(in_thread)}
    assert keys == {known.idempotency_key}
    context = context_of(known)
    task = asyncio.create_task(in_task(), context=context)
    thread = asyncio.create_task(asyncio.to_thread(in_thread), context=context)
    assert {await task, await thread} == {known.idempotency_key}


def test_outside_a_tool_there_is_no_current_invocation() -> None:
    """TOOL-26"""
    with pytest.raises(ToolExecutionError, match="no tool call is running here"):
        current_invocation()
