"""The model call of a step: memory, request, circuits, one call; failures are values."""

import asyncio
import logging
from dataclasses import replace
from functools import partial

from stepfleet.orchestrator.agents.reasoner import Reasoner
from stepfleet.orchestrator.errors import (
    AgentException,
    AgentMemoryError,
    ConfigurationError,
    ContextWindowError,
    ModelError,
    ModelTimeoutError,
    RateLimitError,
)
from stepfleet.orchestrator.limits.estimates import FIRST_OUTPUT
from stepfleet.orchestrator.memory.conversation import LONGEST_MESSAGE, summary_request
from stepfleet.orchestrator.memory.policy import context_for
from stepfleet.orchestrator.memory.pruning import chosen, estimate_tokens
from stepfleet.orchestrator.memory.window import History, advance, shown, token_budget
from stepfleet.orchestrator.models.pricing.prices import tier_of
from stepfleet.orchestrator.protocol.attempt import (
    Attempt,
    Failed,
    Interrupted,
    Interruption,
    Span,
)
from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.protocol.verdict import circuit_id
from stepfleet.orchestrator.records.base import well_formed
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.errors import PERMANENT, ErrorInfo, ErrorType, ModelErrorCode
from stepfleet.orchestrator.records.ledger import bare_name
from stepfleet.orchestrator.records.memory_window import Remembered, Summary, Window
from stepfleet.orchestrator.records.outcome import ContinuationOutcome
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest
from stepfleet.orchestrator.records.steps import FinishReason
from stepfleet.orchestrator.records.text.redaction import redact_error
from stepfleet.orchestrator.records.text.tracebacks import traceback_of
from stepfleet.orchestrator.records.usage import Spent, UsageStats
from stepfleet.orchestrator.tools import ToolRegistry, ToolSourceError
from stepfleet.worker.attempt.fallback import first_answer, pruned
from stepfleet.worker.attempt.made_calls import is_used, made_by
from stepfleet.worker.attempt.sanitize import storable, with_own_ids
from stepfleet.worker.attempt.usage import call_cost, counted, spent_without_answer, usage_of
from stepfleet.worker.ports import AgentCode, Call, OpenCircuits, Ports, StepContext
from stepfleet.worker.toolbox.failure_log import log_failure

log = logging.getLogger(__name__)


_FROM_OUTSIDE = {
    Interruption.TIMED_OUT: "the step took longer than the task's time limit",
    Interruption.TERMINATED: "the step's task was revoked and terminated",
}


def request_of(claim: Claim, tools: ToolRegistry, messages: tuple[Message, ...]) -> ModelRequest:
    """Return what the model is sent: the conversation and the tools on offer."""
    config = claim.config
    return ModelRequest.model_construct(
        model=config.model,
        messages=messages,
        tools=tools.specs(),
        tool_choice=config.tool_choice,
        parallel_tool_calls=config.parallel_tool_calls,
        settings=config.settings,
    )


async def call_model(
    step: StepContext, agent: AgentCode, reasoner: Reasoner | None = None
) -> LLMResponse:
    """Make the call.

    Where the first model is out or too small, the agent's next one answers. A conversation that is
    too long for all is pruned once and tried again; what then fits is remembered. Raises
    `ModelError`, or `AgentMemoryError` when a memory fails.
    """
    claim, ports = step.claim, step.ports
    messages, remembered = claim.state.messages, None
    if claim.history is not None:
        messages, remembered = await assemble_memory(step, agent, claim.history)
    if agent.context is not None:
        note = await context_for(agent.context, messages, claim.config.memory.context_tokens)
        messages = (*messages, note) if note else messages
    if agent.tools.late:
        await agent.tools.listed()
    request = request_of(claim, agent.tools, messages)
    if reasoner:
        request = await reasoner.prepare(request, claim.state)
    ports.crash("during-call")
    ask = behind_circuit(step, agent, agent.call_for(claim, made_by(step)))
    response, sent = await first_answer(request, claim.config.models, ask, pruned)
    response = counted(response, sent, ports.tokens(sent.model))
    # The size that a fallback takes does not limit the model that is called first.
    if sent.messages is not request.messages and sent.model == request.model:
        remembered = _with_limit(claim, remembered, sent, ports)
    ports.crash("after-reply")
    if reasoner and response.finish_reason is not FinishReason.PAUSE:
        response = storable(reasoner.interpret(response, claim.state))
    response = with_own_ids(response, claim.state.messages, claim.number)
    return response.model_copy(update={"remembered": remembered}) if remembered else response


def _with_limit(
    claim: Claim, remembered: Remembered | None, sent: ModelRequest, ports: Ports
) -> Remembered:
    """Return what is remembered with the size that the model has taken."""
    before = remembered or Remembered(window=claim.state.window or Window())
    count = ports.tokens(claim.config.model)
    limit = sum(map(count, sent.messages))
    window = before.window.model_copy(update={"limit": limit})
    return before.model_copy(update={"window": window})


