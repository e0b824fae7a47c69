"""The calls of a step as they are made: each is admitted, and none is lost to the ledger.

What calls may have cost stays with the attempt until a record has it: the step, the journal, or an
entry of the ledger. Nothing of it depends on what code behind the call does with an answer.
"""

import asyncio
from collections.abc import Sequence
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
from stepfleet.orchestrator.protocol.lost_attempts import CallEntries, lost_use, of_failed_calls
from stepfleet.orchestrator.records.errors import ModelErrorCode
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest
from stepfleet.orchestrator.records.run.results import LostAttempt
from stepfleet.orchestrator.records.steps import FinishReason
from stepfleet.orchestrator.records.usage import FailedCall, UsageStats
from stepfleet.worker.attempt.usage import (
    call_cost,
    counted,
    failed_call,
    spent_in_vain,
    spent_on,
)
from stepfleet.worker.ports import Around, Call, ModelCalls, StepContext

UNUSED = "UNUSED_ANSWER"
"""The code of a paid call whose answer was not used."""


def made_by(step: StepContext) -> Around:
    """Return what goes around each call of a provider: nearest to it, inside of all other code."""
    ports, config, calls = step.ports, step.claim.config, step.calls

    def made(ask: Call) -> Call:
        async def call(request: ModelRequest) -> LLMResponse:
            if calls.failed:
                await enter_failed(step)
            await ports.admit(step, request)
            if calls.uncalled:
                await enter_call(step)
            calls.called, calls.has_called = request, True
            try:
                response = await ask(request)
            except ModelError as error:
                calls.called = None
                if not error.unsent:
                    error.spent = spent_in_vain(error, request, step.claim, ports)
                    calls.failed.append((error, failed_call(request, error)))
                raise
            calls.called = None
            response = counted(response, request, ports.tokens(request.model))
            allowed, demanded = config.allow_empty_answer, config.demands_answer
            if (empty := no_answer(response, allowed=allowed, demanded=demanded)) is not None:
                empty.spent = spent_on(response, request, config, ports)
                calls.failed.append((empty, failed_call(request, empty)))
                raise empty
            response = without_half_a_call(response)
            calls.answers.append((request.model, response))
            return response

        return call

    return made


async def enter_call(step: StepContext) -> None:
    """Have the store know that a call is made now: from here on it may have been paid for.

    Raises `StoreError`.
    """
    lease = step.lease
    lease.apply(await step.ports.store.note_call(step.claim, lease.seconds, made=True))
    await asyncio.sleep(0)  # where the step is another worker's by now, it ends here
    step.calls.uncalled = False


async def enter_failed(step: StepContext) -> None:
    """Enter what failed calls may have cost, before another one is made: this worker may be lost.

    Raises `StoreError`.
    """
    claim, lease, calls = step.claim, step.lease, step.calls
    if losses := of_failed_calls(claim.number, (call for _, call in calls.failed)):
        entries = CallEntries(losses, calls.entered)
        held = await step.ports.store.journal(claim, lease.seconds, entries=entries)
        lease.apply(held)
        if not held.ours:
            return
        _have_entered(calls, losses)
    for error, _ in calls.failed:
        if isinstance(error, ModelError):
            error.entered = True
    calls.failed.clear()


def is_used(step: StepContext, response: LLMResponse) -> None:
    """Note that a record has this answer; others that were paid for are calls in vain."""
    step.calls.failed += [(None, one) for one in _others(step, response)]
    step.calls.answers.clear()


def entries_with(
    step: StepContext, response: LLMResponse, price: LostAttempt | None
) -> CallEntries:
    """Return what is journaled with an answer: other calls that may have been paid for."""
    calls = [*(call for _, call in step.calls.failed), *_others(step, response)]
    return CallEntries(of_failed_calls(step.claim.number, calls), step.calls.entered, price)


def is_journaled(step: StepContext, response: LLMResponse, entries: CallEntries) -> None:
    """Note that an answer is journaled, with its entries."""
    calls = step.calls
    calls.failed.clear()
    _have_entered(calls, entries.failed)
    is_paid = response.cache is None or not response.cache.hit
    calls.answers = [(_model_of(response, step.claim), response)] if is_paid else []
    calls.journaled = True


def _have_entered(calls: ModelCalls, losses: Sequence[LostAttempt]) -> None:
    """Note that the ledger has these calls of the attempt."""
    if losses:
        calls.entered += len(losses)
        calls.lost += lost_use(losses)


def in_vain(step: StepContext, attempt: Attempt, *, is_logged: bool) -> tuple[LostAttempt, ...]:
    """Return the entries of calls that may have been paid for, and that no record has.

    `is_logged` tells whether the attempt is to be a committed step.
    """
    calls = [call for _, call in step.calls.failed]
    if (response := _answer_in(attempt)) is not None:
        if len(step.calls.answers) > 1:
            calls += _others(step, response)
    elif not step.calls.journaled or is_logged:  # a step's record ends its journal
        calls += [_in_vain(step, *one) for one in _unused(step, attempt)]
    return of_failed_calls(step.claim.number, calls) if calls else ()


