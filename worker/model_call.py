"""The model call of a step: the request from the state, one call, failures as values."""

from collections.abc import Callable

from stepfleet.orchestrator.errors import (
    AgentException,
    ConfigurationError,
    ContextWindowError,
    ModelError,
    RateLimitError,
)
from stepfleet.orchestrator.memory.pruning import prune_to_token_limit
from stepfleet.orchestrator.protocol.attempt import Failed, Interrupted, Interruption, Span
from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.records.errors import ErrorInfo, ErrorType
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest
from stepfleet.orchestrator.redaction import redact
from stepfleet.orchestrator.tools import ToolRegistry
from stepfleet.worker.ports import AgentCode


def request_of(claim: Claim, tools: ToolRegistry) -> ModelRequest:
    """Return what the model is sent: the whole conversation and the tools on offer."""
    config = claim.config
    return ModelRequest.model_construct(
        model=config.model,
        messages=claim.state.messages,
        tools=tools.specs(),
        tool_choice=config.tool_choice,
        parallel_tool_calls=config.parallel_tool_calls,
        settings=config.settings,
    )


async def call_model(claim: Claim, agent: AgentCode, crash: Callable[[str], None]) -> LLMResponse:
    """Return the journaled answer if there is one, else make the call.

    A conversation that is too long for the model is pruned once and tried again. Raises
    `ModelError`.
    """
    if claim.journal.response is not None:
        return claim.journal.response
    request = request_of(claim, agent.tools)
    crash("during-call")
    try:
        response = await agent.generate(request)
    except ContextWindowError as error:
        pruned = prune_to_token_limit(request.messages, error.limit)
        if len(pruned) == len(request.messages):
            raise
        response = await agent.generate(request.model_copy(update={"messages": pruned}))
    crash("after-reply")
    return response


def failure_of(error: Exception, span: Span) -> Failed:
    """Return a failed attempt, whatever was raised.

    An agent that this worker does not have costs time but no attempt: another may have it.
    """
    match error:
        case RateLimitError():
            return Failed(
                span, error.to_info(), transient=True, limited=True, retry_after=error.retry_after
            )
        case ModelError():
            return Failed(
                span, error.to_info(), transient=error.retryable, retry_after=error.retry_after
            )
        case ConfigurationError():
            return Failed(span, error.to_info(), transient=True, limited=True)
        case AgentException():
            return Failed(span, error.to_info())
        case _:
            info = ErrorInfo(
                type=ErrorType.UNKNOWN,
                code="UNKNOWN_ERROR",
                message=redact(f"{type(error).__name__}: {error}"[:2000]),
            )
            return Failed(span, info)


def broken_off(by: Interruption, span: Span) -> Failed | Interrupted:
    """Return an attempt that was broken off before the model had answered."""
    if by is Interruption.TIMED_OUT:
        message = "the step took longer than the task's time limit"
        return Failed(
            span, ErrorInfo(type=ErrorType.TIMEOUT, code="TIMEOUT_ERROR", message=message)
        )
    return Interrupted(span, by)
