"""The toolbox of a worker process: execution with its threads, recall of lost calls, texts."""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from stepfleet.orchestrator.protocol.attempt import unknown_outcome
from stepfleet.orchestrator.records.calls.tools import ToolCall, ToolCallRecord
from stepfleet.orchestrator.records.conversation.messages import result_text
from stepfleet.orchestrator.records.text.redaction import Redactor, redact
from stepfleet.orchestrator.records.text.tracebacks import traceback_of
from stepfleet.orchestrator.tools import (
    CallStatus,
    Done,
    Tool,
    ToolInvocation,
    ToolOptions,
    ToolRegistry,
    ToolSourceError,
)
from stepfleet.orchestrator.tools.definition import is_async
from stepfleet.worker.toolbox.execution import DEFAULT_TIMEOUT, call_through_layers, execute_call
from stepfleet.worker.toolbox.failure_log import log_failure
from stepfleet.worker.toolbox.running import run_function
from stepfleet.worker.toolbox.threads import ToolThreads

log = logging.getLogger(__name__)


class LocalToolbox:
    """Runs tools in this process; `threads` are for plain functions, or their number."""

    def __init__(self, threads: int | ToolThreads) -> None:
        self._threads = ToolThreads(threads) if isinstance(threads, int) else threads
        self._hide = Redactor(os.environ)

    async def attempt(
        self,
        call: ToolCall,
        tools: ToolRegistry,
        invocation: ToolInvocation,
        *,
        clock: Callable[[], datetime],
    ) -> ToolCallRecord:
        """Run one call, or say what is known of it. Raises `asyncio.CancelledError` alone.

        One that was started before, and is not idempotent, is only run again where its tool's
        status hook says that it was not done.
        """
        if invocation.attempt > 1 and tools.late:
            with suppress(ToolSourceError):
                await tools.listed()
            if call.name not in tools:
                return unknown_outcome(call, clock())
        if invocation.attempt > 1 and call.name in tools:
            tool = tools.get(call.name)
            if not tool.idempotent:
                found = await self.recall(call, tool, invocation, clock=clock)
                if not isinstance(found, CallStatus):
                    return found
                if found is not CallStatus.NOT_DONE:
                    return unknown_outcome(call, clock())
        return await self.execute(call, tools, invocation, clock=clock)

    async def execute(
        self,
        call: ToolCall,
        tools: ToolRegistry,
        invocation: ToolInvocation,
        *,
        clock: Callable[[], datetime],
    ) -> ToolCallRecord:
        """Run one call. A tool's failure becomes the record's error; only cancellation raises."""
        once = partial(
            execute_call, tools=tools, invocation=invocation, clock=clock, limiter=self._threads
        )
        if tools.middleware:
            return self._clean(await call_through_layers(call, tools, invocation, clock, once))
        return self._clean(await once(call))

    async def recall(
        self,
        call: ToolCall,
        tool: Tool[..., Any],
        invocation: ToolInvocation,
        *,
        clock: Callable[[], datetime],
    ) -> ToolCallRecord | CallStatus:
        """Ask the tool's status hook what became of a call whose worker was lost.

        The hook gets the invocation, with its idempotency key and the call's arguments. A result
        that it returns is the call's; a failure of the hook leaves the outcome unknown.
        """
        hook: Callable[..., Any] | None = tool.options.status
        if hook is None:
            return CallStatus.UNKNOWN
        known = _known(call, invocation, clock)
        try:
            answer = await self._run(partial(hook, invocation=known), hook, known)
        except Exception as error:  # noqa: BLE001 - hooks may raise anything
            _log(f"the status hook of tool {call.name!r}", error)
            return CallStatus.UNKNOWN
        if answer is None:
            return CallStatus.UNKNOWN
        if isinstance(answer, CallStatus):
            return answer
        return await self._recalled(call, invocation, answer, clock)

    async def needs_approval(
        self,
        call: ToolCall,
        tool: Tool[..., Any],
        invocation: ToolInvocation,
        *,
        clock: Callable[[], datetime],
    ) -> bool:
        """Ask the tool's rule whether a call waits for a person; where it fails, it does."""
        rule: Any = tool.options.approval
        known = _known(call, invocation, clock)
        try:
            return bool(await self._run(partial(rule, known), rule, known))
        except Exception as error:  # noqa: BLE001 - users write rules; none may let a call through
            _log(f"the approval rule of tool {call.name!r}", error)
            return True

    async def _run(
        self, bound: Callable[[], Any], function: Callable[..., Any], known: ToolInvocation
    ) -> Any:
        """Return what a tool's own function answers; a plain one runs in a thread."""
        return await run_function(
            bound,
            known,
            blocking=not is_async(function),
            limiter=self._threads,
            timeout=DEFAULT_TIMEOUT,
        )

    async def _recalled(
        self, call: ToolCall, invocation: ToolInvocation, answer: Any, clock: Callable[[], datetime]
    ) -> ToolCallRecord | CallStatus:
        """Return the record of a call whose result the hook returned, as if it had run here."""
        result = answer.result if isinstance(answer, Done) else answer
        returning = Tool(
            name=call.name,
            description="",
            schema={},
            function=lambda: result,
            check=lambda _: {},
            options=ToolOptions(thread=False),
        )
        record = await execute_call(
            call,
            ToolRegistry().process([returning]),
            invocation,
            clock=clock,
            limiter=self._threads,
        )
        if record.error is not None:
            log.warning(
                "the status hook of tool %r returned no valid result: %s",
                call.name,
                record.error.message,
            )
            return CallStatus.UNKNOWN
        return self._clean(record)

    def _clean(self, record: ToolCallRecord) -> ToolCallRecord:
        """Return the record without secrets of this process's environment."""
        result, kept = self._hide.data(record.result), record.custom_state
        kept = self._hide.data(kept) if kept else kept
        media = record.media
        if media:
            shown = self._hide.data(list(media))
            media = media if shown == list(media) else tuple(shown)
        if result is record.result and kept is record.custom_state and media is record.media:
            return record
        changes = {"result": result, "custom_state": kept, "media": media}
        return record.model_copy(update=changes)

    def text(self, record: ToolCallRecord) -> str:
        """Return what the model reads of a record."""
        return result_text(record)


def _known(
    call: ToolCall, invocation: ToolInvocation, clock: Callable[[], datetime]
) -> ToolInvocation:
    """Return the invocation with the call's arguments, and the time that is left."""
    deadline = clock() + timedelta(seconds=DEFAULT_TIMEOUT)
    return invocation.with_arguments_of(call).model_copy(update={"deadline": deadline})


def _log(what: str, error: Exception) -> None:
    log_failure(what, redact(repr(error)), traceback_of(error) or "", error)
