"""Steps whose worker, store or permission goes away: what was done and paid for is kept."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from support.deadlines import until
from support.runs.opened_runs import Opened, lease_runs_out, opened_run
from support.runs.scripted_steps import Crash, Hands, Script, call, requests, say
from support.runs.stored_runs import with_settings
from support.runs.tools import look
from support.servers.redis_servers import RedisServer

from stepfleet.orchestrator import (
    Agent,
    LLMResponse,
    ModelRequest,
    RunStatus,
    StopReason,
    StoreError,
    current_invocation,
    tool,
)
from stepfleet.orchestrator.errors import RateLimitError
from stepfleet.orchestrator.protocol.attempt import Interruption
from stepfleet.orchestrator.protocol.claim import Refused, Work
from stepfleet.orchestrator.store.batches.requests import (
    BatchRequest,
)
from stepfleet.worker.engine.bridge import TIME_IS_UP
from stepfleet.worker.engine.concurrency import ConcurrencyLimiter
from stepfleet.worker.step import Report, run_work


async def test_an_answer_that_was_journaled_is_not_paid_for_again(opened: Opened) -> None:
    """TOOL-26, DIST-08: after a crash between tools only the open tool runs."""
    effects: list[str] = []

    @tool
    def first() -> str:
        """Have an effect."""
        effects.append(current_invocation().idempotency_key)
        return "1"

    script = (call(("first", {}), ("look", {"what": "b"})), say("done"))
    async with opened(*script, tools=(first, look)) as (desk, hands, run_id):
        hands.crash_at = "after-journal"
        with pytest.raises(Crash):
            await hands.step(run_id, 0)
        assert effects == []
        await lease_runs_out(desk, run_id)
        crashing = Hands(desk, hands.agent, crash_at="tool-started")
        with pytest.raises(Crash):
            await crashing.step(run_id, 0)
        await lease_runs_out(desk, run_id)
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert len([one for one in requests(hands) if len(one.messages) == 1]) == 1
    assert result.status is RunStatus.ERROR
    assert result.steps[0].tool_calls[0].error is not None
    assert result.steps[0].tool_calls[0].error.code == "OUTCOME_UNKNOWN"
    assert [lost.kind for lost in result.lost_attempts] == ["crash", "crash"]
    assert not any(lost.ambiguous for lost in result.lost_attempts)


async def test_a_finished_tool_is_not_run_again_after_a_crash(opened: Opened) -> None:
    """TOOL-26: its result travelled with the start of the next one."""
    effects: list[str] = []

    @tool
    def effect() -> str:
        """Have an effect."""
        effects.append("done")
        return "effect"

    script = (call(("effect", {}), ("look", {"what": "b"})), say("done"))
    async with opened(*script, tools=(effect, look)) as (desk, hands, run_id):
        hands.crash_at = "tool-started:2"
        with pytest.raises(Crash):
            await hands.step(run_id, 0)
        await lease_runs_out(desk, run_id)
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert effects == ["done"]
    assert result.success
    assert [one.result for one in result.steps[0].tool_calls] == ["effect", "seen b"]
    assert [one.repeated for one in result.steps[0].tool_calls] == [False, True]


async def test_a_status_hook_tells_what_became_of_a_lost_call(opened: Opened) -> None:
    def status(invocation: Any) -> str:
        return f"booked under {invocation.idempotency_key[:4]}"

    @tool(status=status)
    def book() -> str:
        """Book."""
        return "never reached again"

    async with opened(call(("book", {})), say("done"), tools=(book,)) as (desk, hands, run_id):
        hands.crash_at = "tool-started"
        with pytest.raises(Crash):
            await hands.step(run_id, 0)
        await lease_runs_out(desk, run_id)
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.success
    assert str(result.steps[0].tool_calls[0].result).startswith("booked under")


@pytest.mark.parametrize(
    ("point", "committed", "calls"),
    [
        ("after-claim", 0, 2),
        ("before-journal", 0, 3),
        ("after-tools", 0, 2),
        ("before-commit", 0, 2),
        ("after-commit", 1, 2),
    ],
)
async def test_a_crash_at_any_point_loses_nothing(
    opened: Opened, point: str, committed: int, calls: int
) -> None:
    """DIST-08, CKPT-14: only a crash between reply and journal repeats a call, and is listed."""
    script = (call(("look", {"what": "a"})), say("done"))
    async with opened(*script, tools=(look,)) as (desk, hands, run_id):
        hands.crash_at = point
        with pytest.raises(Crash):
            await hands.step(run_id, 0)
        assert (await desk.stored(run_id)).step == committed
        if not committed:
            await lease_runs_out(desk, run_id)
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.success
    assert [step.step for step in result.steps] == [1, 2]
    assert len(requests(hands)) == calls
    ambiguous = [lost for lost in result.lost_attempts if lost.ambiguous]
    assert len(ambiguous) == (1 if point in ("after-claim", "before-journal") else 0)


async def test_a_run_that_ends_its_worker_again_and_again_is_given_up(opened: Opened) -> None:
    """Poison: exactly three deaths that a parent has seen, then an error that names the step."""

    @tool(read_only=True)
    def bomb() -> str:
        """Explode."""
        return "not reached"

    async with opened(call(("bomb", {})), tools=(bomb,)) as (desk, hands, run_id):
        for _ in range(3):
            crashing = Hands(desk, hands.agent, crash_at="tool-started")
            with pytest.raises(Crash):
                await crashing.step(run_id, 0)
            assert await desk.marks.child_died(Work(run_id, 0), "test")
        await hands.step(run_id, 0)
        result = (await desk.stored(run_id)).result()
    assert result.stop_reason is StopReason.ERROR
    assert result.error is not None
    assert "step 1" in result.error
    assert "bomb" in result.error
    assert result.outcome is not None
    assert result.outcome.resolved_by == "PoisonLimit"


async def test_a_cancel_breaks_the_model_call_off(opened: Opened) -> None:
    """RUN-17, DIST-09: and the broken call is listed."""
    started = asyncio.Event()

    async def endless(_: ModelRequest) -> LLMResponse:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with opened(endless) as (desk, hands, run_id):
        step = asyncio.create_task(hands.step(run_id, 0))
        await started.wait()
        answer = await desk.control.cancel(await desk.stored(run_id), "enough")
        assert answer.outcome == "requested"
        lease = hands.leases.held.get(Work(run_id, 0))
        assert lease is not None
        lease.interrupt(Interruption.CANCELLED)
        await asyncio.wait_for(step, 60)
        result = (await desk.stored(run_id)).result()
    assert result.stop_reason is StopReason.USER_REQUESTED
    assert result.steps == ()
    assert [(lost.kind, lost.ambiguous) for lost in result.lost_attempts] == [("interrupted", True)]


async def test_a_cancel_between_tools_answers_every_call(opened: Opened) -> None:
    """MSG-18, DIST-09: no further tool starts, and no call stays without an answer."""
    ran: list[str] = []

    async with opened(say("x")) as (desk, _, _):

        @tool
        async def first() -> str:
            """Cancel the run that runs it."""
            ran.append("first")
            await desk.control.cancel(await desk.stored(current_invocation().run_id), "enough")
            return "1"

        @tool
        async def second() -> str:
            """Never run."""
            ran.append("second")
            return "2"

        script = Script((call(("first", {}), ("second", {})),))
        agent = Agent("scripted", model=script, tools=[first, second])
        desk.agent = agent
        run_id = await desk.create()
        await Hands(desk, agent).step(run_id, 0)
        stored = await desk.stored(run_id)
    assert ran == ["first"]
    assert stored.result().stop_reason is StopReason.USER_REQUESTED
    assert [message.tool_call_id for message in stored.state.messages if message.is_tool()] == [
        "c0",
        "c1",
    ]


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("whole", ["run", "batch", "fleet"])
async def test_a_pause_is_read_before_each_tool(
    opened: Opened, whole: str, *, parallel: bool
) -> None:
    """DIST-09, CKPT-11: the next tool starts when the run goes on; nothing is done twice."""
    ran: list[str] = []

    async with opened(say("x")) as (desk, _, _):
        batches = with_settings(desk.opened, retention=60, grace=1).requests

        async def pause(run_id: str) -> None:
            if whole == "run":
                assert (await desk.control.pause(run_id)).outcome == "requested"
            elif whole == "batch":
                await batches.flag(BatchRequest("b1", 0, "pause", 1, ""))
            else:
                await desk.opened.requests.pause_fleet(paused=True)

        async def asks(_: ModelRequest) -> LLMResponse:
            if parallel:
                await pause(run_id)
            return call(("first", {}), ("second", {}), text="both")

        @tool
        async def first() -> str:
            """Pause the run that runs it."""
            ran.append("first")
            if not parallel:
                await pause(current_invocation().run_id)
            return "1"

        @tool
        async def second() -> str:
            """Run once, though a lost call of it could not be repeated."""
            ran.append("second")
            return "2"

        script = Script((asks, say("done")))
        agent = Agent(
            "scripted", model=script, tools=[first, second], parallel_tool_execution=parallel
        )
        desk.agent = agent
        run_id = await desk.create()
        hands = Hands(desk, agent)
        report = await hands.step(run_id, 0)
        held = (await desk.refused(run_id)).why
        began = await desk.stored(run_id)
        if whole == "fleet":
            await desk.opened.requests.pause_fleet(paused=False)
        else:
            await desk.control.resume(await desk.stored(run_id))
        before = list(ran)
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert (before, report.applied, held) == ([] if parallel else ["first"], True, Refused.PAUSED)
    assert began.state.status == ("in_progress" if whole == "fleet" else "paused")
    assert began.step == 0
    assert ran == ["first", "second"]
    assert len(script.requests) == 2
    assert result.success
    assert [one.result for one in result.steps[0].tool_calls] == ["1", "2"]
    assert not result.lost_attempts


async def test_a_step_that_is_handed_back_keeps_its_journal(opened: Opened) -> None:
    """A stopping worker gives its runs to others at once, with what was done already."""
    waiting = asyncio.Event()

    @tool(read_only=True)
    async def wait(what: str) -> str:
        """Wait."""
        waiting.set()
        if what == "long":
            await asyncio.Event().wait()
        return "waited"

    async with opened(call(("wait", {"what": "long"})), tools=(wait,)) as (desk, hands, run_id):
        step = asyncio.create_task(hands.step(run_id, 0))
        await waiting.wait()
        hands.leases.hand_back()
        await asyncio.wait_for(step, 60)
        heir = await desk.claim(run_id)
    assert heir.crashes == 0
    assert heir.journal.response is not None
    assert len(requests(hands)) == 1


async def test_an_answer_that_waits_for_its_turn_is_handed_back_with_the_step(
    opened: Opened,
) -> None:
    """A worker that stops at full load lets nobody pay for its answers again."""
    pacing = ConcurrencyLimiter(most=1)

    async def while_another_works(_: ModelRequest) -> LLMResponse:
        pacing.enter()
        return say("done")

    async def waits() -> bool:
        return pacing.waiting == 1

    async with opened(while_another_works) as (desk, hands, run_id):
        hands.pacing = pacing
        step = asyncio.create_task(hands.step(run_id, 0))
        await until(waits, within=60)
        hands.leases.hand_back()
        await asyncio.wait_for(step, 60)
        heir = await desk.claim(run_id)
    assert heir.journal.response == say("done")
    assert pacing.at_work == 1


class HeardLate:
    """A store whose first claim is made, and whose reply is under way for ever."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.made = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def claim(self, hint: Work, token: str) -> Any:
        claim = await self._store.claim(hint, token)
        if not self.made.is_set():
            self.made.set()
            await asyncio.Event().wait()
        return claim


