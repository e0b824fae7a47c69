"""What becomes of calls whose worker was lost, as a service that knows them tells it."""

from collections.abc import Callable
from typing import Any

import pytest
from support.runs.heavy_calls import HEAVY, call_lease_runs_out
from support.runs.opened_runs import lease_runs_out, opened_run
from support.runs.scripted_steps import Crash, Hands, call, say
from support.runs.stored_runs import Bench

from stepfleet.orchestrator import AgentRunResult, CallStatus, Done, current_invocation, tool
from stepfleet.orchestrator.tools import ToolInvocation

ASKED = {"to": "Ann", "amount": 5}
PAY = (call(("pay", ASKED)), say("done"))
Lose = Callable[[Bench, Hands, str, str], Any]


class Bank:
    """A service that keeps its payments by their keys; it knows all that it was ever sent."""

    def __init__(self) -> None:
        self.paid: dict[str, dict[str, Any]] = {}
        self.times = 0
        self.asked: list[ToolInvocation] = []

    def pay(self, to: str, amount: int) -> str:
        self.times += 1
        self.paid[current_invocation().idempotency_key] = {"to": to, "amount": amount}
        return f"paid {amount} to {to}"

    def known(self, invocation: ToolInvocation) -> Done | CallStatus:
        self.asked.append(invocation)
        found = self.paid.get(invocation.idempotency_key)
        if found is None:
            return CallStatus.NOT_DONE
        assert found == invocation.arguments
        return Done(f"paid {found['amount']} to {found['to']}")

    def tool(self, status: Any, queue: str | None) -> Any:
        return tool(name="pay", status=status, queue=queue)(self.pay)


async def lost(desk: Bench, hands: Hands, run_id: str, queue: str | None, point: str) -> None:
    """Lose a worker with the call in its hands: at `tool-started` or `after-tool`."""
    if queue is None:
        hands.crash_at = point
        with pytest.raises(Crash):
            await hands.step(run_id, 0)
        await lease_runs_out(desk, run_id)
        return
    await hands.step(run_id, 0)
    point = {"tool-started": "during-call-task", "after-tool": "call-made"}[point]
    with pytest.raises(Crash):
        await Hands(desk, hands.agent, crash_at=point).call(run_id, 0, 0)
    await call_lease_runs_out(desk, run_id)


async def finished(desk: Bench, hands: Hands, run_id: str, queue: str | None) -> AgentRunResult:
    if queue is not None:
        await hands.call(run_id, 0, 0)
    await hands.finish(run_id)
    return (await desk.stored(run_id)).result()


@pytest.mark.parametrize("queue", [None, HEAVY], ids=["light", "heavy"])
@pytest.mark.parametrize("point", ["tool-started", "after-tool"])
async def test_a_lost_call_is_made_once_where_its_service_knows_it(
    redis_url: str, queue: str | None, point: str
) -> None:
    """TOOL-26: not done is run, done is told; never twice, and never unknown."""
    bank = Bank()
    async with opened_run(redis_url, *PAY, tools=(bank.tool(bank.known, queue),)) as (
        desk,
        hands,
        run_id,
    ):
        await lost(desk, hands, run_id, queue, point)
        result = await finished(desk, hands, run_id, queue)
    (record,) = result.steps[0].tool_calls
    assert (record.result, record.error, record.repeated) == ("paid 5 to Ann", None, True)
    assert bank.times == 1
    (asked,) = bank.asked
    assert (asked.run_id, asked.step, asked.attempt, asked.arguments) == (run_id, 1, 2, ASKED)
    assert result.success


@pytest.mark.parametrize("queue", [None, HEAVY], ids=["light", "heavy"])
async def test_a_service_that_never_saw_28_calls_gets_each_of_them_once(
    redis_url: str, queue: str | None
) -> None:
    """TOOL-26"""
    bank = Bank()
    tools = (bank.tool(bank.known, queue),)
    results: list[AgentRunResult] = []
    async with opened_run(redis_url, *PAY, tools=tools) as (desk, hands, _):
        for _ in range(28):
            run_id = await desk.create()
            await lost(desk, hands, run_id, queue, "tool-started")
            results.append(await finished(desk, hands, run_id, queue))
    assert [one.success for one in results] == [True] * 28
    assert (bank.times, len(bank.paid)) == (28, 28)


async def _knows_nothing(invocation: ToolInvocation) -> CallStatus:
    return CallStatus.UNKNOWN


def _fails(invocation: ToolInvocation) -> str:
    message = "no connection"
    raise OSError(message)


def _tells_nothing(invocation: ToolInvocation) -> None: ...


def _tells_no_result(invocation: ToolInvocation) -> object:
    return object()


@pytest.mark.parametrize("queue", [None, HEAVY], ids=["light", "heavy"])
@pytest.mark.parametrize("hook", [_knows_nothing, _fails, _tells_nothing, _tells_no_result])
async def test_what_nobody_knows_is_not_run_again(
    redis_url: str, queue: str | None, hook: Any
) -> None:
    """TOOL-26: the model is told; a hook that returns None keeps its meaning."""
    bank = Bank()
    async with opened_run(redis_url, *PAY, tools=(bank.tool(hook, queue),)) as (
        desk,
        hands,
        run_id,
    ):
        await lost(desk, hands, run_id, queue, "after-tool")
        result = await finished(desk, hands, run_id, queue)
    error = result.steps[0].tool_calls[0].error
    assert error is not None
    assert (error.code, bank.times) == ("OUTCOME_UNKNOWN", 1)


def _telling(told: Any) -> Callable[[ToolInvocation], Any]:
    def tell(invocation: ToolInvocation) -> Any:
        assert invocation.attempt == 2
        return told

    return tell


@pytest.mark.parametrize("told", ["NOT_DONE", "not done", Done(None), Done("UNKNOWN"), 0, ""])
async def test_whatever_else_a_hook_returns_is_the_result(redis_url: str, told: Any) -> None:
    """TOOL-26: as before; text is never taken for a word of `CallStatus`."""
    bank = Bank()
    async with opened_run(redis_url, *PAY, tools=(bank.tool(_telling(told), None),)) as (
        desk,
        hands,
        run_id,
    ):
        await lost(desk, hands, run_id, None, "after-tool")
        result = await finished(desk, hands, run_id, None)
    (record,) = result.steps[0].tool_calls
    assert (record.result, record.error) == (told.result if isinstance(told, Done) else told, None)


@pytest.mark.parametrize("queue", [None, HEAVY], ids=["light", "heavy"])
async def test_a_running_tool_knows_what_its_run_is_to_its_submitter(
    redis_url: str, queue: str | None
) -> None:
    """Metadata, batch and line; what it does to them stays with it."""
    seen: list[ToolInvocation] = []

    @tool(queue=queue)
    def pay(to: str, amount: int) -> str:
        """Pay."""
        seen.append(current_invocation().model_copy(deep=True))
        current_invocation().metadata["tenant"]["name"] = "spoiled"
        return f"paid {amount} to {to}"

    metadata = {"tenant": {"name": "north"}}
    async with opened_run(redis_url, *PAY, tools=(pay,)) as (desk, hands, _):
        run_id = await desk.create(metadata=metadata, line_id="row-7")
        await hands.step(run_id, 0)
        result = await finished(desk, hands, run_id, queue)
    (one,) = seen
    assert (one.metadata, one.batch_id, one.line_id) == (metadata, "b1", "row-7")
    assert result.metadata == metadata