def failure_of(error: Exception, span: Span, remembered: Remembered | None = None) -> Failed:
    """Return a failed attempt, whatever was raised, with the memory work that was paid for.

    An agent that this worker does not have costs time but no attempt: another may have it.
    """
    failed = _failure(error, span)
    # The opening of a circuit is logged once, and the first refusals of a model.
    if failed.error.code != ModelErrorCode.CIRCUIT_OPEN and not failed.unsent:
        log_failure("a step", failed.error.message, failed.error.traceback, error)
    return replace(failed, remembered=remembered) if remembered else failed


def _failure(error: Exception, span: Span) -> Failed:
    match error:
        case RateLimitError():
            return Failed(
                span,
                error.to_info(),
                transient=True,
                limited=True,
                retry_after=error.retry_after,
                refused=error.limit,
                unsent=error.unsent,
                spent=None if error.entered else error.spent,
                entered=error.entered,
            )
        case ModelError():
            return Failed(
                span,
                error.to_info(),
                transient=error.retryable,
                retry_after=error.retry_after,
                spent=None if error.entered else error.spent,
                entered=error.entered,
                outage=error.outage,
                finish_reason=error.finish_reason,
            )
        case ToolSourceError():
            return Failed(span, error.to_info(), transient=True)
        case ConfigurationError():
            return Failed(span, error.to_info(), transient=True, limited=True)
        case _:
            return Failed(span, info_of(error))


def log_broken(outcome: ContinuationOutcome | None) -> None:
    """Log the criteria that failed by themselves."""
    for broken in outcome.broken if outcome else ():
        log_failure(f"criterion {broken.criterion!r}", broken.reason, broken.traceback)


def info_of(error: Exception) -> ErrorInfo:
    """Return the record of an error, whatever was raised."""
    if isinstance(error, AgentException):
        return error.to_info()
    message = redact_error(well_formed(f"{type(error).__name__}: {error}"))[:2000]
    return ErrorInfo(
        type=ErrorType.UNKNOWN,
        code="UNKNOWN_ERROR",
        message=message,
        traceback=traceback_of(error),
    )


def broken_off(by: Interruption, step: StepContext) -> Failed | Interrupted:
    """Return an attempt that was interrupted before the model had answered.

    What an operator ended counts as a timeout of the model: as one of its attempts, and as a call
    that was perhaps paid for. Whoever takes a step over prices the call that was handed back.
    """
    claim, called, spent = step.claim, step.calls.called, None
    if called is not None and (by.from_outside or by is Interruption.CANCELLED):
        spent = spent_without_answer(called, claim, step.ports)
    elif called is not None:
        spent = Spent(0, 0.0, model=bare_name(called.model))
    if not by.from_outside:
        return Interrupted(step.span, by, unsent=called is None, spent=spent)
    message = _FROM_OUTSIDE[by]
    log.warning("step %d of run %s was interrupted: %s", claim.number, claim.run_id, message)
    error = ErrorInfo(type=ErrorType.TIMEOUT, code="TIMEOUT_ERROR", message=message, retryable=True)
    return Failed(
        step.span,
        error,
        transient=True,
        remembered=step.calls.remembered,
        spent=spent,
        entered=called is None,
    )


def guessed(claim: Claim, attempt: Attempt, ports: Ports) -> tuple[Spent, ...]:
    """Return the prices of a step's calls whose answers were lost with their workers.

    They have sent what the call in their place did, at its full price; of their output it is not
    known how much was written: `max_tokens`, without that as much as the answer in their place, or
    as the run's calls on average. One for each model of the agent, that of the answer first.
    """
    config, before = claim.config, claim.state.session_usage
    response = getattr(attempt, "response", None) or LLMResponse()
    if response.usage is not None and response.usage.total_tokens:
        prompt, completion = response.usage.prompt_tokens, response.usage.completion_tokens
    else:  # none, or one of the response cache
        prompt = sum(map(estimate_tokens, claim.state.messages))
        completion = before.completion_tokens // max(before.llm_calls, 1) or FIRST_OUTPUT
    completion = config.settings.max_tokens or completion
    usage = usage_of(prompt, completion)
    tier = response.service_tier or tier_of(config.settings.service_tier)
    called = LLMResponse.model_construct(usage=usage, model=response.model, service_tier=tier)
    cost = call_cost(called, config.model, config, ports)
    first = Spent(usage.total_tokens, cost, usage=usage, model=response.model or None)
    unnamed = called.model_copy(update={"model": ""})
    summary_model = config.memory.summary_model
    models = (*config.models, *([summary_model] if summary_model else ()))
    others = (call_cost(unnamed, one, config, ports) for one in models)
    names = map(bare_name, models)
    return (
        replace(first, model=first.model or bare_name(config.model)),
        *(
            replace(first, cost_usd=usd, model=name)
            for name, usd in zip(names, others, strict=True)
        ),
    )


_OF_A_SERVICE = {
    ModelErrorCode.CONNECTION_ERROR,
    ModelErrorCode.SERVER_ERROR,
    ModelErrorCode.TIMEOUT,
}


_FROM_A_SERVICE = {*PERMANENT, ModelErrorCode.RATE_LIMIT, ModelErrorCode.EMPTY_ANSWER} - {
    ModelErrorCode.SETUP
}
"""Only a service that is there answers like this."""


