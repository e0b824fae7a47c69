"""One step of a run: claim, execute, decide, commit. THE main path; start reading here.

A tool call that is a task of its own goes the same way: take, execute, deliver. Knows neither
Celery nor Redis: everything outside comes through `ports`. The message is a hint; what is to be
done is read from the run.
"""

import asyncio
import logging
from dataclasses import replace
from functools import partial

from stepfleet.orchestrator.agents.agent import criteria_without_code
from stepfleet.orchestrator.continuation import ContinuationCriteria
from stepfleet.orchestrator.errors import AgentException, StoreError
from stepfleet.orchestrator.events.envelope import Events
from stepfleet.orchestrator.protocol.attempt import (
    Attempt,
    Failed,
    Interrupted,
    Interruption,
    Prevented,
    gave_up,
    not_run,
)
from stepfleet.orchestrator.protocol.claim import Claim, Refusal, Refused, Stance, Work
from stepfleet.orchestrator.protocol.commit_events import events_of
from stepfleet.orchestrator.protocol.guards import poisoned, prevented
from stepfleet.orchestrator.protocol.lost_attempts import lost_use
from stepfleet.orchestrator.protocol.verdict import (
    Facts,
    Move,
    Verdict,
    decide,
    held,
    holding_error,
)
from stepfleet.orchestrator.protocol.waiting import TakenCall
from stepfleet.orchestrator.records.calls.answers import Awaited, awaited_by
from stepfleet.orchestrator.records.calls.tools import ToolCallRecord
from stepfleet.orchestrator.records.run.results import LostAttempt, LostKind
from stepfleet.orchestrator.records.usage import LostUse, Spent
from stepfleet.orchestrator.records.values import value_class
from stepfleet.orchestrator.tools import ToolInvocation
from stepfleet.orchestrator.tools.schemas.time_limit import allowed
from stepfleet.worker.attempt.made_calls import in_vain
from stepfleet.worker.attempt.model_call import (
    broken_off,
    call_model,
    failure_of,
    guessed,
    log_broken,
)
from stepfleet.worker.attempt.tool_turn import ToolTurn
from stepfleet.worker.leases.lease import Lease, Leases
from stepfleet.worker.ports import AgentCode, Ports, StepContext

log = logging.getLogger(__name__)

