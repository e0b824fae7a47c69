"""A committed step as one line for a log. Decides wording and nothing else."""

from collections.abc import Iterator

from stepfleet.orchestrator.records.run.trace_steps import (
    Action,
    FinalAnswer,
    Observation,
    PlanningStep,
    one_line,
)
from stepfleet.orchestrator.records.steps import StepResult, StepType
from stepfleet.orchestrator.records.tool_text import result_text


def described(step: StepResult) -> str:
    """Return a step on one line: what it was, what it said, called and read, what it took."""
    tokens = f"{step.usage.total_tokens} tokens" if step.usage else "no usage"
    spent = f"{step.duration_ms:.0f} ms, {'cached' if step.cached else tokens}"
    return f"step {step.step}: {step.type.value} ({spent}): {'; '.join(_parts(step)) or 'nothing'}"


def _parts(step: StepResult) -> Iterator[str]:
    if step.thought:
        ends = step.type is StepType.FINAL_RESPONSE
        said = FinalAnswer(answer=step.thought) if ends else PlanningStep(plan=step.thought)
        yield said.describe()
    for call in step.tool_calls:
        name, identity = call.tool_name, call.call_id
        yield Action(tool_name=name, tool_call_id=identity, arguments=call.arguments).describe()
        text = result_text(call)
        yield Observation(tool_call_id=identity, result=text, is_error=call.is_error).describe()
    in_calls = {call.error.message for call in step.tool_calls if call.error}
    for error in step.errors:
        if error.message not in in_calls:
            yield f"Error: {error.type.value} ({error.code}): {one_line(error.message)}"
