"""The toolbox of a worker process: execution with its threads, recall of lost calls, texts."""

import os
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any

from stepfleet.orchestrator.records.tool_text import result_text
from stepfleet.orchestrator.records.tools import ToolCall, ToolCallRecord
from stepfleet.orchestrator.redaction import Redactor
from stepfleet.orchestrator.tools import Tool, ToolInvocation, ToolRegistry
from stepfleet.worker.toolbox.execution import execute_call
from stepfleet.worker.toolbox.layers import call_through_layers
from stepfleet.worker.toolbox.threads import ToolThreads


class LocalToolbox:
    """Runs tools in this process. `threads` bounds how many plain functions run at once."""

    def __init__(self, threads: int) -> None:
        self._threads = ToolThreads(threads)
        self._hide = Redactor(os.environ)

    async def execute(
        self,
        call: ToolCall,
        tools: ToolRegistry,
        invocation: ToolInvocation,
        *,
        clock: Callable[[], datetime],
    ) -> ToolCallRecord:
        """Run one call. Tool trouble becomes the record's error; only cancellation raises."""
        if tools.middleware:
            once = partial(
                execute_call,
                tools=tools,
                invocation=invocation,
                clock=clock,
                limiter=self._threads,
            )
            return self._clean(await call_through_layers(call, tools, invocation, clock, once))
        return self._clean(
            await execute_call(call, tools, invocation, clock=clock, limiter=self._threads)
        )

    async def recall(
        self,
        call: ToolCall,
        tool: Tool[..., Any],
        invocation: ToolInvocation,
        *,
        clock: Callable[[], datetime],
    ) -> ToolCallRecord | None:
        """Ask the tool's status hook what became of a call whose worker was lost.

        The hook gets the invocation, with its idempotency key. What it returns is the call's
        result; None, or a failure of the hook itself, means that it does not know either.
        """
        hook = tool.options.status
        if hook is None:
            return None
        asked = Tool(
            name=call.name,
            description="",
            schema={},
            function=hook,
            check=lambda _: {"invocation": invocation},
        )
        record = await execute_call(
            call, ToolRegistry().process([asked]), invocation, clock=clock, limiter=self._threads
        )
        return None if record.result is None or record.is_error else self._clean(record)

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
