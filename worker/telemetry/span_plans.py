"""The spans of an attempt at a step: names, ids, parents, times, attributes. Pure.

Names are those of the project; attributes follow OpenTelemetry's conventions for generative AI
where there is one, else they begin with `stepfleet.`. No text of messages, arguments, results or
errors is among them: of an error its code.
"""

import hashlib
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.protocol.verdict import Move
from stepfleet.orchestrator.protocol.waiting import is_child, root_of
from stepfleet.orchestrator.records.calls.tools import ToolCallRecord
from stepfleet.orchestrator.records.run.results import RunStatus, end_state, run_status
from stepfleet.orchestrator.records.usage import UsageStats
from stepfleet.worker.telemetry.observations import (
    CANCELLED,
    ModelCallObservation,
    Observation,
    RefusalObservation,
    StepObservation,
    ToolCallObservation,
    ToolTaskObservation,
    nanoseconds,
)

_LARGEST = 2**64


def trace_id(run_id: str) -> int:
    """Return the trace id of a run and of all below it: the UUID of the first as a number."""
    root = root_of(run_id)
    try:
        return UUID(root).int or 1
    except ValueError:
        return int.from_bytes(hashlib.blake2b(root.encode(), digest_size=16).digest()) or 1


def run_span_id(run_id: str, execution: int = 1) -> int:
    """Return the id of the span of a run's execution, the parent of its steps."""
    return _derived(run_id, "run", execution)


def step_span_id(run_id: str, execution: int, step: int) -> int:
    """Return the id of the span of a step (from 1) that waits for tool calls elsewhere."""
    return _derived(run_id, "step", execution, step)


def call_span_id(child: str) -> int:
    """Return the id of the span of a call that has started the run `child`."""
    return _derived(child, "call")


def new_span_id() -> int:
    """Return an id for any other span."""
    return secrets.randbits(64) or 1


def sampled_part(environment: Mapping[str, str]) -> float:
    """Return which part of all runs is traced, 0 to 1, as `OTEL_TRACES_SAMPLER` says."""
    sampler = (
        environment.get("OTEL_TRACES_SAMPLER", "").strip().lower().removeprefix("parentbased_")
    )
    if sampler == "always_off":
        return 0.0
    if sampler != "traceidratio":
        return 1.0
    try:
        return float(environment.get("OTEL_TRACES_SAMPLER_ARG", "1"))
    except ValueError:
        return 1.0


def is_sampled(run_id: str, part: float) -> bool:
    """Return whether a run is among the traced `part` of all, equally on every worker.

    It is with those below it.
    """
    return part >= 1 or _derived(root_of(run_id), "sample") < part * _LARGEST


def _derived(*parts: object) -> int:
    text = " ".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) or 1


AGENT_RUN = "agent_run"
LLM_GENERATE = "llm_generate"
TOOL_EXECUTION = "tool_execution"
TOOL_DECISION = "tool_decision"
TAKEN_OVER = "TAKEN_OVER"
"""Code of an attempt that was too late: another worker had the step by then."""


@dataclass(frozen=True, slots=True)
class SpanPlan:
    """One span. Times in nanoseconds; `parent_id` is None for that of a run that no call started.

    `error` is a code, empty where it went well; `links` are runs; `is_call` marks a call of
    another service.
    """

    name: str
    run_id: str
    span_id: int
    parent_id: int | None
    began: int
    ended: int
    attributes: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    links: tuple[str, ...] = ()
    is_call: bool = False


def spans_of(observed: Observation) -> Iterator[SpanPlan]:
    """Yield the spans that end with an observation, children first."""
    match observed:
        case StepObservation():
            yield from _of_attempt(observed)
        case ToolTaskObservation(taken=taken):
            parent = step_span_id(taken.hint.run_id, taken.execution, taken.hint.step + 1)
            yield from _of_calls(taken.hint.run_id, observed.calls, parent)
        case RefusalObservation():
            return


