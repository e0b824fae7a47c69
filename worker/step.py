"""One step of a run: claim, execute, decide, commit. THE main path; start reading here.

Knows neither Celery nor Redis: everything outside comes through `ports`.
"""

import asyncio
from dataclasses import dataclass, replace
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
)
from stepfleet.orchestrator.protocol.claim import Claim, Refusal, StepHint
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
from stepfleet.orchestrator.records.usage import LostUse, Spent
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
from stepfleet.worker.ports import Ports

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


@dataclass(frozen=True, slots=True)
class StepReport:
    """What became of a step task.

    `refusal` is set when there was nothing to do; `isolated` when an isolated process does it.
    `owes` is set where other runs are to learn of the run's end, or of a request to it,
    `is_last` where its batch may have ended with it.
    """

    hint: StepHint
    refusal: Refusal | None = None
    verdict: Verdict | None = None
    applied: bool = False
    isolated: bool = False
    owes: bool = False
    is_last: bool = False


async def run_step(hint: StepHint, ports: Ports, leases: Leases) -> StepReport:
    """Do the step that `hint` names, if it is due and nobody holds it.

    Raises `StoreError` when Redis stays out of reach; what is not committed then is repeated by
    the worker that claims the run after the lease.
    """
    token = ports.token()
    claim = await leases.complete(ports.claim(hint, token), partial(unclaim, hint, token, ports))
    if isinstance(claim, Refusal):
        return StepReport(hint, refusal=claim, owes=claim.owes)
    with leases.hold(claim) as lease:
        criteria, attempt = await execute(claim, lease, ports)
        lease.settle()
        write = partial(commit, claim, attempt, criteria, lease, ports)
        return await leases.complete(write(), write)


async def unclaim(hint: StepHint, token: str, ports: Ports) -> None:
    """Give back what a cancelled claim may have taken: claim again under its token."""
    claim = await ports.claim(hint, token)
    if not isinstance(claim, Refusal):
        await release(claim, ports)


async def release(claim: Claim, ports: Ports, delay: float = 0.0) -> None:
    """Give a claimed step back to other workers, due after `delay` seconds."""
    while True:
        verdict = Verdict(Move.RELEASE, claim.state, delay=delay)
        if not (await ports.commit(claim, verdict, Events([]))).wanted:
            return
        claim = _cancelled(claim)


async def execute(
    claim: Claim, lease: Lease, ports: Ports
) -> tuple[ContinuationCriteria, Attempt | None]:
    """Execute the step, unless an isolated process does: then the attempt is None."""
    if claim.crashes and ports.isolation:
        with ports.pacing.aside:
            if await ports.isolation.takes(lease, ports):
                return ContinuationCriteria(), None
    return await execute_here(claim, lease, ports)


async def execute_here(
    claim: Claim, lease: Lease, ports: Ports
) -> tuple[ContinuationCriteria, Attempt]:
    """Make the model call and run its tools. Every failure comes back as a value."""
    if claim.broken is not None:
        return criteria_without_code(claim.config), Failed(lease.span, claim.broken)
    try:
        return await _executed(claim, lease, ports)
    except StoreError:
        raise  # the store is away: nothing of this attempt can be written, and the lease runs out
    except Exception as error:  # noqa: BLE001 - also where an attempt is only brought to its end
        return criteria_without_code(claim.config), failure_of(error, lease.span, lease.remembered)


