"""What stands around a worker's collaborators to see their work: models, tools, steps, tasks.

There only where spans or metrics are wanted. Costs a few microseconds per call: it takes times and
puts values aside; what is made of them is made in a thread. Decides nothing of what it sees.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any

from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.events.envelope import Events
from stepfleet.orchestrator.models.llm import LLM
from stepfleet.orchestrator.protocol.claim import Claim, Committed, Refusal
from stepfleet.orchestrator.protocol.verdict import Verdict
from stepfleet.orchestrator.protocol.waiting import Delivered, TakenCall
from stepfleet.orchestrator.records.calls.tools import NOT_EXECUTED, ToolCall, ToolCallRecord
from stepfleet.orchestrator.records.errors import ErrorType
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest
from stepfleet.orchestrator.tools import ToolInvocation, ToolRegistry
from stepfleet.worker.models import Models
from stepfleet.worker.ports import StepObserver
from stepfleet.worker.telemetry.observations import (
    CANCELLED,
    ModelCallObservation,
    Observation,
    RefusalObservation,
    StepObservation,
    ToolCallObservation,
    ToolTaskObservation,
    begin,
    current_attempt,
)
from stepfleet.worker.telemetry.span_plans import new_span_id
from stepfleet.worker.toolbox.box import LocalToolbox
from stepfleet.worker.toolbox.threads import ToolThreads

Offer = Callable[[Observation], None]
Inside = Callable[[str, int], AbstractContextManager[Any]]
"""Makes spans of code that runs in it stand below a span: of that run, with that id."""


class TelemetryObserver(StepObserver):
    """Offers every attempt at a step, and every tool task, that ends."""

    def __init__(self, offer: Offer) -> None:
        self._offer = offer

    def claimed(self, claim: Claim | Refusal) -> None:
        """Begin an attempt, or count a refusal."""
        if isinstance(claim, Refusal):
            self._offer(RefusalObservation(claim.why))
        else:
            begin(claim.run_id, claim.now)

    def committed(
        self, claim: Claim, verdict: Verdict, events: Events, committed: Committed
    ) -> None:
        """Offer the attempt, unless it is decided again."""
        del events
        attempt = current_attempt(claim.run_id)
        if attempt and not committed.wanted:
            calls = tuple(attempt.calls)
            applied = committed.applied
            self._offer(StepObservation(claim, verdict, calls, attempt.began, attempt.now, applied))

    def call_taken(self, taken: TakenCall) -> None:
        """Begin an attempt."""
        begin(taken.hint.run_id, taken.now)

    def call_delivered(
        self, taken: TakenCall, record: ToolCallRecord, delivered: Delivered
    ) -> None:
        """Offer the task."""
        attempt = current_attempt(taken.hint.run_id)
        if attempt is None:
            return
        error = record.error
        if error is not None and error.code != NOT_EXECUTED and not attempt.calls:
            began, now = attempt.began, attempt.now
            name, times = record.tool_name, taken.attempt
            attempt.calls.append(
                ToolCallObservation(
                    new_span_id(), began, now, name, record.call_id, times, error.code
                )
            )
        self._offer(ToolTaskObservation(taken, tuple(attempt.calls), delivered.applied))


class ObservedToolbox(LocalToolbox):
    """The toolbox of a worker, its executions seen."""

    def __init__(self, threads: ToolThreads, inside: Inside) -> None:
        super().__init__(threads)
        self._inside = inside

    async def execute(
        self,
        call: ToolCall,
        tools: ToolRegistry,
        invocation: ToolInvocation,
        *,
        clock: Callable[[], datetime],
    ) -> ToolCallRecord:
        """Run one call. Tool trouble becomes the record's error; only cancellation raises."""
        attempt = current_attempt(invocation.run_id)
        if attempt is None:
            return await super().execute(call, tools, invocation, clock=clock)
        span_id, began, code = new_span_id(), attempt.now, ""
        try:
            with self._inside(invocation.run_id, span_id):
                record = await super().execute(call, tools, invocation, clock=clock)
            code = record.error.code if record.error else ""
        except asyncio.CancelledError:
            code = CANCELLED
            raise
        finally:
            # A name that the model made up is no tool's: it would be a metric's label for ever.
            name = call.name if call.name in tools else ""
            times = invocation.attempt
            attempt.calls.append(
                ToolCallObservation(span_id, began, attempt.now, name, call.id, times, code)
            )
        return record


class ObservedModels(Models):
    """The models of a worker, their calls seen: those of steps, and those of its memory."""

    def __init__(self, inside: Inside, *, connections: int = 0) -> None:
        super().__init__(connections=connections)
        self._inside = inside

    async def generate(
        self,
        request: ModelRequest,
        *,
        llm: LLM | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> LLMResponse:
        """Make one model call. Raises nothing but `AgentException`s."""
        attempt = current_attempt()
        if attempt is None:
            return await super().generate(request, llm=llm, on_text=on_text)
        span_id, began = new_span_id(), attempt.now
        response, code, kind = None, "", ""
        try:
            with self._inside(attempt.run_id, span_id):
                response = await super().generate(request, llm=llm, on_text=on_text)
        except asyncio.CancelledError:
            code = kind = CANCELLED
            raise
        except AgentException as error:
            code, kind = error.code, error.type.value
            raise
        except BaseException:
            code = kind = ErrorType.UNKNOWN.value
            raise
        finally:
            ended = attempt.now
            attempt.calls.append(
                ModelCallObservation(span_id, began, ended, request, response, code, kind)
            )
        return response