async def test_a_claim_whose_reply_nobody_waited_for_leaves_no_lease(opened: Opened) -> None:
    """DIST-11: a worker that is stopped cold in the middle of its claims holds no run."""
    async with opened(say("done")) as (desk, hands, run_id):
        ports = hands.ports()
        late = HeardLate(ports.store)
        late_ports = replace(ports, store=late)
        step = asyncio.create_task(run_work(Work(run_id, 0), late_ports, hands.leases))
        await asyncio.wait_for(late.made.wait(), 60)
        step.cancel()
        await asyncio.wait([step], timeout=60)
        assert step.cancelled()
        await hands.leases.settle(60)
        heir = await desk.claim(run_id)
    assert heir.crashes == 0
    assert requests(hands) == []


async def test_a_time_limit_while_a_commit_waits_for_redis_loses_no_answer(
    own_redis: Callable[..., RedisServer],
) -> None:
    """ERR-32: the step is committed when Redis is back."""
    server = own_redis(appendfsync="always")

    async def answer_as_redis_goes_away(_: ModelRequest) -> LLMResponse:
        server.kill()
        return say("paid for")

    async with opened_run(server.url, answer_as_redis_goes_away) as (desk, hands, run_id):
        connection = desk.opened.connection
        connection.patience = math.inf

        def strike(point: str) -> None:
            """Let the time be up as soon as the step's own commit waits for Redis."""
            if point == "before-commit" and asyncio.current_task() is step:
                asyncio.get_running_loop().call_soon(step.cancel, TIME_IS_UP)

        ports = replace(hands.ports(), crash=strike)
        step = asyncio.create_task(run_work(Work(run_id, 0), ports, hands.leases))
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(step, 60)

        async def has_failed() -> bool:
            return connection._outages.current is not None

        await until(has_failed, within=60, what="the first try to commit")
        server.start()

        async def committed() -> bool:
            return (await desk.header(run_id))["step"] == "1"

        await until(committed, within=60)
        assert (await desk.stored(run_id)).log[0].result.thought == "paid for"