def _unused(step: StepContext, attempt: Attempt) -> list[tuple[str, LLMResponse]]:
    """Return the paid answers of an attempt that came to nothing."""
    answers = step.calls.answers
    if isinstance(attempt, Interrupted) and attempt.by is Interruption.LEASE_LOST:
        # What the next owner found open stands for the newest call.
        return answers if step.calls.called else answers[:-1]
    known = step.claim.journal.response
    is_known = known is not None and isinstance(attempt, Failed)
    if known is None or not is_known or (known.cache and known.cache.hit):
        return answers
    return [*answers, (_model_of(known, step.claim), known)]


def _others(step: StepContext, response: LLMResponse) -> list[FailedCall]:
    """Return the calls whose paid answers are not this one."""
    answers = list(step.calls.answers)
    if not (response.cache and response.cache.hit):
        same = [n for n, (_, one) in enumerate(answers) if one.usage is response.usage]
        if answers:
            del answers[same[-1] if same else -1]
    return [_in_vain(step, *one) for one in answers]


def _in_vain(step: StepContext, model: str, response: LLMResponse) -> FailedCall:
    usage = response.usage or UsageStats()
    call = FailedCall(
        model=response.model or model,
        code=UNUSED,
        message="its answer was not used",
        ambiguous=True,
    )
    try:
        cost = call_cost(response, model, step.claim.config, step.ports)
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
        return attempt.answer.response
    return attempt.response if isinstance(attempt, Answered | Interrupted) else None


_LONGEST_WORDS = 500
_CUT = (
    "the answer reached its limit of tokens (settings.max_tokens), perhaps within this call: it was"
    " not executed. Call again, with shorter arguments"
)
_ENDED_BY_THE_MODEL = (FinishReason.STOP, FinishReason.TOOL_CALLS, FinishReason.OTHER)


def no_answer(response: LLMResponse, *, allowed: bool, demanded: bool = False) -> ModelError | None:
    """Return the failure of a call whose answer is empty or broken off; None where there is one.

    `allowed` is the agent's `allow_empty_answer`: it accepts those that the model has ended itself.
    `demanded`: the run wants an answer by its contract, which the words of a refusal are not. Calls
    of an answer that was refused are not made.
    What a filter withheld, or a limit of tokens cut, would be so again: it is not retried.
    """
    reason, text = response.finish_reason, response.content
    has_content = bool(response.tool_calls) or bool(text and not text.isspace())
    is_refused = reason is FinishReason.CONTENT_FILTER and (demanded or bool(response.tool_calls))
    if has_content and reason is not FinishReason.ERROR and not is_refused:
        return None
    if reason is FinishReason.PAUSE:  # half a turn, with calls of the provider's own tools
        return None
    if allowed and reason in _ENDED_BY_THE_MODEL:
        return None
    error = _failure(response)
    error.finish_reason = reason
    if response.request_id:
        error.name_request(response.request_id)
    return error


def without_half_a_call(response: LLMResponse) -> LLMResponse:
    """Return the answer with an error in its last call, where a limit of tokens has cut it.

    Some services send the arguments as far as they came, and these may be sound JSON.
    """
    calls = response.tool_calls
    if response.finish_reason is not FinishReason.LENGTH or not calls:
        return response
    why = f"{_CUT} ({calls[-1].error})" if calls[-1].error else _CUT
    last = calls[-1].model_copy(update={"error": why})
    return response.model_copy(update={"tool_calls": (*calls[:-1], last)})


def _failure(response: LLMResponse) -> ModelError:
    reason = response.finish_reason
    thought = " after it had reasoned" if response.reasoning or response.reasoning_text else ""
    named = f"finish reason {reason.value}"
    if reason is FinishReason.ERROR:
        return ModelError(
            f"the model broke its answer off ({named})",
            retryable=True,
            code=ModelErrorCode.MALFORMED_ANSWER,
        )
    if reason is FinishReason.CONTENT_FILTER:
        text = response.content.strip()[:_LONGEST_WORDS]
        said = f": {text!r}" if text else " without any text"
        calls = ", and its tool calls are not executed" if response.tool_calls else ""
        return ModelError(
            f"the answer was refused{said} ({named}){calls}: change the input",
            code=ModelErrorCode.CONTENT_FILTER,
        )
    if reason is FinishReason.LENGTH:
        return ModelError(
            f"the answer was cut at its limit of tokens before any text{thought} ({named}): "
            "raise settings.max_tokens, or lower the reasoning",
            code=ModelErrorCode.EMPTY_ANSWER,
        )
    if response.unread:  # the same request gets it again, and each time for money
        return ModelError(
            f"the answer has {response.unread} and no text ({named}): an answer is text and calls "
            "of the agent's tools. Ask for text in settings.extra_body or take another model; with "
            "allow_empty_answer=True its text is empty",
            code=ModelErrorCode.INVALID_REQUEST,
        )
    return ModelError(
        f"the answer is empty: no text and no tool call{thought} ({named}). An agent that wants "
        "empty answers has allow_empty_answer=True",
        retryable=True,
        code=ModelErrorCode.EMPTY_ANSWER,
    )
