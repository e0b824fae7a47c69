"""One tool call as a task of its own: take, execute, deliver. The run waits for it without a slot.

Knows neither Celery nor Redis: everything outside comes through `ports`. The message is a hint; the
call's arguments are read from the run's journal.
"""

import asyncio
import logging
from dataclasses import dataclass

from stepfleet.orchestrator.protocol.attempt import Interruption
from stepfleet.orchestrator.protocol.claim import Refusal, Refused
from stepfleet.orchestrator.protocol.refusals import not_run
from stepfleet.orchestrator.protocol.suspicion import Stance
from stepfleet.orchestrator.protocol.waiting import TakenCall, ToolHint, gave_up
from stepfleet.orchestrator.records.run.results import LostAttempt
from stepfleet.orchestrator.records.tools import ToolCallRecord
from stepfleet.orchestrator.tools import ToolInvocation
from stepfleet.worker.attempt.tool_call import attempt_call
from stepfleet.worker.leases.call_lease import CallLease, CallLeases
from stepfleet.worker.ports import AgentCode, CallStore, Ports

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CallReport:
    """What became of a tool task. `refusal` is set when there was nothing to do.

    `record` is None where the call was given back, or was tried `elsewhere`; `applied` tells
    whether the run has it.
    """

    hint: ToolHint
    refusal: Refusal | None = None
    record: ToolCallRecord | None = None
    applied: bool = False
    elsewhere: bool = False


async def run_call(
    hint: ToolHint, calls: CallStore, ports: Ports, leases: CallLeases
) -> CallReport:
    """Make the tool call that `hint` names, if its run waits for it and nobody holds it.

    Raises `StoreError` when Redis stays out of reach; then another worker takes it up after the
    lease.
    """
    token = ports.token()
    try:
        taken = await calls.take(hint, token)
    except asyncio.CancelledError:  # Redis may give it all the same, and nobody would hear
        leases.see_through(_let_go(hint, token, calls))
        raise
    if isinstance(taken, Refusal):
        return CallReport(hint, refusal=taken)
    ports.crash("call-taken")
    try:
        agent = ports.agent(taken.config)
    except Exception as error:  # noqa: BLE001 - whatever is wrong here, another worker may have it
        log.warning("a tool call was left to other workers: %s", error)
        await calls.leave(hint, taken.token, delay=ports.patience, started=False)
        return CallReport(hint, refusal=Refusal(Refused.UNREADABLE, str(error)))
    with leases.hold(taken) as lease:
        if taken.crashes and ports.alone and await ports.alone.tried_call(lease, calls):
            return CallReport(hint, elsewhere=True)
        record = await _attempt(taken, agent, lease, ports)
        lease.settle()
        if record is None:
            await calls.leave(hint, taken.token, lost=_given_up(taken, lease))
            return CallReport(hint)
        ports.crash("call-made")
        delivered = await calls.deliver(taken, taken.config.name, record, lease.seconds)
    return CallReport(hint, record=record, applied=delivered.applied)


async def _attempt(
    taken: TakenCall, agent: AgentCode, lease: CallLease, ports: Ports
) -> ToolCallRecord | None:
    """Return the call's record, whatever happens; None where this worker has to stop."""
    hint, call = taken.hint, taken.call
    if taken.losses.suspicion(ports.poison_limit).stance is Stance.PROVEN:
        return gave_up(call, lease.now, taken.crashes)
    invocation = ToolInvocation.of(
        call,
        run_id=hint.run_id,
        execution=taken.execution,
        step=hint.step + 1,
        index=hint.index,
        attempt=taken.attempt,
        custom_state=taken.custom_state,
    ).within(taken.metadata, taken.batch_id, taken.line_id)
    try:
        ports.crash("during-call-task")
        return await attempt_call(
            call, invocation, agent.tools, ports.toolbox, clock=lambda: lease.now
        )
    except asyncio.CancelledError as cancelled:
        by = lease.broken_off_by(cancelled)
        if by is Interruption.HANDED_BACK:
            return None
        record = not_run(call, by, lease.now)
        if by.from_outside and record.error:
            log.warning("tool %s of run %s: %s", call.name, hint.run_id, record.error.message)
        return record


async def _let_go(hint: ToolHint, token: str, calls: CallStore) -> None:
    """Give back what a `take` that was broken off has taken: ask again under its token."""
    if not isinstance(await calls.take(hint, token), Refusal):
        await calls.leave(hint, token, started=False)


def _given_up(taken: TakenCall, lease: CallLease) -> LostAttempt:
    return LostAttempt(
        kind="interrupted",
        step=taken.hint.step + 1,
        seconds=lease.seconds,
        reason=f"the worker stopped while tool {taken.call.name} ran",
    )
