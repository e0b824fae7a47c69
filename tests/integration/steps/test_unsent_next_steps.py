"""A process that ends between the commit of a step and the sending of the next step's task."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from support.deadlines import until
from support.runs.scripted_steps import Crash, Hands, Script, call, say
from support.runs.stored_runs import bench
from support.runs.tools import look

from stepfleet.orchestrator import Agent
from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.worker.runtime.rescuer import Rescuer
from stepfleet.worker.step import run_work

GRACE = 0.3


@dataclass
class DyingDispatch:
    """Sends after the commit, as with another broker than the store; its process ends before."""

    real: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def message(self, hint: Work, agent: str) -> str:
        del hint, agent
        return ""

    async def published(self, hint: Work, agent: str) -> None:
        raise Crash(f"before step {hint.step} of {agent} was published")


async def test_a_next_step_that_was_committed_and_not_sent_is_sent_once(redis_url: str) -> None:
    """CONT-25, DIST-06: the decision is in the step's own write; no step is done twice."""
    script = Script((call(("look", {"what": "a"})), say("done")))
    agent = Agent("scripted", model=script, tools=[look])
    async with bench(redis_url, agent, lease=0.5, grace=GRACE) as desk:
        run_id = await desk.create()
        opened = desk.opened
        await opened.connection.execute("DEL", opened.settings.queue)
        hands = Hands(desk, agent)
        dispatch: Any = DyingDispatch(opened.dispatch)
        dying = replace(opened, dispatch=dispatch).steps
        with pytest.raises(Crash):
            await run_work(Work(run_id, 0), replace(hands.ports(), store=dying), hands.leases)
        stored = await desk.stored(run_id)
        assert stored.step == 1
        assert stored.log[0].outcome is not None
        assert stored.log[0].outcome.should_continue
        assert await desk.queued() == 0
        rescuer = Rescuer(
            opened.connection,
            opened.keys,
            opened.dispatch,
            grace=GRACE,
            interval=0.1,
            long_queue=1000,
            jitter=lambda: 0.5,
        )
        assert await until(rescuer.rescue, within=60, what="a rescue") == 1
        assert await desk.queued() == 1
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.success
    assert [step.step for step in result.steps] == [1, 2]
    assert len(script.requests) == 2