def _of_attempt(observed: StepObservation) -> Iterator[SpanPlan]:
    claim, verdict = observed.claim, observed.verdict
    run_id, execution = claim.run_id, claim.state.info.execution
    waits = verdict.move is Move.WAIT and observed.applied
    # A step that waits for tasks has parts on several workers, which must agree on its id. The
    # others get new ones, as a step may be tried more than once.
    resumed = claim.journal.began is not None and verdict.logged is not None and observed.applied
    known = waits or resumed
    step_id = step_span_id(run_id, execution, claim.number) if known else new_span_id()
    yield from _of_calls(run_id, observed.calls, step_id)
    if resumed and verdict.logged is not None:
        yield from _of_waits(observed, verdict.logged.result.tool_calls, step_id)
    ends = verdict.move is Move.FINISH and observed.applied
    if not waits and (verdict.logged or observed.calls or not ends):
        start = claim.journal.began if resumed else None
        began = nanoseconds(start) if start else observed.began
        yield _step(observed, step_id, began)
    if ends:
        yield _run(observed)


def _step(observed: StepObservation, step_id: int, began: int) -> SpanPlan:
    claim, verdict = observed.claim, observed.verdict
    result = verdict.logged.result if verdict.logged else None
    attributes: dict[str, Any] = {
        **_whose(claim),
        "stepfleet.step": claim.number,
        "stepfleet.attempt": claim.attempts + claim.limited + claim.crashes + 1,
        "stepfleet.move": verdict.move.value,
    }
    if result:
        attributes["stepfleet.step_type"] = result.type.value
        attributes["gen_ai.response.finish_reasons"] = (result.finish_reason.value,)
        attributes["stepfleet.tool_calls"] = len(result.tool_calls)
        attributes["stepfleet.cost_usd"] = result.cost_usd
        if result.cached:
            attributes["stepfleet.cached"] = True
        if result.waited_seconds:
            attributes["stepfleet.waited_seconds"] = result.waited_seconds
        if result.fallback:
            attributes["stepfleet.fallback"] = result.fallback.model
    error = verdict.failure.code if verdict.failure else ""
    return SpanPlan(
        name=f"step_{claim.number}",
        run_id=claim.run_id,
        span_id=step_id,
        parent_id=run_span_id(claim.run_id, claim.state.info.execution),
        began=began,
        ended=observed.ended,
        attributes=attributes,
        error=error if observed.applied else TAKEN_OVER,
    )


def _run(observed: StepObservation) -> SpanPlan:
    claim, verdict = observed.claim, observed.verdict
    state, reason = verdict.state, verdict.stop_reason
    parent = state.parent_agent_id
    is_below = is_child(claim.run_id, parent)
    error = ""
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "invoke_agent",
        **_whose(claim),
        **_usage(state.usage),
        "gen_ai.request.model": claim.config.model.partition(":")[2] or claim.config.model,
        "stepfleet.steps": state.step_count,
        "stepfleet.cost_usd": state.cost_usd,
    }
    if state.usage.cached_calls:
        attributes["stepfleet.cached_calls"] = state.usage.cached_calls
    if reason:
        attributes["stepfleet.status"] = end_state(reason).value
        attributes["stepfleet.stop_reason"] = reason.value
        if run_status(reason) is RunStatus.ERROR:
            error = verdict.failure.code if verdict.failure else reason.value
    started = claim.state.info.execution_started_at
    return SpanPlan(
        name=AGENT_RUN,
        run_id=claim.run_id,
        span_id=run_span_id(claim.run_id, state.info.execution),
        parent_id=call_span_id(claim.run_id) if is_below else None,
        began=min(nanoseconds(started), observed.began) if started else observed.began,
        ended=observed.ended,
        attributes=attributes,
        error=error,
        links=(parent,) if parent and not is_below else (),
    )