@pytest.mark.parametrize("how", ["cancelled", "time is up"])
async def test_an_interrupt_right_after_a_claim_keeps_a_journaled_answer(
    opened: Opened, how: str
) -> None:
    """What an earlier worker paid for and did is committed, and told as it was."""

    @tool
    def first() -> str:
        """Have an effect."""
        return "1"

    @tool
    def second() -> str:
        """Have an effect."""
        return "2"

    answers = (call(("first", {}), ("second", {}), text="paid"), say("done"))
    tools = (first, second)
    async with opened(*answers, tools=tools, parallel_tool_execution=False) as (desk, hands, run):
        hands.crash_at = "after-journal:2"
        with pytest.raises(Crash):
            await hands.step(run, 0)
        await lease_runs_out(desk, run)
        ports = replace(hands.ports(), crash=partial(_strike_after_the_claim, hands, run, how))
        await asyncio.create_task(run_work(Work(run, 0), ports, hands.leases))
        stored = await desk.stored(run)
    (logged,) = stored.log
    assert logged.result.thought == "paid"
    assert [one.tool_name for one in logged.result.tool_calls] == ["first", "second"]
    assert logged.result.tool_calls[0].result == "1"


def _strike_after_the_claim(hands: Hands, run: str, how: str, point: str) -> None:
    """Interrupt the step in the turn of the loop behind its claim."""
    task = asyncio.current_task()

    def strike() -> None:
        lease = hands.leases.held.get(Work(run, 0))
        assert task is not None
        assert lease is not None
        if how == "cancelled":
            lease.interrupt(Interruption.CANCELLED)
        else:
            task.cancel(TIME_IS_UP)

    if point == "after-claim":
        asyncio.get_running_loop().call_soon(strike)


