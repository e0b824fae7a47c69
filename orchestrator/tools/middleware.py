"""Code around every model call and every tool call of an agent: logging, metrics, caches, guards.

Decides the order alone: the first of the list is the outermost. An agent without any pays nothing.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from stepfleet.orchestrator.records.calls.tools import ToolCall, ToolCallRecord
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest
from stepfleet.orchestrator.tools.invocation import ToolInvocation

NextModel = Callable[[ModelRequest], Awaitable[LLMResponse]]
NextTool = Callable[[ToolCall], Awaitable[ToolCallRecord]]


class Middleware:
    """Override what you need; each method calls `call_next`, or answers in its place.

    One object serves all runs of the agent on a worker, many at once: keep nothing of a call
    in it. It must be quick and must not block.
    """

    async def around_model(self, request: ModelRequest, call_next: NextModel) -> LLMResponse:
        """Make a model call. An exception is the step's error."""
        return await call_next(request)

    async def around_tool(
        self, call: ToolCall, invocation: ToolInvocation, call_next: NextTool
    ) -> ToolCallRecord:
        """Make a tool call. An exception is the call's error."""
        del invocation
        return await call_next(call)


async def through_model(
    layers: Sequence[Middleware], request: ModelRequest, innermost: NextModel
) -> LLMResponse:
    """Make a model call through all layers."""
    call_next = innermost
    for layer in reversed(layers):
        call_next = partial(layer.around_model, call_next=call_next)
    return await call_next(request)


async def through_tool(
    layers: Sequence[Middleware], call: ToolCall, invocation: ToolInvocation, innermost: NextTool
) -> ToolCallRecord:
    """Make a tool call through all layers."""
    call_next = innermost
    for layer in reversed(layers):
        call_next = partial(layer.around_tool, invocation=invocation, call_next=call_next)
    return await call_next(call)
