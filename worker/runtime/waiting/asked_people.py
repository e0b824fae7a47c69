"""Ends the wait for people whose time limit is over: its own room of `Attending`."""

from stepfleet.orchestrator.events.envelope import Events
from stepfleet.orchestrator.protocol.waiting import TakenCall, decided_event
from stepfleet.orchestrator.records.calls.answers import Answer, Decision
from stepfleet.orchestrator.store.runs.steps import StepStore
from stepfleet.worker.ports import AgentCode
from stepfleet.worker.runtime.waiting.attending import LOOK_AGAIN


class AskedPeople:
    """Looks after calls that wait for a person."""

    def __init__(self, store: StepStore) -> None:
        self._calls = store.calls

    async def attend(self, taken: TakenCall, agent: AgentCode) -> float:
        """Decide as the tool says where the time limit is over; a person's decision comes first."""
        if taken.until is not None and taken.until > taken.now:
            return (taken.until - taken.now).total_seconds()
        name = taken.call.name
        tool = agent.tools.get(name) if name in agent.tools else None
        approves = tool is not None and tool.options.approval_default == "approve"
        decision = Decision(
            approved=approves and tool is not None and bool(tool.options.approval),
            at=taken.now,
            reason="nobody decided in time",
            by_default=True,
        )
        event = decided_event(taken.hint, taken.execution, taken.call, decision, taken.now)
        await self._calls.answer(
            taken.hint, taken.key, Answer(decision=decision), taken.config.name, Events([event])
        )
        return LOOK_AGAIN