def counts(error: ModelError) -> bool:
    """Return whether the service has failed: no limit of it, nor the caller's own deadline."""
    own = isinstance(error, ModelTimeoutError)
    return error.retryable and error.code in _OF_A_SERVICE and not own


def behind_circuit(step: StepContext, agent: AgentCode, ask: Call) -> Call:
    """Return `ask` behind the circuits of the services that it calls."""
    claim, circuits = step.claim, step.ports.circuits
    if circuits is None:
        return ask

    async def guarded(request: ModelRequest) -> LLMResponse:
        service = agent.service(request) if circuits.watched else ""
        if service:
            _check(claim, service, circuits)
        try:
            response = await ask(request)
        except ModelError as error:
            if counts(error):
                of = await circuits.failed(agent.service(request), claim.run_id, error)
                error.outage = (of,) if of else ()
            elif circuits.watched and error.code in _FROM_A_SERVICE and not error.unsent:
                await circuits.answered(agent.service(request))
            raise
        if circuits.watched and not (response.cache and response.cache.hit):
            await circuits.answered(service or agent.service(request))
        return response

    return guarded


def _check(claim: Claim, service: str, circuits: OpenCircuits) -> None:
    """Raise `ModelError` where the service is out, unless this step is to probe it."""
    of = circuit_id(service)
    if claim.outage and claim.outage.probes and of in claim.outage.circuits:
        return
    if reason := circuits.refusal(service):
        error = ModelError(
            f"{service} is out, no call was made: {reason}",
            retryable=True,
            code=ModelErrorCode.CIRCUIT_OPEN,
        )
        error.outage = (of,)
        raise error


SHORTER = 8
"""By how much messages are shortened for a summary that was too long for its model."""


async def assemble_memory(
    step: StepContext, agent: AgentCode, history: History
) -> tuple[tuple[Message, ...], Remembered | None]:
    """Return the messages that a request shows, and the change to the memory, if any.

    `memory.window` decides about limits; a summary is journaled before anything else may fail, so
    that it is paid for once.

    Raises `ModelError` when a summary cannot be made, `AgentMemoryError` when a policy fails.
    """
    claim = step.claim
    policy = claim.config.memory
    before = claim.state.window or Window()
    counted = token_budget(policy, before) is not None
    count = step.ports.tokens(claim.config.model) if counted else estimate_tokens
    remembered = claim.journal.remembered
    window = remembered.window if remembered else advance(before, history, policy, count)
    if remembered is None and window != before:
        remembered = Remembered(window=window)
        if policy.summarize_after is not None:
            response, remembered = await _summarized(step, agent, history, window)
            await _note(step, remembered)
            is_used(step, response)
            window = remembered.window
    if remembered and remembered.summary:
        history = replace(history, summary=remembered.summary)
    messages = shown(window, history, policy, count)
    if policy.custom is not None:
        messages = await chosen(agent.memory_policy(policy.custom), messages, claim.state)
    return messages, remembered


async def _summarized(
    step: StepContext, agent: AgentCode, history: History, window: Window
) -> tuple[LLMResponse, Remembered]:
    claim = step.claim
    before = claim.state.window.since if claim.state.window else 0
    ask = behind_circuit(step, agent, partial(agent.generate, made=made_by(step)))
    response = await _ask(step, history, history.between(before, window.since), ask)
    if not response.content.strip():
        raise AgentMemoryError("the model returned an empty summary of the conversation")
    model = response.fallback.model if response.fallback else _models(claim)[0]
    usage = response.usage or UsageStats()
    summary = Summary(
        text=response.content.strip(),
        model=response.model or model,
        service_tier=response.service_tier,
        usage=usage.model_copy(update={"llm_calls": 1}),
        usage_reported=response.usage is not None and not response.usage_estimated,
        cost_usd=call_cost(response, model, claim.config, step.ports),
    )
    window = window.model_copy(update={"summary": claim.step})
    return response, Remembered(window=window, summary=summary)


async def _ask(
    step: StepContext, history: History, messages: tuple[Message, ...], ask: Call
) -> LLMResponse:
    models = _models(step.claim)
    earlier = history.summary.text if history.summary else None
    settings = step.claim.config.settings

    def shorter(request: ModelRequest, _: ContextWindowError) -> ModelRequest:
        longest = LONGEST_MESSAGE // SHORTER
        return summary_request(request.model, settings, earlier, messages, longest)

    request = summary_request(models[0], settings, earlier, messages)
    response, sent = await first_answer(request, models, ask, shorter)
    return counted(response, sent, step.ports.tokens(sent.model))


def _models(claim: Claim) -> tuple[str, ...]:
    own = claim.config.memory.summary_model
    return (own,) if own else claim.config.models


async def _note(step: StepContext, remembered: Remembered) -> None:
    ports, lease = step.ports, step.lease
    ports.crash("before-journal")
    held = await ports.store.journal(step.claim, lease.seconds, remembered=remembered)
    step.calls.remembered = remembered
    ports.crash("after-journal")
    lease.apply(held)
    if lease.interruption:
        await asyncio.sleep(0)