async def _executed(
    claim: Claim, lease: Lease, ports: Ports
) -> tuple[ContinuationCriteria, Attempt]:
    try:
        agent = ports.agent(claim.config)
        criteria, reasoner = agent.criteria(claim.config), agent.reasoner(claim.config)
    except Exception as error:  # noqa: BLE001 - the stored limits and policy hold without code
        criteria = criteria_without_code(claim.config)
        if outcome := prevented(claim, criteria):
            return criteria, Prevented(lease.span, outcome)
        return criteria, failure_of(error, lease.span)
    turn: ToolTurn | None = None
    try:
        if outcome := poisoned(claim, ports.poison_limit) or prevented(claim, criteria):
            return criteria, Prevented(lease.span, outcome)
        if (known := claim.journal.response) is not None:
            turn = ToolTurn(claim, known, agent, lease, ports, reasoner)
        else:
            async with ports.pacing.elsewhere:
                response = await call_model(claim, agent, lease, ports, reasoner)
                # Before the wait for its turn, in which the answer must not be lost.
                turn = ToolTurn(claim, response, agent, lease, ports, reasoner)
        return criteria, await turn.run()
    except asyncio.CancelledError as cancelled:
        return criteria, await _interrupted(lease.interrupted_by(cancelled), turn, lease, ports)
    except StoreError:
        raise  # the store is away: nothing of this attempt can be written, and the lease runs out
    except Exception as error:  # noqa: BLE001 - no failure may lose a run
        # The attempt's own entry in the ledger has the call that raised it.
        lease.failed = [one for one in lease.failed if one[0] is not error]
        return criteria, failure_of(error, lease.span, lease.remembered)


async def _interrupted(
    by: Interruption, turn: ToolTurn | None, lease: Lease, ports: Ports
) -> Attempt:
    """Return what there is; what was paid for goes with a step that is handed back."""
    if turn is None:
        return broken_off(by, lease, ports)
    if by is Interruption.HANDED_BACK:
        lease.settle()
        await turn.keep()
    return turn.interrupted(by)


async def commit(
    claim: Claim,
    attempt: Attempt | None,
    criteria: ContinuationCriteria,
    lease: Lease,
    ports: Ports,
) -> StepReport:
    """Decide what follows and write it; decide once more when a cancel arrives meanwhile."""
    if attempt is None:
        return StepReport(claim.hint, isolated=True)
    if isinstance(attempt, Interrupted) and attempt.by is Interruption.CANCELLED:
        claim = _cancelled(claim)
    is_broken = False
    while True:
        facts = Facts(lease.now, ports.jitter(), ports.worker, ports.outage_patience)
        try:
            verdict, events = await _judged(claim, attempt, criteria, lease, ports, facts)
            done = await ports.commit(claim, verdict, events)
        except StoreError:
            raise
        except OF_VALUES as error:  # a failed step, not a lost worker that others are blamed for
            if is_broken:
                raise
            is_broken, attempt = True, failure_of(error, lease.span, lease.remembered)
            continue
        if not done.wanted:
            return StepReport(
                claim.hint,
                verdict=verdict,
                applied=done.applied,
                owes=done.owes,
                is_last=done.is_last,
            )
        claim = _cancelled(claim)


async def _judged(
    claim: Claim,
    attempt: Attempt,
    criteria: ContinuationCriteria,
    lease: Lease,
    ports: Ports,
    facts: Facts,
) -> tuple[Verdict, Events]:
    """Decide, with what the ledger gets; a run whose batch is held waits instead."""
    guess = _guessed(claim, attempt, ports) if claim.unpriced else ()
    charged = _with_losses(claim, attempt, guess, lease, ports)
    verdict, events = conclude(charged, attempt, criteria, facts)
    error = holding_error(claim, attempt, verdict)
    if error and ports.hold and (number := await ports.hold(claim, error)):
        verdict, events = held(claim, number), Events([])
    is_logged = verdict.logged is not None
    if failed := in_vain(attempt, lease, ports, is_logged=is_logged):
        verdict = replace(verdict, failed=failed, entered=lease.entered)
    if guess and (is_logged or verdict.move is Move.FINISH):
        verdict = replace(verdict, guess=guess)
    return verdict, events


def _with_losses(
    claim: Claim, attempt: Attempt, guess: tuple[Spent, ...], lease: Lease, ports: Ports
) -> Claim:
    """Return the claim with what calls of this step may have cost that no step will have.

    The run's limits count them: those of lost workers by `guess`, and those of this attempt.
    """
    lost = lease.lost + lost_use(in_vain(attempt, lease, ports, is_logged=True))
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
