"""Records for tests: one call each, only what the test is about as arguments."""

from datetime import UTC, datetime, timedelta
from typing import Any

from stepfleet.orchestrator import (
    AgentRunResult,
    AgentState,
    ErrorInfo,
    ErrorType,
    FinishReason,
    StepResult,
    StopReason,
    ToolCallRecord,
    UsageStats,
)
from stepfleet.orchestrator.records.errors import ErrorContext
from stepfleet.orchestrator.records.run.results import end_state, run_status
from stepfleet.orchestrator.records.state import LastStep, StateInfo
from stepfleet.orchestrator.records.steps import StepType

START = datetime(2026, 3, 1, 12, tzinfo=UTC)


def an_info(**fields: Any) -> StateInfo:
    """Return identity and clocks of a run that started at `START`."""
    return StateInfo(**{"id": "run-1", "started_at": START, "updated_at": START, **fields})


def a_state(steps: int = 0, **fields: Any) -> AgentState:
    """Return a state behind `steps` steps, the last of which answered without tools."""
    last = a_last_step() if steps else None
    given = {"agent_id": "a", "info": an_info(), "step_count": steps, "current_step": last}
    return AgentState(**{**given, **fields})


def a_busy_state(steps: int, **fields: Any) -> AgentState:
    """Return a state behind `steps` steps, the last of which called a tool."""
    last = a_last_step(type=StepType.TOOL_EXECUTION, has_tool_calls=True, text=None)
    return a_state(steps, current_step=last, **fields)


def a_last_step(**fields: Any) -> LastStep:
    """Return the facts of a step that answered without tools."""
    given = {
        "step": 1,
        "type": StepType.FINAL_RESPONSE,
        "has_tool_calls": False,
        "finish_reason": FinishReason.STOP,
        "text": "done",
    }
    return LastStep(**{**given, **fields})


def failures(error_type: ErrorType, consecutive: int = 1, total: int | None = None) -> ErrorContext:
    """Return the failures of an execution whose last `consecutive` steps failed."""
    return ErrorContext(
        type=error_type,
        consecutive_failures=consecutive,
        total_failures=consecutive if total is None else total,
        message=f"{error_type.value} went wrong",
    )


def a_failed_state(
    error_type: ErrorType, consecutive: int = 1, *, tools: bool = False
) -> AgentState:
    """Return a state whose last step failed: its model call, or with `tools` one of its tools."""
    last = a_last_step(
        type=StepType.ERROR,
        has_tool_calls=tools,
        finish_reason=FinishReason.TOOL_CALLS if tools else FinishReason.ERROR,
        text=None,
    )
    context = failures(error_type, consecutive)
    return a_state(consecutive, current_step=last, failures=context)


def an_error(error_type: ErrorType = ErrorType.TOOL, **fields: Any) -> ErrorInfo:
    """Return a failure of a type."""
    given = {"type": error_type, "code": "UNKNOWN_ERROR", "message": f"{error_type.value} error"}
    return ErrorInfo(**{**given, **fields})


def a_step(number: int = 1, **fields: Any) -> StepResult:
    """Return a step that answered `answer <number>`."""
    given = {"step": number, "thought": f"answer {number}", "started_at": START}
    return StepResult(**{**given, **fields})


def a_call(call_id: str = "c1", **fields: Any) -> ToolCallRecord:
    """Return a call of the tool `add` that came to 3."""
    given = {
        "tool_name": "add",
        "call_id": call_id,
        "arguments": {"a": 1, "b": 2},
        "result": 3,
        "duration_ms": 12.0,
        "timestamp": START,
    }
    return ToolCallRecord(**{**given, **fields})


def a_failed_step(number: int, *types: ErrorType) -> StepResult:
    """Return a step that failed with errors of these types, in this order."""
    errors = tuple(an_error(one) for one in types or (ErrorType.MODEL,))
    return a_step(
        number,
        thought=None,
        type=StepType.ERROR,
        finish_reason=FinishReason.ERROR,
        errors=errors,
    )


def a_result(reason: StopReason = StopReason.COMPLETED, **fields: Any) -> AgentRunResult:
    """Return the result of a run that ended for `reason` after two seconds and two steps."""
    steps = (
        a_step(
            1,
            thought="I'll add them",
            tool_calls=(a_call(),),
            type=StepType.TOOL_EXECUTION,
            finish_reason=FinishReason.TOOL_CALLS,
            usage=UsageStats(prompt_tokens=10, completion_tokens=5, total_tokens=15, llm_calls=1),
        ),
        a_step(
            2,
            thought="It is 3",
            usage=UsageStats(prompt_tokens=20, completion_tokens=5, total_tokens=25, llm_calls=1),
        ),
    )
    given = {
        "run_id": "run-1",
        "agent_name": "solver",
        "lifecycle": end_state(reason),
        "stop_reason": reason,
        "status": run_status(reason),
        "output": "It is 3",
        "steps": steps,
        "usage": UsageStats(prompt_tokens=30, completion_tokens=10, total_tokens=40, llm_calls=2),
        "start_time": START,
        "end_time": START + timedelta(seconds=2),
        "max_iterations": 10,
    }
    return AgentRunResult(**{**given, **fields})
