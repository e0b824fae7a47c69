import pytest
from pydantic import TypeAdapter
from support.runs.agent_records import (
    a_busy_state,
    a_call,
    a_failed_step,
    a_result,
    a_step,
    an_error,
)

from stepfleet.orchestrator import (
    Action,
    AgentRunResult,
    ErrorType,
    FinalAnswer,
    Message,
    Observation,
    PlanningStep,
    Role,
    StopReason,
    Task,
    ToolCall,
    UsageStats,
)
from stepfleet.orchestrator.continuation import base_criteria
from stepfleet.orchestrator.records.conversation.messages import result_text
from stepfleet.orchestrator.records.run.results import LostAttempt
from stepfleet.orchestrator.records.run.trace import LINE_LENGTH, AgentStep
from stepfleet.orchestrator.records.steps import StepType

GOLDEN = [
    {"type": "task", "content": "1 + 2?"},
    {"type": "planning", "plan": "I'll add them"},
    {"type": "action", "tool_name": "add", "tool_call_id": "c1", "arguments": {"a": 1, "b": 2}},
    {"type": "observation", "tool_call_id": "c1", "result": "3", "is_error": False},
    {"type": "final_answer", "answer": "It is 3", "structured": None},
]
VARIANTS: list[tuple[AgentStep, Message, str]] = [
    (Task(content="1 +\n2?"), Message.user("1 +\n2?"), "Task: 1 + 2?"),
    (PlanningStep(plan="add"), Message.assistant("add"), "Planning: add"),
    (
        Action(tool_name="add", tool_call_id="c1", arguments={"a": 1}),
        Message.assistant("", (ToolCall(id="c1", name="add", arguments={"a": 1}),)),
        'Action: add {"a": 1}',
    ),
    (
        Observation(tool_call_id="c1", result="no", is_error=True),
        Message(role=Role.TOOL, content="no", tool_call_id="c1"),
        "Observation (error): no",
    ),
    (FinalAnswer(answer="3"), Message.assistant("3"), "FinalAnswer: 3"),
]


def failing_run() -> AgentRunResult:
    """Return a run with two calls, one of which failed, and a model call that failed."""
    broken = a_call(
        "c2",
        tool_name="find",
        result=None,
        is_error=True,
        error=an_error(tool_name="find", call_id="c2", message="not there"),
    )
    first = a_step(1, thought=None, tool_calls=(a_call(), broken), type=StepType.ERROR)
    second = a_failed_step(2, ErrorType.RATE_LIMIT)
    return a_result(StopReason.RETRY_LIMIT, steps=(first, second), output=None, error="gave up")


def test_the_steps_of_a_run_are_derived_as_small_typed_steps() -> None:
    """RUN-25"""
    steps = a_result().agent_steps("1 + 2?")
    assert [step.to_dict() for step in steps] == GOLDEN
    read = TypeAdapter(tuple[AgentStep, ...]).validate_python(GOLDEN)
    assert read == steps


@pytest.mark.parametrize(("step", "message", "line"), VARIANTS)
def test_each_kind_of_step_has_a_message_and_one_line(
    step: Task | PlanningStep | Action | Observation | FinalAnswer, message: Message, line: str
) -> None:
    """RUN-26"""
    assert step.to_message() == message
    assert step.describe() == line


def test_a_long_step_is_described_on_one_short_line() -> None:
    """RUN-26"""
    line = Observation(tool_call_id="c", result="word\n" * 1000).describe()
    assert "\n" not in line
    assert len(line) == len("Observation: ") + LINE_LENGTH
    assert line.endswith("...")


def test_a_trace_counts_actions_observations_and_errors() -> None:
    """RUN-27"""
    trace = failing_run().trace()
    assert (trace.action_count, trace.observation_count, trace.is_success) == (2, 2, False)
    assert [step.tool_call_id for step in trace.errors()] == ["c2"]
    assert a_result().trace().is_success


def test_text_of_a_run_that_did_not_complete_is_no_final_answer() -> None:
    """RUN-25"""
    kinds = [step.type for step in a_result(StopReason.STEPS_LIMIT).agent_steps()]
    assert kinds == ["planning", "action", "observation", "planning"]


