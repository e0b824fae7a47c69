"""Park, take, keep, leave, deliver: the scripts of waiting steps, bound to records.

Decides nothing: what a call's worker may do says the script, with one answer per question.
"""

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import ValidationError

from stepfleet.orchestrator.agents.overrides import with_stored_overrides
from stepfleet.orchestrator.errors import ConfigurationError, SerializationError
from stepfleet.orchestrator.events.envelope import Events
from stepfleet.orchestrator.protocol.attempt import Wait
from stepfleet.orchestrator.protocol.claim import Claim, Held, Refusal, Refused, StepHint
from stepfleet.orchestrator.protocol.suspicion import losses
from stepfleet.orchestrator.protocol.verdict import Verdict
from stepfleet.orchestrator.protocol.waiting import Delivered, TakenCall, ToolHint, Waiting
from stepfleet.orchestrator.records.responses import LLMResponse
from stepfleet.orchestrator.records.run.results import LostAttempt
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.tools import ToolCallRecord
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store.configs import Configs
from stepfleet.orchestrator.store.dispatch import CallTask, Dispatch, call_label
from stepfleet.orchestrator.store.keys import Keys
from stepfleet.orchestrator.store.lua import run_script
from stepfleet.orchestrator.store.records.codec import Fields, check_version, moment, pairs
from stepfleet.orchestrator.store.records.compression import unpacked
from stepfleet.orchestrator.store.records.events import stored_events
from stepfleet.orchestrator.store.runs.versions import note_version


class ToolCalls:
    """The store as tasks of single tool calls see it.

    `lease` and `grace` are seconds; `crash` is called at points where tests end the process.
    `worker` is this process's name.
    """

    def __init__(
        self,
        connection: Connection,
        keys: Keys,
        configs: Configs,
        dispatch: Dispatch,
        *,
        lease: float,
        grace: float,
        crash: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.lease = lease
        self.grace = grace
        self.worker = ""
        self._connection = connection
        self._keys = keys
        self._configs = configs
        self._dispatch = dispatch
        self._crash = crash

    async def park(
        self, claim: Claim, verdict: Verdict, waiting: Waiting, events: Events
    ) -> list[str]:
        """Let the step wait, and dispatch its calls. Returns the script's answer."""
        tasks = [_task(claim, wait) for wait in waiting.calls]
        in_script = self._dispatch.in_script
        fields = {
            "want": "cancel" if claim.state.stop_requested else "",
            "patience": _ms(waiting.patience),
            "grace": _ms(self.grace),
            "began": round(waiting.began.timestamp() * 1000),
            "spent": _ms(waiting.seconds),
            "paid": _ledger(verdict.lost),
            "dropped": _ledger(verdict.dropped),
            "events": stored_events(events),
            "event_count": len(events),
        }
        calls = [
            part
            for wait, task in zip(waiting.calls, tasks, strict=True)
            for part in (
                wait.index,
                f"{wait.queue}:{wait.tool}",
                self._dispatch.call_message(task),
            )
        ]
        reply: list[str] = await run_script(
            self._connection,
            "park",
            [
                *self._keys.script_keys(claim.run_id, None),
                *(task.queue for task in tasks if in_script),
            ],
            claim.run_id,
            claim.step,
            claim.token,
            len(tasks),
            *calls,
            *(item for pair in fields.items() for item in pair),
        )
        if reply[0] in ("committed", "mine"):
            self._crash("tool-parked")
            if not in_script and reply[1] == "in_progress":
                await self._dispatch.publish_calls(tasks)
        return reply

    async def take(self, hint: ToolHint, token: str) -> TakenCall | Refusal:
        """Take a tool call: fence, lease, load, in one round trip.

        One that this version cannot read is left to a worker that can. Raises `StoreError` when
        Redis stays out of reach.
        """
        reply = await self._run("take", hint, token, _ms(self.lease), self.worker)
        if reply[0] != "taken":
            return Refusal(Refused(reply[0]), str(reply[1]) if len(reply) > 1 else "")
        try:
            return await self._taken(hint, token, reply)
        except (SerializationError, ConfigurationError) as error:
            await self.leave(hint, token, delay=self.grace * 2, started=False)
            return Refusal(Refused.UNREADABLE, str(error))

    async def keep(self, hint: ToolHint, token: str, seconds: float) -> Held:
        """Renew the lease; `seconds` since it was taken."""
        reply = await self._run("retain", hint, token, _ms(self.lease), _ms(seconds))
        return Held(ours=reply[0] == "held")

    async def leave(
        self,
        hint: ToolHint,
        token: str,
        *,
        delay: float = 0.0,
        started: bool = True,
        lost: LostAttempt | None = None,
    ) -> None:
        """Give a call back to other workers, dispatched again after `delay` seconds."""
        unstarted = "" if started else "1"
        await self._run("leave", hint, token, _ms(delay), unstarted, _ledger(lost))

    async def deliver(
        self, taken: TakenCall, agent: str, record: ToolCallRecord, seconds: float
    ) -> Delivered:
        """Give a call's result to its run; the last one makes the run go on.

        `seconds` is the time that the call took in all; a result that comes too late is listed
        with it, and changes nothing else.
        """
        hint = taken.hint
        step = StepHint(hint.run_id, hint.step)
        late = LostAttempt(
            kind="late",
            step=hint.step + 1,
            seconds=seconds,
            reason=f"the result of tool {record.tool_name} came when nobody waited for it",
        )
        fields = {
            "record": record.to_json(),
            "spent": _ms(seconds),
            "lost": _ledger(late),
            "grace": _ms(self.grace),
            "message": self._dispatch.message(step, agent),
        }
        flat = [item for pair in fields.items() for item in pair]
        reply = await self._run("deliver", hint, taken.token, *flat, push=True)
        if reply[0] == "mine":
            return Delivered(applied=True)
        if reply[0] == "lost":
            return Delivered(applied=False, status=reply[1])
        self._crash("call-delivered")
        left = int(reply[1])
        if not left and reply[2] == "in_progress":
            await self._dispatch.published(step, agent)
        return Delivered(applied=True, left=left, status=reply[2])

    async def _taken(self, hint: ToolHint, token: str, reply: Sequence[Any]) -> TakenCall:
        header: Fields = pairs(reply[2])
        if check_version(header):
            await note_version(self._connection, self._keys, hint.run_id)
        config = await self._configs.load(header["config"])
        config = with_stored_overrides(config, header.get("overrides"))
        try:
            response = LLMResponse.from_json(reply[3])
            state = AgentState.from_json(unpacked(header["slim"]))
        except ValidationError as error:
            raise SerializationError(f"a record of the run cannot be read: {error}") from error
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
            attempt=int(reply[4]),
            losses=losses(int(reply[5]), reply[6], hint.step, new=reply[7] == "1"),
        )

    async def _run(
        self, script: str, hint: ToolHint, token: str, *args: Any, push: bool = False
    ) -> list[Any]:
        keys = self._keys.script_keys(hint.run_id, self._dispatch.queue_key if push else None)
        reply: list[Any] = await run_script(
            self._connection, script, keys, hint.run_id, hint.step, hint.index, token, *args
        )
        return reply


def _task(claim: Claim, wait: Wait) -> CallTask:
    hint = ToolHint(claim.run_id, claim.step, wait.index)
    return CallTask(hint, wait.queue, call_label(claim.config.name, claim.step, wait.tool))


def _ledger(lost: LostAttempt | None) -> str:
    return lost.to_json() if lost else ""


def _ms(seconds: float) -> int:
    return max(round(seconds * 1000), 0)
