"""Which ends of runs count when equal errors hold a batch, and what becomes of the others. Pure."""

from stepfleet.orchestrator.protocol.attempt import Attempt, Failed
from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.protocol.verdict import Move, Verdict
from stepfleet.orchestrator.records.errors import ErrorInfo, ErrorType, ModelErrorCode

_OF_THE_INPUT = frozenset({ModelErrorCode.CONTEXT_OVERFLOW, ModelErrorCode.CONTENT_FILTER})
"""Permanent errors of one conversation: others of the batch may well complete."""


def holding_error(claim: Claim, attempt: Attempt | None, verdict: Verdict) -> ErrorInfo | None:
    """Return the permanent error with which a run of a batch is about to end; None otherwise.

    Permanent are errors before or in a model call that a repetition would meet again: a refused
    key, an unknown model, a refused request, code of the agent that raises. A tool's error may be
    that of one input.
    """
    if claim.batch_id is None or verdict.move is not Move.FINISH or verdict.error is None:
        return None
    if not isinstance(attempt, Failed) or attempt.transient or attempt.spent:
        return None
    error = attempt.error
    is_of_all = error.type in (ErrorType.MODEL, ErrorType.UNKNOWN) and not error.retryable
    return error if is_of_all and error.code not in _OF_THE_INPUT else None


def held(claim: Claim, number: int) -> Verdict:
    """Return the verdict on a step that waits until its batch is resumed, to be done again."""
    return Verdict(Move.RELEASE, claim.state, hold=number)
