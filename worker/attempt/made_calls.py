"""The calls of a step as they are made: each is admitted, and none is lost to the ledger.

What calls may have cost stays with the lease until a record has it: the step, the journal, or an
entry of the ledger. Nothing of it depends on what code behind the call does with an answer.
"""

import asyncio
from typing import Any

from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.protocol.attempt import (
    Answered,
    Attempt,
    Failed,
    Interrupted,
    Interruption,
    Parked,
)
from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.protocol.lost_attempts import CallEntries, of_failed_calls
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest
from stepfleet.orchestrator.records.run.results import LostAttempt
from stepfleet.orchestrator.records.usage import FailedCall, UsageStats
from stepfleet.worker.attempt.emptiness import no_answer, without_half_a_call
from stepfleet.worker.attempt.usage import (
    call_cost,
    counted,
    failed_call,
    spent_in_vain,
    spent_on,
)
from stepfleet.worker.leases.lease import Lease
from stepfleet.worker.ports import Around, Call, Ports

UNUSED = "UNUSED_ANSWER"
"""The code of a paid call whose answer was not used."""


def made_by(lease: Lease, ports: Ports) -> Around:
    """Return what goes around each call of a provider: nearest to it, inside of all other code."""

    def made(ask: Call) -> Call:
        async def call(request: ModelRequest) -> LLMResponse:
            if lease.failed:
                await enter_failed(lease, ports)
            if ports.admit is not None:
                await ports.admit(lease, request)
            if lease.uncalled:
                await enter_call(lease, ports)
            lease.called, lease.has_called = request, True
            try:
                response = await ask(request)
            except ModelError as error:
                lease.called = None
                if not error.unsent:
                    error.spent = spent_in_vain(error, request, lease.claim, ports)
                    lease.failed.append((error, failed_call(request, error)))
                raise
            lease.called = None
            response = counted(response, request, ports.tokens(request.model))
            config = lease.claim.config
            allowed, demanded = config.allow_empty_answer, config.demands_answer
            if (empty := no_answer(response, allowed=allowed, demanded=demanded)) is not None:
                empty.spent = spent_on(response, request, config, ports)
                lease.failed.append((empty, failed_call(request, empty)))
                raise empty
            response = without_half_a_call(response)
            lease.answers.append((request.model, response))
            return response

        return call

    return made


async def enter_call(lease: Lease, ports: Ports) -> None:
    """Have the store know that a call is made now: from here on it may have been paid for.

    Raises `StoreError`.
    """
    lease.apply(await ports.store.note_call(lease.claim, lease.seconds, made=True))
    await asyncio.sleep(0)  # where the step is another worker's by now, it ends here
    lease.uncalled = False


async def enter_failed(lease: Lease, ports: Ports) -> None:
    """Enter what failed calls may have cost, before another one is made: this worker may be lost.

    Raises `StoreError`.
    """
    claim = lease.claim
    if losses := of_failed_calls(claim.number, (call for _, call in lease.failed)):
        entries = CallEntries(losses, lease.entered)
        held = await ports.store.journal(claim, lease.seconds, entries=entries)
        lease.apply(held)
        if not held.ours:
            return
        lease.have_entered(losses)
    for error, _ in lease.failed:
        if isinstance(error, ModelError):
            error.entered = True
    lease.failed.clear()


def is_used(lease: Lease, response: LLMResponse, ports: Ports) -> None:
    """Note that a record has this answer; others that were paid for are calls in vain."""
    lease.failed += [(None, one) for one in _others(lease, response, ports)]
    lease.answers.clear()


def entries_with(
    lease: Lease, response: LLMResponse, price: LostAttempt | None, ports: Ports
) -> CallEntries:
    """Return what is journaled with an answer: other calls that may have been paid for."""
    calls = [*(call for _, call in lease.failed), *_others(lease, response, ports)]
    failed = of_failed_calls(lease.claim.number, calls)
    return CallEntries(failed, lease.entered, price)


def is_journaled(lease: Lease, response: LLMResponse, entries: CallEntries) -> None:
    """Note that an answer is journaled, with its entries."""
    lease.failed.clear()
    lease.have_entered(entries.failed)
    is_paid = response.cache is None or not response.cache.hit
    lease.answers = [(_model_of(response, lease.claim), response)] if is_paid else []
    lease.journaled = True


def in_vain(
    attempt: Attempt, lease: Lease, ports: Ports, *, is_logged: bool
) -> tuple[LostAttempt, ...]:
    """Return the entries of calls that may have been paid for, and that no record has.

    `is_logged` tells whether the attempt is to be a committed step.
    """
    calls = [call for _, call in lease.failed]
    if (response := _answer_in(attempt)) is not None:
        if len(lease.answers) > 1:
            calls += _others(lease, response, ports)
    elif not lease.journaled or is_logged:  # a step's record ends its journal
        calls += [_in_vain(*one, lease.claim, ports) for one in _unused(attempt, lease)]
    return of_failed_calls(lease.claim.number, calls) if calls else ()


def _unused(attempt: Attempt, lease: Lease) -> list[tuple[str, LLMResponse]]:
    """Return the paid answers of an attempt that came to nothing."""
    if isinstance(attempt, Interrupted) and attempt.by is Interruption.LEASE_LOST:
        # What the next owner found open stands for the newest call.
        return lease.answers if lease.called else lease.answers[:-1]
    known = lease.claim.journal.response
    is_known = known is not None and isinstance(attempt, Failed)
    if known is None or not is_known or (known.cache and known.cache.hit):
        return lease.answers
    return [*lease.answers, (_model_of(known, lease.claim), known)]


def _others(lease: Lease, response: LLMResponse, ports: Ports) -> list[FailedCall]:
    """Return the calls whose paid answers are not this one."""
    answers = list(lease.answers)
    if not (response.cache and response.cache.hit):
        same = [n for n, (_, one) in enumerate(answers) if one.usage is response.usage]
        if answers:
            del answers[same[-1] if same else -1]
    return [_in_vain(*one, lease.claim, ports) for one in answers]


def _in_vain(model: str, response: LLMResponse, claim: Claim, ports: Ports) -> FailedCall:
    usage = response.usage or UsageStats()
    call = FailedCall(
        model=response.model or model,
        code=UNUSED,
        message="its answer was not used",
        ambiguous=True,
    )
    try:
        cost = call_cost(response, model, claim.config, ports)
    except Exception:  # noqa: BLE001 - the code of prices may be what has failed
        return call
    known: dict[str, Any] = {
        "ambiguous": not usage.total_tokens,
        "tokens": usage.total_tokens,
        "cost_usd": cost,
        "estimated": response.usage_estimated,
        "usage": usage,
        "service_tier": response.service_tier,
    }
    return call.model_copy(update=known)


def _model_of(response: LLMResponse, claim: Claim) -> str:
    return response.fallback.model if response.fallback else claim.config.model


def _answer_in(attempt: Attempt) -> LLMResponse | None:
    if isinstance(attempt, Parked):
        return attempt.otherwise.response
    return attempt.response if isinstance(attempt, Answered | Interrupted) else None
