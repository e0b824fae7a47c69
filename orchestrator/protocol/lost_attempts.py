"""Attempts at a step that are not committed: what they took, and what may have been paid. Pure."""

from collections.abc import Iterable
from typing import Any

from stepfleet.orchestrator.protocol.attempt import Answered, Failed, Interrupted
from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.records.errors import ErrorInfo, ErrorType
from stepfleet.orchestrator.records.ledger import bare_name
from stepfleet.orchestrator.records.memory_window import Remembered
from stepfleet.orchestrator.records.run.results import LostAttempt, LostKind
from stepfleet.orchestrator.records.steps import StepResult
from stepfleet.orchestrator.records.usage import FailedCall, LostUse, UsageStats, sum_usd
from stepfleet.orchestrator.records.values import value_class


@value_class(frozen=True, slots=True)
class CallEntries:
    """The ledger's entries that are journaled: of `failed` calls, after `entered` of this claim.

    `price` is that of the response which is journaled with them, for where it is not used.
    """

    failed: tuple[LostAttempt, ...] = ()
    entered: int = 0
    price: LostAttempt | None = None


NO_ENTRIES = CallEntries()
NOTHING_LOST = LostUse()


def lost_attempt(
    claim: Claim, attempt: Failed | Interrupted, kind: LostKind, error: ErrorInfo | None = None
) -> LostAttempt:
    """Describe an attempt that is not committed because of `error`.

    A refusal or an error answer costs nothing.
    """
    unanswered = (
        isinstance(attempt, Interrupted) and attempt.response is None and not attempt.unsent
    )
    timed_out = (
        isinstance(attempt, Failed)
        and attempt.error.type is ErrorType.TIMEOUT
        and not attempt.entered
    )
    spent = attempt.spent
    return LostAttempt(
        kind=kind,
        step=claim.number,
        # Time before a wait stays in the journal, and counts with the step.
        seconds=attempt.span.seconds - claim.journal.spent,
        ambiguous=unanswered or timed_out or spent is not None,
        tokens=spent.tokens if spent else 0,
        cost_usd=spent.cost_usd if spent and spent.tokens else None,
        estimated=spent is not None and spent.tokens > 0 and spent.estimated,
        model=spent.model if spent else None,
        usage=spent.usage if spent else None,
        service_tier=spent.service_tier if spent else "",
        **because(error),
    )


def because(error: ErrorInfo | None) -> dict[str, Any]:
    """Return the fields of an entry that say which error it is of."""
    if error is None:
        return {}
    return {"reason": error.message, "error_type": error.type, "code": error.code}


def late(claim: Claim, attempt: Answered | Failed, result: StepResult) -> LostAttempt:
    """Return the entry for a step whose commit comes too late."""
    if isinstance(attempt, Failed):
        return lost_attempt(claim, attempt, LostKind.LATE)
    known = claim.journal.response is not None or attempt.noted
    usage, cost = result.usage or UsageStats(), result.cost_usd
    if (remembered := remembered_of(attempt)) and (summary := remembered.summary):
        usage, cost = usage - summary.usage, sum_usd(cost, -summary.cost_usd)  # paid for once
    return LostAttempt.model_construct(
        kind=LostKind.LATE,
        step=claim.number,
        seconds=attempt.span.seconds,
        ambiguous=not known and not result.cached,
        tokens=usage.total_tokens,
        cost_usd=cost,
        model=bare_name(result.model) if result.model == claim.config.model else result.model,
        usage=usage,
        service_tier=result.service_tier,
    )


def in_vain(claim: Claim, attempt: Answered | Failed) -> LostAttempt | None:
    """Return the ledger entry of failed calls that may have been paid for."""
    if not isinstance(attempt, Failed) or claim.journal.response is not None:
        return None
    lost = lost_attempt(claim, attempt, LostKind.FAILED, attempt.error)
    return lost if lost.ambiguous else None


def of_failed_calls(step: int, calls: Iterable[FailedCall]) -> tuple[LostAttempt, ...]:
    """Return the ledger's entries of further calls of `step` (from 1): others were made after them.

    One for each that may have been paid for, under its own model. Answers that nobody used have a
    known price.
    """
    return tuple(
        LostAttempt(
            kind=LostKind.FAILED,
            step=step,
            seconds=0.0,  # the step has them
            ambiguous=one.ambiguous,
            tokens=one.tokens,
            cost_usd=one.cost_usd if one.tokens else None,
            estimated=one.tokens > 0 and one.estimated,
            reason=f"{one.model}: {one.message}",
            code=one.code,
            model=bare_name(one.model),
            usage=one.usage,
            service_tier=one.service_tier,
        )
        for one in calls
        if one.ambiguous or one.tokens
    )


def lost_use(attempts: Iterable[LostAttempt | None]) -> LostUse:
    """Return what calls of attempts that are not committed have cost, or may have."""
    paid = [one for one in attempts if one and one.may_be_paid]
    if not paid:
        return NOTHING_LOST
    return LostUse(
        calls=sum(max(one.usage.llm_calls, 1) if one.usage else 1 for one in paid),
        tokens=sum(one.tokens for one in paid),
        cost_usd=sum_usd(*(one.cost_usd or 0.0 for one in paid)),
    )


def remembered_of(attempt: Answered | Failed) -> Remembered | None:
    """Return the memory work of an attempt."""
    if isinstance(attempt, Failed):
        return attempt.remembered
    return attempt.response.remembered
