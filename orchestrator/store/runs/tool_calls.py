"""Park, take, keep, leave, deliver: the scripts of waiting steps, bound to records.

Decides nothing: each script decides what the worker of a call may do.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from stepfleet.orchestrator.errors import ConfigurationError, SerializationError
from stepfleet.orchestrator.events.envelope import Events
from stepfleet.orchestrator.limits.limit import NORMAL
from stepfleet.orchestrator.protocol.attempt import Wait
from stepfleet.orchestrator.protocol.claim import Claim, Held, Refusal, Refused, Want, Work, losses
from stepfleet.orchestrator.protocol.verdict import Verdict
from stepfleet.orchestrator.protocol.waiting import Arrived, Delivered, TakenCall, Waiting
from stepfleet.orchestrator.records.calls.answers import Answer, awaited_by
from stepfleet.orchestrator.records.calls.tools import ToolCallRecord
from stepfleet.orchestrator.records.responses import LLMResponse
from stepfleet.orchestrator.records.run.results import LostAttempt, LostKind
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.store.codec import (
    Fields,
    awaited_calls,
    duration,
    milliseconds,
    moment,
    pairs,
    stored_events,
    stored_loss,
    stored_losses,
)
from stepfleet.orchestrator.store.compression import unpacked
from stepfleet.orchestrator.store.dispatch import CallTask, call_label
from stepfleet.orchestrator.store.gateway import Gateway, Opened
from stepfleet.orchestrator.store.lua import detail_of


class ToolCalls(Gateway):
    """The store for tasks of single tool calls.

    `lease` and `grace` are seconds; `worker` is this process's name.
    """

    def __init__(self, opened: Opened) -> None:
        super().__init__(opened)
        self.lease, self.grace = opened.settings.lease, opened.settings.grace
        self.worker = opened.worker

    async def park(
        self, claim: Claim, verdict: Verdict, waiting: Waiting, events: Events
    ) -> list[str]:
        """Let the step wait, and dispatch its calls. Returns the script's answer."""
        tasks = [_task(claim, wait) for wait in waiting.calls]
        in_script = self._dispatch.in_script
        calls = [
            part
            for wait, task in zip(waiting.calls, tasks, strict=True)
            for part in (
                wait.index,
                wait.queue,
                wait.tool,
                "" if _by_people(wait) else self._dispatch.call_message(task),
                wait.key,
                "" if wait.within is None else duration(wait.within),
            )
        ]
        reply: list[str] = await self._scripts.run(
            "park",
            claim.run_id,
            claim.step,
            claim.token,
            len(tasks),
            *calls,
            queues=[
                self._dispatch.key_of(self._dispatch.queue_of(task)) for task in tasks if in_script
            ],
            want=Want.CANCEL if claim.state.stop_requested else "",
            patience=duration(waiting.patience),
            grace=duration(self.grace),
            began=milliseconds(waiting.began),
            spent=duration(waiting.seconds),
            paid=stored_loss(verdict.lost),
            dropped=stored_loss(verdict.dropped),
            failed=stored_losses(verdict.failed, verdict.entered),
            events=stored_events(events),
            event_count=len(events),
        )
        if reply[0] in ("committed", "mine"):
            self._crash("tool-parked")
            if not in_script and reply[1] == "in_progress":
                started = zip(tasks, waiting.calls, strict=True)
                await self._dispatch.publish_calls([one for one, w in started if not _by_people(w)])
        return reply

    async def take(self, hint: Work, token: str) -> TakenCall | Refusal:
        """Take a tool call: fence, lease, load, in one round trip.

        One that this version cannot read is left to a worker that can. Raises `StoreError` when
        Redis stays out of reach.
        """
        reply = await self._run("take", hint, token, duration(self.lease), self.worker)
        if reply[0] != "taken":
            return Refusal(Refused(reply[0]), detail_of(reply))
        try:
            return await self._taken(hint, token, reply)
        except (SerializationError, ConfigurationError) as error:
            await self.leave(hint, token, delay=self.grace * 2, started=False)
            return Refusal(Refused.UNREADABLE, str(error))

    async def keep(self, hint: Work, token: str, seconds: float) -> Held:
        """Renew the lease; `seconds` since it was taken."""
        reply = await self._run("retain", hint, token, duration(self.lease), duration(seconds))
        return Held(ours=reply[0] == "held")

    async def leave(
        self,
        hint: Work,
        token: str,
        *,
        delay: float = 0.0,
        started: bool = True,
        lost: LostAttempt | None = None,
    ) -> None:
        """Give a call back to other workers, dispatched again after `delay` seconds."""
        unstarted = "" if started else "1"
        await self._run("leave", hint, token, duration(delay), unstarted, stored_loss(lost))

    async def deliver(
        self, taken: TakenCall, agent: str, record: ToolCallRecord, seconds: float
    ) -> Delivered:
        """Give a call's result to its run; the last one makes the run go on.

        `seconds` is the time that the call took in all. A result that is too late is noted with it
        as a lost attempt and changes nothing else.
        """
        hint = taken.hint
        step = hint.of_step
        late = LostAttempt(
            kind=LostKind.LATE,
            step=hint.step + 1,
            seconds=seconds,
            reason=f"the result of tool {record.tool_name} came when nobody waited for it",
        )
        reply = await self._pushing.run(
            "deliver",
            hint.run_id,
            hint.step,
            hint.index,
            taken.token,
            record=record.to_json(),
            spent=duration(seconds),
            lost=stored_loss(late),
            grace=duration(self.grace),
            message=self._dispatch.message(step, agent),
        )
        if reply[0] == "mine":
            return Delivered(applied=True)
        if reply[0] == "lost":
            return Delivered(applied=False, status=reply[1])
        self._crash("call-delivered")
        left = int(reply[1])
        if not left and reply[2] == "in_progress":
            await self._dispatch.published(step, agent)
        return Delivered(applied=True, left=left, status=reply[2])

    async def answer(
        self,
        hint: Work,
        key: str,
        answer: Answer,
        agent: str = "",
        events: Events = Events([]),  # noqa: B008 - it cannot change
    ) -> Arrived:
        """Give a call that waits for another run, or a person, its answer; the first one counts.

        A person's decision does not count after the time limit of the call, or of the run. `key`
        names what it waits for (see `wait_key`). `agent` labels the step that goes on, `events` are
        the run's. Raises `StoreError` when Redis stays out of reach.
        """
        step = hint.of_step
        reply = await self._pushing.run(
            "answer",
            hint.run_id,
            hint.step,
            hint.index,
            key,
            answer=answer.to_json(),
            by_person="1" if answer.decision and not answer.decision.by_default else "",
            events=stored_events(events),
            event_count=len(events),
            grace=duration(self.grace),
            message=self._dispatch.message(step, agent),
        )
        self._crash("call-answered")
        if reply[0] == "before":
            return Arrived(applied=False, first=reply[1])
        if reply[0] == "lost":
            return Arrived(applied=False, status=reply[1])
        left = int(reply[1])
        if not left and reply[2] == "in_progress":
            await self._dispatch.published(step, agent)
        return Arrived(applied=True, left=left, status=reply[2])

    async def _taken(self, hint: Work, token: str, reply: Sequence[Any]) -> TakenCall:
        assert hint.index is not None  # noqa: S101 - it names a call
        header: Fields = pairs(reply[2])
        await self._scripts.ensure_version(hint.run_id, header)
        config = await self._configs.of_run(header)
        try:
            response = LLMResponse.from_json(reply[3])
            state = AgentState.from_json(unpacked(header["slim"]))
        except ValidationError as error:
            raise SerializationError(f"a record of the run cannot be read: {error}") from error
        waits = awaited_calls(header)
        return TakenCall(
            hint=hint,
            token=token,
            now=moment(reply[1]),
            call=(response.tool_calls or ())[hint.index],
            config=config,
            execution=state.info.execution,
            custom_state=state.custom_state,
            metadata=state.metadata,
            batch_id=header.get("batch") or None,
            line_id=header.get("line") or None,
            parent=state.parent_agent_id,
            attempt=int(reply[4]),
            losses=losses(int(reply[5]), reply[6], hint.step, new=reply[7] == "1"),
            tenant=header.get("tenant"),
            priority=int(header.get("priority") or NORMAL),
            depth=int(header.get("depth") or 0),
            limited=bool(header.get("limited_by")),
            billed=header.get("billed"),
            place=next((one.queue for one in waits if one.index == hint.index), ""),
            until=moment(reply[8]) if reply[8] else None,
        )

    async def _run(self, script: str, hint: Work, token: str, *args: Any) -> Any:
        return await self._scripts.run(script, hint.run_id, hint.step, hint.index, token, *args)


def _by_people(wait: Wait) -> bool:
    awaited = awaited_by(wait.queue)
    return awaited is not None and awaited.by_people


def _task(claim: Claim, wait: Wait) -> CallTask:
    hint = Work(claim.run_id, claim.step, wait.index)
    return CallTask(hint, wait.queue, call_label(claim.config.name, claim.step, wait.tool))
