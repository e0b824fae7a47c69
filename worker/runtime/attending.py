"""Looks after calls that wait: starts and checks child runs, ends the wait for people."""

from collections.abc import Mapping

from stepfleet.orchestrator.agents.sub_agents import AgentTool
from stepfleet.orchestrator.batches.files.lines import input_of
from stepfleet.orchestrator.errors import (
    AgentException,
    ConfigurationError,
    StoreError,
    ToolArgumentsError,
)
from stepfleet.orchestrator.events.envelope import Events
from stepfleet.orchestrator.protocol.waiting import TakenCall, decided_event
from stepfleet.orchestrator.records.calls.answers import Answer, Decision, RunEnd
from stepfleet.orchestrator.records.run.results import RunStatus
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.store.runs.control import PAUSED_BY
from stepfleet.orchestrator.store.runs.submission import NewRun
from stepfleet.orchestrator.store.runs.tool_calls import ToolCalls
from stepfleet.orchestrator.store.store import Store
from stepfleet.worker.ports import AgentCode, Attend
from stepfleet.worker.runtime.links import LinkedRuns, run_end

LOOK_AGAIN = 3600.0
"""Seconds after which a call is looked at again whose answer comes by itself: it may be lost."""
SOON = 5.0
"""Seconds after which a call is looked at again that may have its answer by now."""


class ChildRuns:
    """Looks after calls that are runs. Doing it twice makes one run: its id is the call's key."""

    def __init__(self, opened: Store, linked: LinkedRuns | None = None) -> None:
        self._opened = opened
        self._runs, self._links = opened.runs, opened.links
        self.linked = linked or LinkedRuns(opened)

    async def attend(self, taken: TakenCall, agent: AgentCode) -> float:
        """Start the run of a call, or see to it; returns as `Attend` does.

        A run that ended before this wait began, since its caller was retried, is used where it
        completed, and else retried itself.
        """
        header = await self._header(taken.key)
        if header:
            return await self._check(taken, header)
        tool = agent.tools.get(taken.call.name)
        if not isinstance(tool, AgentTool):
            return await self._refuse(taken, "?", f"tool {tool.name!r} is not an agent any more")
        try:
            run = await self._new(taken, tool)
        except (ConfigurationError, ToolArgumentsError) as error:
            return await self._refuse(taken, tool.config.name, str(error))
        if await self._opened.submission.create(run):
            self._opened.crash("run-started")
            await self._opened.submission.publish([run])
        await self._follow_caller(taken)
        return LOOK_AGAIN

    async def _new(self, taken: TakenCall, tool: AgentTool) -> NewRun:
        if taken.depth >= (deepest := taken.config.sub_agent_limits.depth):
            msg = (
                f"runs may be started {deepest} levels deep (sub_agent_limits.depth), and this "
                "one would be below"
            )
            raise ConfigurationError(msg)
        config, arguments = tool.config, tool.check(taken.call.arguments)
        return NewRun(
            run_id=taken.key,
            agent=config.name,
            config=await self._opened.configs.save(config),
            messages=input_of(tool.input_of(arguments), "input", config.prompt),
            max_steps=config.max_steps,
            model=config.model,
            metadata=taken.metadata,
            parent=taken.hint.run_id,
            tenant=taken.tenant,
            priority=taken.priority,
            returns_to=taken.hint,
            depth=taken.depth + 1,
            billed=taken.batch_id or taken.billed,
            limited=taken.limited and bool(taken.batch_id or taken.billed),
        )

    async def _check(self, taken: TakenCall, header: Mapping[str, str]) -> float:
        child, status = taken.key, Lifecycle(header["status"])
        if status.is_terminal and header.get("returns") == "1":
            await self.linked.settle(child)
            return SOON
        if status.is_terminal:
            return await self._again(taken)
        if header.get(PAUSED_BY) == taken.hint.run_id:
            await self.linked.control.resume(child)
        await self._links.follow(child, taken.hint)
        await self._follow_caller(taken)
        return LOOK_AGAIN

    async def _again(self, taken: TakenCall) -> float:
        result = (await self._runs.get(taken.key)).result()
        if result.status is not RunStatus.COMPLETED:
            try:
                await self.linked.control.retry(taken.key, {})
            except StoreError:
                raise
            except AgentException:  # it would end at once again, or another one has retried it
                pass
            if await self._links.follow(taken.key, taken.hint) is None:
                await self._follow_caller(taken)
                return LOOK_AGAIN
            result = (await self._runs.get(taken.key)).result()
        return await self._answer(taken, run_end(result, taken.config.sub_agent_limits.output))

    async def _follow_caller(self, taken: TakenCall) -> None:
        """Do to the run what was done to its caller meanwhile, which may not have known of it.

        A caller whose step is held waits no longer, since nobody takes it before its time is over.
        """
        caller = await self._header(taken.hint.run_id)
        status = Lifecycle(caller["status"]) if caller else Lifecycle.CANCELLED
        if status.is_terminal or caller.get("token"):
            await self.linked.cancel(taken.key, taken.hint.run_id)
        elif status is Lifecycle.PAUSED:
            await self.linked.pause(taken.key, taken.hint.run_id)

    async def _refuse(self, taken: TakenCall, agent: str, why: str) -> float:
        end = RunEnd(run_id="", agent=agent, status=RunStatus.ERROR, error=why[:2000])
        return await self._answer(taken, end)

    async def _answer(self, taken: TakenCall, end: RunEnd) -> float:
        answer = Answer(run=end)
        await self._opened.calls.answer(taken.hint, taken.key, answer, taken.config.name)
        return LOOK_AGAIN

    async def _header(self, run_id: str) -> dict[str, str]:
        names = ("status", "token", "returns", PAUSED_BY)
        key = self._opened.keys.run(run_id)
        values = await self._opened.connection.execute("HMGET", key, *names)
        return {k: v for k, v in zip(names, values, strict=True) if v is not None}


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
