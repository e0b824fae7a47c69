"""Ends the wait for people whose time limit is over."""

from stepfleet.orchestrator.events.envelope import Events
from stepfleet.orchestrator.protocol.waiting import TakenCall, decided_event
from stepfleet.orchestrator.records.calls.answers import Answer, Decision
from stepfleet.orchestrator.store.runs.tool_calls import ToolCalls
from stepfleet.worker.ports import AgentCode, Attend

LOOK_AGAIN = 3600.0
"""Seconds after which a call is looked at again whose answer comes by itself: it may be lost."""


def asked_people(calls: ToolCalls) -> Attend:
    """Return what looks after calls that wait for a person."""

    async def attend(taken: TakenCall, agent: AgentCode) -> float:
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
        await calls.answer(
            taken.hint, taken.key, Answer(decision=decision), taken.config.name, Events([event])
        )
        return LOOK_AGAIN

    return attend