async def test_a_suspect_step_waits_for_no_turn_before_its_call(opened: Opened) -> None:
    """Nothing could keep what an interruption of that wait would break off."""

    async def trusts(*_: object) -> bool:
        return False

    async with opened(say("done")) as (desk, hands, run_id):
        await desk.claim(run_id)
        await lease_runs_out(desk, run_id)
        pacing = ConcurrencyLimiter(most=1, stuck=3600.0)
        ports = replace(hands.ports(), isolation=trusts, pacing=pacing)

        async def paced() -> Report:
            with ports.pacing:
                return await run_work(Work(run_id, 0), ports, hands.leases)

        with ports.pacing:
            step = asyncio.create_task(paced())

            async def asked() -> bool:
                return bool(requests(hands))

            await until(asked, within=60)
        report = await asyncio.wait_for(step, 60)
    assert report.applied


async def test_a_store_that_goes_away_during_a_step_fails_no_run(opened: Opened) -> None:
    """ERR-25, DIST-12: the attempt is lost, the run is not."""
    async with opened(call(("look", {"what": "a"})), say("done"), tools=(look,)) as (
        desk,
        hands,
        run_id,
    ):
        whole = desk.steps.journal

        async def away(*_: Any, **__: Any) -> None:
            message = "Redis cannot be reached"
            raise StoreError(message)

        desk.steps.journal = away  # type: ignore[assignment, method-assign]
        with pytest.raises(StoreError):
            await hands.step(run_id, 0)
        desk.steps.journal = whole  # type: ignore[method-assign]
        assert (await desk.stored(run_id)).state.status == "in_progress"
        await lease_runs_out(desk, run_id)
        await hands.finish(run_id)
        assert (await desk.stored(run_id)).result().success


async def test_a_cancel_that_meets_a_passing_failure_ends_the_run_at_once(
    opened: Opened,
) -> None:
    """CONT-22: it does not wait for the next attempt."""
    asked = asyncio.Event()
    go_on = asyncio.Event()

    async def fails_later(_: ModelRequest) -> LLMResponse:
        asked.set()
        await go_on.wait()
        message = "later"
        raise RateLimitError(message, retry_after=600.0)

    async with opened(fails_later) as (desk, hands, run_id):
        step = asyncio.create_task(hands.step(run_id, 0))
        await asked.wait()
        await desk.control.cancel(await desk.stored(run_id), "enough")
        go_on.set()
        await asyncio.wait_for(step, 60)
        result = (await desk.stored(run_id)).result()
    assert result.stop_reason is StopReason.USER_REQUESTED
