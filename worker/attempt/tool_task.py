"""One tool call as a task of its own: take, execute, deliver. The run waits for it without a slot.

Knows neither Celery nor Redis: everything outside comes through `ports`. The message is a hint; the
call's arguments are read from the run's journal.
"""

import asyncio
import logging
from dataclasses import dataclass
from functools import partial

from stepfleet.orchestrator.errors import StoreError
from stepfleet.orchestrator.protocol.attempt import Interruption, gave_up, not_run
from stepfleet.orchestrator.protocol.claim import Refusal, Refused, Stance
from stepfleet.orchestrator.protocol.waiting import TakenCall, ToolHint
from stepfleet.orchestrator.records.calls.answers import Awaited, awaited_by
from stepfleet.orchestrator.records.calls.tools import ToolCallRecord
from stepfleet.orchestrator.records.run.results import LostAttempt, LostKind
from stepfleet.orchestrator.tools import ToolInvocation
from stepfleet.worker.attempt.tool_call import attempt_call
from stepfleet.worker.leases.lease import CallLease, Leases
from stepfleet.worker.ports import AgentCode, Ports

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CallReport:
    """The outcome of a tool task. `refusal` is set when there was nothing to do.

    `record` is None where the call was given back, or executed in an `isolated` process; `applied`
    is true where the run has it. `attended` is set for a call that waits for another run, or a
    person.
    """

    hint: ToolHint
    refusal: Refusal | None = None
    record: ToolCallRecord | None = None
    applied: bool = False
    isolated: bool = False
    attended: bool = False


async def run_call(hint: ToolHint, ports: Ports, leases: Leases) -> CallReport:
    """Make the tool call that `hint` names, if its run waits for it and nobody holds it.

    Raises `StoreError` when Redis stays out of reach; then another worker takes it after the
    lease.
    """
    token = ports.token()
    taken = await leases.complete(ports.take(hint, token), partial(_untake, hint, token, ports))
    if isinstance(taken, Refusal):
        return CallReport(hint, refusal=taken)
    try:
        agent = ports.agent(taken.config)
    except Exception as error:  # noqa: BLE001 - whatever is wrong here, another worker may have it
        log.warning("a tool call was left to other workers: %s", error)
        await ports.calls.leave(hint, token, delay=ports.patience, started=False)
        return CallReport(hint, refusal=Refusal(Refused.UNREADABLE, str(error)))
    if awaited := awaited_by(taken.place):
        return await _attend(taken, awaited, agent, ports, leases)
    with leases.hold_call(taken) as lease:
        if taken.crashes and ports.isolation and await ports.isolation.takes(lease, ports):
            return CallReport(hint, isolated=True)
        record = await _attempt(taken, agent, lease, ports)
        lease.settle()
        if record is None:
            await ports.calls.leave(hint, token, lost=_interrupted(taken, lease))
            return CallReport(hint)
        delivered = await ports.deliver(taken, record, lease.seconds)
    return CallReport(hint, record=record, applied=delivered.applied)


async def _attend(
    taken: TakenCall, awaited: Awaited, agent: AgentCode, ports: Ports, leases: Leases
) -> CallReport:
    """Look after a call that no tool makes; it is left to others until its next look."""
    hint = taken.hint
    with leases.hold_call(taken) as lease:
        delay = ports.patience
        try:
            delay = await ports.attend(taken, awaited, agent) if ports.attend else delay
            ports.crash("call-attended")
        except StoreError:
            raise
        except asyncio.CancelledError:
            delay = 0.0
        except Exception:
            log.exception("tool call %s of run %s is looked at again", taken.call.name, hint.run_id)
        lease.settle()
        await ports.calls.leave(hint, taken.token, delay=delay, started=False)
    return CallReport(hint, attended=True)


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
        if (announce := agent.starts_for(taken)) is not None:
            announce(call, lease.now)
        return await attempt_call(
            call, invocation, agent.tools, ports.toolbox, clock=lambda: lease.now
        )
    except asyncio.CancelledError as cancelled:
        by = lease.interrupted_by(cancelled)
        if by is Interruption.HANDED_BACK:
            return None
        record = not_run(call, by, lease.now)
        if by.from_outside and record.error:
            log.warning("tool %s of run %s: %s", call.name, hint.run_id, record.error.message)
        return record


async def _untake(hint: ToolHint, token: str, ports: Ports) -> None:
    """Give back what a cancelled `take` may have taken: take again under its token."""
    if not isinstance(await ports.calls.take(hint, token), Refusal):
        await ports.calls.leave(hint, token, started=False)


def _interrupted(taken: TakenCall, lease: CallLease) -> LostAttempt:
    return LostAttempt(
        kind=LostKind.INTERRUPTED,
        step=taken.hint.step + 1,
        seconds=lease.seconds,
        reason=f"the worker stopped while tool {taken.call.name} ran",
    )