CANCELLED = "a cancel was requested"
OF_VALUES = (
    AgentException,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors that a value causes in what writes a step; the store's own are not among them."""
LONGEST_CHECKS = 2.0
"""CPU time for all checks of one answer against schemas, however many calls it has."""


@value_class(frozen=True, slots=True)
class Report:
    """What became of a task: of a step, or of a tool call.

    `refusal` is set when there was nothing to do; `isolated` when an isolated process does it.
    `applied` is true where the run has the result: a step's `verdict`, or the `record` of a call,
    which is None where the call was given back. `attended` is set for a call that waits for another
    run, or a person. `owes` is set where other runs are to learn of the run's end, or of a request
    to it, `is_last` where its batch may have ended with it.
    """

    work: Work
    refusal: Refusal | None = None
    verdict: Verdict | None = None
    record: ToolCallRecord | None = None
    applied: bool = False
    isolated: bool = False
    attended: bool = False
    owes: bool = False
    is_last: bool = False


async def run_work(work: Work, ports: Ports, leases: Leases) -> Report:
    """Do the step, or make the tool call, that `work` names: if it is due and nobody holds it.

    Raises `StoreError` when Redis stays out of reach; what is not committed then is repeated by
    the worker that claims it after the lease.
    """
    token = ports.token()
    claim = await leases.complete(ports.claim(work, token), partial(unclaim, work, token, ports))
    if isinstance(claim, Refusal):
        return Report(work, refusal=claim, owes=claim.owes)
    if isinstance(claim, TakenCall):
        return await make_call(claim, ports, leases)
    with leases.hold(claim) as lease:
        step = StepContext.of(claim, lease, ports)
        criteria, attempt = await execute(step)
        lease.settle()
        write = partial(commit, step, attempt, criteria)
        return await leases.complete(write(), write)


async def unclaim(work: Work, token: str, ports: Ports) -> None:
    """Give back what a cancelled claim may have taken: claim again under its token."""
    claim = await ports.claim(work, token)
    if not isinstance(claim, Refusal):
        await release(claim, ports)


async def release(claim: Claim | TakenCall, ports: Ports, delay: float = 0.0) -> None:
    """Give claimed work back to other workers, due after `delay` seconds."""
    if isinstance(claim, TakenCall):
        await ports.calls.leave(claim.hint, claim.token, delay=delay, started=False)
        return
    while True:
        verdict = Verdict(Move.RELEASE, claim.state, delay=delay)
        if not (await ports.commit(claim, verdict, Events([]))).wanted:
            return
        claim = _cancelled(claim)


async def execute(step: StepContext) -> tuple[ContinuationCriteria, Attempt | None]:
    """Execute the step, unless an isolated process does: then the attempt is None."""
    ports = step.ports
    if step.claim.crashes and ports.isolation:
        with ports.pacing.aside:
            if await ports.isolation(step.lease, ports):
                return ContinuationCriteria(), None
    return await execute_here(step)


async def execute_here(step: StepContext) -> tuple[ContinuationCriteria, Attempt]:
    """Make the model call and run its tools. Every failure comes back as a value."""
    config = step.claim.config
    if step.claim.broken is not None:
        return criteria_without_code(config), Failed(step.span, step.claim.broken)
    try:
        return await _executed(step)
    except StoreError:
        raise  # the store is away: nothing of this attempt can be written, and the lease runs out
    except Exception as error:  # noqa: BLE001 - also where an attempt is only brought to its end
        return criteria_without_code(config), failure_of(error, step.span, step.calls.remembered)


async def _executed(step: StepContext) -> tuple[ContinuationCriteria, Attempt]:
    claim, ports = step.claim, step.ports
    try:
        agent = ports.agent(claim.config)
        criteria, reasoner = agent.criteria(claim.config), agent.reasoner(claim.config)
    except Exception as error:  # noqa: BLE001 - the stored limits and policy hold without code
        criteria = criteria_without_code(claim.config)
        if outcome := prevented(claim, criteria):
            return criteria, Prevented(step.span, outcome)
        return criteria, failure_of(error, step.span)
    turn: ToolTurn | None = None
    try:
        if outcome := poisoned(claim, ports.poison_limit) or prevented(claim, criteria):
            return criteria, Prevented(step.span, outcome)
        if (known := claim.journal.response) is not None:
            turn = ToolTurn(step, agent, known, reasoner)
        else:
            async with ports.pacing.elsewhere:
                response = await call_model(step, agent, reasoner)
                # Before the wait for its turn, in which the answer must not be lost.
                turn = ToolTurn(step, agent, response, reasoner)
        return criteria, await turn.run()
    except asyncio.CancelledError as cancelled:
        return criteria, await _interrupted(step, turn, step.lease.interrupted_by(cancelled))
    except StoreError:
        raise  # the store is away: nothing of this attempt can be written, and the lease runs out
    except Exception as error:  # noqa: BLE001 - no failure may lose a run
        # The attempt's own entry in the ledger has the call that raised it.
        calls = step.calls
        calls.failed = [one for one in calls.failed if one[0] is not error]
        return criteria, failure_of(error, step.span, calls.remembered)


async def _interrupted(step: StepContext, turn: ToolTurn | None, by: Interruption) -> Attempt:
    """Return what there is; what was paid for goes with a step that is handed back."""
    if turn is None:
        return broken_off(by, step)
    if by is Interruption.HANDED_BACK:
        step.lease.settle()
        await turn.keep()
    return turn.interrupted(by)


async def commit(
    step: StepContext, attempt: Attempt | None, criteria: ContinuationCriteria
) -> Report:
    """Decide what follows and write it; decide once more when a cancel arrives meanwhile."""
    claim, ports = step.claim, step.ports
    if attempt is None:
        return Report(claim.hint, isolated=True)
    if isinstance(attempt, Interrupted) and attempt.by is Interruption.CANCELLED:
        claim = _cancelled(claim)
    is_broken = False
    while True:
        facts = Facts(step.lease.now, ports.jitter(), ports.worker, ports.outage_patience)
        try:
            verdict, events = await _judged(step, claim, attempt, criteria, facts)
            done = await ports.commit(claim, verdict, events)
        except StoreError:
            raise
        except OF_VALUES as error:  # a failed step, not a lost worker that others are blamed for
            if is_broken:
                raise
            is_broken, attempt = True, failure_of(error, step.span, step.calls.remembered)
            continue
        if not done.wanted:
            return Report(
                claim.hint,
                verdict=verdict,
                applied=done.applied,
                owes=done.owes,
                is_last=done.is_last,
            )
        claim = _cancelled(claim)


async def _judged(
    step: StepContext,
    claim: Claim,
    attempt: Attempt,
    criteria: ContinuationCriteria,
    facts: Facts,
) -> tuple[Verdict, Events]:
    """Decide, with what the ledger gets; a run whose batch is held waits instead.

    `claim` is that of the step, with a cancel that has arrived since.
    """
    ports = step.ports
    guess = _guessed(claim, attempt, ports) if claim.unpriced else ()
    vain = in_vain(step, attempt, is_logged=True)
    charged = _with_losses(step, claim, vain, guess)
    verdict, events = conclude(charged, attempt, criteria, facts)
    error = holding_error(claim, attempt, verdict)
    if error and ports.hold and (number := await ports.hold(claim, error)):
        verdict, events = held(claim, number), Events([])
    is_logged = verdict.logged is not None
    if not is_logged:
        vain = in_vain(step, attempt, is_logged=False)
    if vain:
        verdict = replace(verdict, failed=vain, entered=step.calls.entered)
    if guess and (is_logged or verdict.move is Move.FINISH):
        verdict = replace(verdict, guess=guess)
    return verdict, events


def _with_losses(
    step: StepContext, claim: Claim, vain: tuple[LostAttempt, ...], guess: tuple[Spent, ...]
) -> Claim:
    """Return the claim with what calls of this step may have cost that no step will have.

    The run's limits count them: those of lost workers by `guess`, and those of this attempt.
    """
    lost = step.calls.lost
    if vain:
        lost += lost_use(vain)
    if guess:
        calls, one = claim.unpriced, guess[0]
        lost += LostUse(calls=0, tokens=calls * one.tokens, cost_usd=calls * one.cost_usd)
    state = claim.state.with_lost(lost)
    return claim if state is claim.state else replace(claim, state=state)


def _guessed(claim: Claim, attempt: Attempt, ports: Ports) -> tuple[Spent, ...]:
    try:
        return guessed(claim, attempt, ports)
    except Exception:  # noqa: BLE001 - the code of prices fails: its calls stay without one
        return ()


def conclude(
    claim: Claim, attempt: Attempt, criteria: ContinuationCriteria, facts: Facts
) -> tuple[Verdict, Events]:
    """Decide, and derive the events; an error in that is a failed step, never a lost one."""
    try:
        with allowed(LONGEST_CHECKS):
            verdict = decide(claim, attempt, criteria, facts)
        if verdict.error is not None:
            log_broken(verdict.outcome)
        return verdict, events_of(claim, attempt, verdict, facts)
    except Exception as error:  # noqa: BLE001 - no failure may lose a run
        failed = failure_of(error, attempt.span)
        verdict = decide(claim, failed, criteria, facts)
        return verdict, events_of(claim, failed, verdict, facts)


def _cancelled(claim: Claim) -> Claim:
    state = claim.state.model_copy(update={"stop_requested": CANCELLED})
    return replace(claim, state=state)


async def make_call(taken: TakenCall, ports: Ports, leases: Leases) -> Report:
    """Make a tool call that is a task of its own; its run waits for it without a slot."""
    work = taken.hint
    try:
        agent = ports.agent(taken.config)
    except Exception as error:  # noqa: BLE001 - whatever is wrong here, another worker may have it
        log.warning("a tool call was left to other workers: %s", error)
        await release(taken, ports, ports.patience)
        return Report(work, refusal=Refusal(Refused.UNREADABLE, str(error)))
    with leases.hold(taken) as lease:
        if awaited := awaited_by(taken.place):
            return await _attend(taken, awaited, agent, lease, ports)
        if taken.crashes and ports.isolation and await ports.isolation(lease, ports):
            return Report(work, isolated=True)
        record = await _record(taken, agent, lease, ports)
        lease.settle()
        if record is None:
            lost = LostAttempt(
                kind=LostKind.INTERRUPTED,
                step=work.step + 1,
                seconds=lease.seconds,
                reason=f"the worker stopped while tool {taken.call.name} ran",
            )
            await ports.calls.leave(work, taken.token, lost=lost)
            return Report(work)
        delivered = await ports.deliver(taken, record, lease.seconds)
    return Report(work, record=record, applied=delivered.applied)


async def _attend(
    taken: TakenCall, awaited: Awaited, agent: AgentCode, lease: Lease, ports: Ports
) -> Report:
    """Look after a call that no tool makes; it is left to others until its next look."""
    delay = ports.patience
    try:
        delay = await ports.attend[awaited](taken, agent)
        ports.crash("call-attended")
    except StoreError:
        raise
    except asyncio.CancelledError:
        delay = 0.0
    except Exception:
        run_id = taken.hint.run_id
        log.exception("tool call %s of run %s is looked at again", taken.call.name, run_id)
    lease.settle()
    await release(taken, ports, delay)
    return Report(taken.hint, attended=True)


async def _record(
    taken: TakenCall, agent: AgentCode, lease: Lease, ports: Ports
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
        index=taken.index,
        attempt=taken.attempt,
        custom_state=taken.custom_state,
    ).within(taken.metadata, taken.batch_id, taken.line_id)
    try:
        ports.crash("during-call-task")
        if (announce := agent.starts_for(taken)) is not None:
            announce(call, lease.now)
        return await ports.toolbox.attempt(call, agent.tools, invocation, clock=lambda: lease.now)
    except asyncio.CancelledError as cancelled:
        by = lease.interrupted_by(cancelled)
        if by is Interruption.HANDED_BACK:
            return None
        record = not_run(call, by, lease.now)
        if by.from_outside and record.error:
            log.warning("tool %s of run %s: %s", call.name, hint.run_id, record.error.message)
        return record