def _of_waits(
    observed: StepObservation, calls: tuple[ToolCallRecord, ...], step: int
) -> Iterator[SpanPlan]:
    """Yield the calls of a step that were runs, and the waits of calls for people.

    Runs last from the step's beginning until it went on with them, waits until their decision.
    """
    start = observed.claim.journal.began
    began = nanoseconds(start) if start else observed.began
    for call in calls:
        attributes: dict[str, Any] = {
            "stepfleet.run_id": observed.claim.run_id,
            "gen_ai.tool.name": call.tool_name,
            "gen_ai.tool.call.id": call.call_id,
        }
        if call.run is not None:
            yield SpanPlan(
                name=TOOL_EXECUTION,
                run_id=observed.claim.run_id,
                span_id=call_span_id(call.run.run_id),
                parent_id=step,
                began=began,
                ended=observed.began,
                attributes={
                    **attributes,
                    "gen_ai.operation.name": "execute_tool",
                    "stepfleet.child_run_id": call.run.run_id,
                },
                error=call.error.code if call.error else "",
            )
        if (decision := call.decision) is not None:
            decided = nanoseconds(decision.at) if decision.at else observed.began
            yield SpanPlan(
                name=TOOL_DECISION,
                run_id=observed.claim.run_id,
                span_id=new_span_id(),
                parent_id=step,
                began=min(began, decided),
                ended=decided,
                attributes={
                    **attributes,
                    "stepfleet.approved": decision.approved,
                    "stepfleet.decided_by": decision.by,
                    "stepfleet.by_default": decision.by_default,
                },
            )


def _of_calls(
    run_id: str, calls: tuple[ModelCallObservation | ToolCallObservation, ...], parent: int
) -> Iterator[SpanPlan]:
    for call in calls:
        is_model = isinstance(call, ModelCallObservation)
        attributes = (
            _model_call(call) if isinstance(call, ModelCallObservation) else _tool_call(call)
        )
        yield SpanPlan(
            name=LLM_GENERATE if is_model else TOOL_EXECUTION,
            run_id=run_id,
            span_id=call.span_id,
            parent_id=parent,
            began=call.began,
            ended=call.ended,
            attributes={"stepfleet.run_id": run_id, **attributes},
            error=call.code,
            is_call=is_model,
        )


def _model_call(call: ModelCallObservation) -> dict[str, Any]:
    provider, model = call.provider_and_model
    settings, response = call.request.settings, call.response
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": provider,
        "gen_ai.request.model": model,
        "gen_ai.request.temperature": settings.temperature,
        "gen_ai.request.top_p": settings.top_p,
        "gen_ai.request.max_tokens": settings.max_tokens,
        "gen_ai.request.seed": settings.seed,
    }
    if response:
        attributes["gen_ai.response.model"] = response.model
        attributes["stepfleet.request_id"] = response.request_id
        attributes["gen_ai.response.finish_reasons"] = (response.finish_reason.value,)
        attributes |= _usage(response.usage)
    return {name: value for name, value in attributes.items() if value not in (None, "")}


def _tool_call(call: ToolCallObservation) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": call.name or "unknown",
        "gen_ai.tool.call.id": call.call_id,
        "stepfleet.attempt": call.attempt,
    }


def _whose(claim: Claim) -> dict[str, Any]:
    """Return the run, its agent, batch, tenant and parent run."""
    attributes = {
        "stepfleet.run_id": claim.run_id,
        "gen_ai.conversation.id": claim.run_id,
        "gen_ai.agent.name": claim.config.name,
        "stepfleet.execution": claim.state.info.execution,
        "stepfleet.batch_id": claim.batch_id,
        "stepfleet.tenant": claim.tenant,
        "stepfleet.parent_run_id": claim.state.parent_agent_id,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _usage(usage: UsageStats | None) -> dict[str, Any]:
    if usage is None:
        return {}
    attributes = {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
    }
    if usage.cached_tokens:
        attributes["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
    return attributes


def is_failure(plan: SpanPlan) -> bool:
    """Return whether a span's status is an error: a cancellation is none."""
    return plan.error not in ("", CANCELLED)