def test_an_answer_given_by_a_tool_call_is_the_final_answer_itself() -> None:
    """RUN-25, ANS-15"""
    call = a_call("c9", tool_name="structured_response", arguments={"structured": {"n": 3}})
    ended = a_step(1, thought=None, tool_calls=(call,), type=StepType.TOOL_EXECUTION)
    steps = a_result(steps=(ended,), structured={"n": 3}).agent_steps()
    assert steps == (FinalAnswer(answer="It is 3", structured={"n": 3}),)


def test_the_replay_has_all_its_sections() -> None:
    """RUN-23"""
    told = a_result(structured={"n": 3}, schema_name="Sum").replay()
    assert told == (
        "Run run-1 of agent solver: completed\n"
        "Duration: 2.00s\n"
        "Iterations: 2 of 10\n"
        "Tokens: 40 (30 prompt, 10 completion)\n"
        "\n"
        "Steps:\n"
        "1. Planning: I'll add them\n"
        '   Action: add {"a": 1, "b": 2}\n'
        "   Observation: 3\n"
        "2. FinalAnswer: It is 3\n"
        "\n"
        "Final output:\n"
        "It is 3\n"
        "\n"
        "Structured output (Sum):\n"
        '{\n  "n": 3\n}\n'
    )


def test_the_replay_of_a_failed_run_names_its_errors() -> None:
    """RUN-23"""
    told = failing_run().replay()
    assert "2. Error: rate_limit" in told
    assert "Observation (error): Error: " in told
    assert "Final output:\n(none)" in told
    assert told.endswith("Error:\ngave up\n")


def test_the_explanation_has_every_field_of_every_call() -> None:
    """RUN-24"""
    told = failing_run().explain()
    for call in ("tool call c1: add", "tool call c2: find"):
        assert call in told
    assert told.count('arguments: {"a": 1, "b": 2}') == 2
    assert (told.count("error: no"), told.count("error: yes")) == (1, 1)
    assert "result: 3" in told
    assert "not there" in told


def test_the_explanation_says_why_the_run_stopped_with_each_criterions_numbers() -> None:
    """CONT-28, RUN-24"""
    outcome = base_criteria().evaluate(a_busy_state(10))
    lost = LostAttempt(kind="crash", step=2, seconds=1.5, ambiguous=True)
    told = a_result(StopReason.STEPS_LIMIT, outcome=outcome, lost_attempts=(lost,)).explain()
    assert "Stop reason: steps_limit" in told
    assert "resolved by StepsLimit: steps: 10 has reached the limit of 10" in told
    assert all(one.criterion in told and one.reason in told for one in outcome.evaluations)
    assert "step 2, crash, 1.50 s, a model call may have been paid for" in told


def test_the_conversation_is_rebuilt_from_the_steps() -> None:
    """RUN-11, RUN-13, MSG-11"""
    call = ToolCall(id="c1", name="add", arguments={"a": 1, "b": 2})
    assert a_result().added_messages() == (
        Message.assistant("I'll add them", (call,)),
        Message.tool(call, "3"),
        Message.assistant("It is 3"),
    )


def test_a_failed_model_call_adds_no_message_and_a_malformed_call_keeps_its_error() -> None:
    """RUN-11, ERR-21"""
    bad = a_call(
        result=None,
        is_error=True,
        error=an_error(ErrorType.VALIDATION, code="INVALID_FUNCTION_CALL", message="not JSON"),
    )
    steps = (
        a_failed_step(1),
        a_step(2, thought=None, tool_calls=(bad,), usage=UsageStats(), errors=(bad.error,)),
    )
    assistant, tool = a_result(steps=steps).added_messages()
    assert (assistant.content, assistant.tool_calls[0].error) == ("", "not JSON")
    assert tool.tool_call_id == "c1"
    assert "not JSON" in tool.text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        ({"a": [1, "é"]}, '{"a": [1, "é"]}'),
        ([1, 2], "[1, 2]"),
        (None, "null"),
        (True, "true"),
        (1.5, "1.5"),
    ],
)
def test_tool_values_become_text_predictably(value: object, text: str) -> None:
    """MSG-19"""
    assert result_text(a_call(result=value)) == text


def test_a_tools_error_becomes_text_with_a_clear_prefix() -> None:
    """MSG-19, ERR-26"""
    failed = a_call(is_error=True, error=an_error(code="TIMEOUT_ERROR", message="slow"))
    assert result_text(failed) == (
        'Error: {"error": {"code": "TIMEOUT_ERROR", "message": "slow", "retryable": false}}'
    )
