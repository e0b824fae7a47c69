"""Slim snapshots of states: presets, what is cut, and the way back."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from jsonschema import validate

from stepfleet.orchestrator import (
    AgentState,
    ContinuationDecision,
    ContinuationOutcome,
    ErrorInfo,
    ErrorType,
    FinishReason,
    Lifecycle,
    Message,
    Role,
    SlimSerializationConfig,
    SlimSerializer,
    StepResult,
    StopReason,
    ToolCall,
    ToolCallRecord,
    UsageStats,
)
from stepfleet.orchestrator.continuation import base_criteria
from stepfleet.orchestrator.errors import SerializationError
from stepfleet.orchestrator.protocol.fold import after_step
from stepfleet.orchestrator.protocol.serialization import CanSerializeAgentState
from stepfleet.orchestrator.records.errors import ErrorContext
from stepfleet.orchestrator.records.state import StateInfo
from stepfleet.orchestrator.records.steps import StepType

NOW = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)
MINIMAL = SlimSerializationConfig.minimal()
STANDARD = SlimSerializationConfig.standard()
FULL = SlimSerializationConfig.full()
PRESETS = [MINIMAL, STANDARD, FULL]
SECRET = "argument-0451"
OUTCOME = ContinuationOutcome(
    decision=ContinuationDecision.FORBID_CONTINUATION,
    should_continue=False,
    resolved_by="StepsLimit",
    stop_reason=StopReason.STEPS_LIMIT,
)
SCHEMA = {
    "type": "object",
    "required": [
        *("agent_id", "parent_agent_id", "status", "step_count", "usage", "execution"),
        *("messages", "steps", "last_continuation", "metadata"),
    ],
    "properties": {
        "version": {"const": 1},
        "agent_id": {"type": "string"},
        "parent_agent_id": {"type": ["string", "null"]},
        "status": {"enum": ["in_progress", "completed", "failed"]},
        "step_count": {"type": "integer"},
        "usage": {
            "required": ["prompt", "completion", "total"],
            "properties": {name: {"type": "integer"} for name in ("prompt", "completion", "total")},
            "additionalProperties": False,
        },
        "execution": {
            "required": ["started_at", "updated_at", "cumulative_seconds"],
            "properties": {
                "number": {"type": "integer"},
                "started_at": {"type": "string"},
                "updated_at": {"type": "string"},
                "cumulative_seconds": {"type": "number"},
            },
            "additionalProperties": False,
        },
        "failures": {"type": "object"},
        "messages": {
            "items": {
                "required": ["role", "content", "metadata"],
                "additionalProperties": False,
                "properties": {"role": {}, "content": {}, "metadata": {"type": "object"}},
            }
        },
        "steps": {
            "items": {
                "required": [
                    *("step_number", "type", "has_tool_calls", "finish_reason", "errors"),
                    *("usage", "duration_ms", "tool_calls"),
                ],
                "additionalProperties": False,
                "properties": {
                    "step_number": {"type": "integer"},
                    "type": {"enum": ["tool_execution", "final", "error"]},
                    "has_tool_calls": {"type": "boolean"},
                    "finish_reason": {"type": "string"},
                    "errors": {"type": "integer"},
                    "usage": {"required": ["total"]},
                    "duration_ms": {"type": "number"},
                    "tool_calls": {
                        "items": {
                            "required": ["id", "name"],
                            "properties": {"id": {}, "name": {}},
                            "additionalProperties": False,
                        }
                    },
                },
            }
        },
        "last_continuation": {
            "type": ["object", "null"],
            "required": ["should_continue", "stop_reason", "resolved_by"],
            "additionalProperties": False,
            "properties": {"should_continue": {}, "stop_reason": {}, "resolved_by": {}},
        },
        "metadata": {"type": "object"},
    },
    "additionalProperties": False,
}


def turn(number: int, text: str = "short") -> list[Message]:
    call = ToolCall(id=f"c{number}", name="look", arguments={"at": f"{SECRET}-{number}"})
    return [Message.assistant(f"turn {number} {text}", (call,)), Message.tool(call, text)]


def conversation(turns: int, text: str = "short") -> tuple[Message, ...]:
    given = [Message.system("Be brief."), Message.user("hello")]
    return tuple(given + [one for number in range(turns) for one in turn(number, text)])


def state(messages: tuple[Message, ...] = (), **fields: Any) -> AgentState:
    info = StateInfo(
        id="run-1",
        execution_id="run-1:2",
        execution=2,
        started_at=NOW,
        updated_at=NOW,
        cumulative_execution_seconds=12.5,
    )
    return AgentState(
        agent_id="run-1",
        parent_agent_id="run-0",
        info=info,
        **{
            "status": Lifecycle.IN_PROGRESS,
            "messages": messages,
            "metadata": {"ticket": {"number": 7}},
            "step_count": 3,
            "usage": UsageStats(prompt_tokens=10, completion_tokens=5, total_tokens=15),
            "last_continuation_outcome": OUTCOME,
            **fields,
        },
    )


def step(number: int, kind: StepType = StepType.TOOL_EXECUTION) -> StepResult:
    failed = ErrorInfo(type=ErrorType.TOOL, code="X", message="no")
    record = ToolCallRecord(
        tool_name="look", call_id=f"c{number}", arguments={"at": SECRET}, timestamp=NOW
    )
    return StepResult(
        step=number,
        type=kind,
        tool_calls=(record,),
        errors=(failed,) if kind is StepType.ERROR else (),
        usage=UsageStats(total_tokens=number),
        finish_reason=FinishReason.TOOL_CALLS,
        started_at=NOW,
        duration_ms=number * 10.0,
    )


def test_the_standard_preset_is_the_default() -> None:
    """SER-02, SER-04: every field of the table."""
    assert SlimSerializationConfig() == STANDARD == SlimSerializer().config
    assert STANDARD.to_dict() == {
        "max_messages": 50,
        "max_steps": 20,
        "max_content_length": 2000,
        "include_tool_results": True,
        "include_steps": True,
        "include_continuation_trace": False,
        "redact_tool_args": False,
    }


def test_the_minimal_preset_keeps_a_few_short_messages() -> None:
    """SER-03"""
    assert MINIMAL.to_dict() == {
        "max_messages": 20,
        "max_steps": 0,
        "max_content_length": 500,
        "include_tool_results": False,
        "include_steps": False,
        "include_continuation_trace": False,
        "redact_tool_args": False,
    }
    big = SlimSerializer(MINIMAL).serialize(
        state(conversation(100, "x" * 9000)), [step(n) for n in range(1, 101)]
    )
    # The twentieth would have been a result without its call.
    assert (len(big["messages"]), big["steps"], big["last_continuation"]) == (19, [], None)
    assert len(json.dumps(big)) < 20 * 800


def test_the_full_preset_adds_the_decision() -> None:
    """SER-05"""
    assert FULL.to_dict() == {
        "max_messages": 100,
        "max_steps": 50,
        "max_content_length": 5000,
        "include_tool_results": True,
        "include_steps": True,
        "include_continuation_trace": True,
        "redact_tool_args": False,
    }


@pytest.mark.parametrize(
    ("preset", "messages", "steps", "longest"), [(STANDARD, 49, 20, 2000), (FULL, 99, 50, 5000)]
)
def test_a_preset_cuts_a_big_state_to_its_limits(
    preset: SlimSerializationConfig, messages: int, steps: int, longest: int
) -> None:
    """SER-04, SER-05: a result without its call is not counted in."""
    told = SlimSerializer(preset).serialize(
        state(conversation(100, "x" * 9000)), [step(n) for n in range(1, 101)]
    )
    assert len(told["messages"]) == messages
    assert [one["step_number"] for one in told["steps"]] == list(range(101 - steps, 101))
    assert {len(one["content"]) for one in told["messages"][1:]} == {longest + len("...")}
    assert (told["last_continuation"] is not None) is preset.include_continuation_trace


@pytest.mark.parametrize("preset", PRESETS)
def test_a_snapshot_has_the_keys_of_its_schema(preset: SlimSerializationConfig) -> None:
    """SER-06, STATE-11"""
    kinds = [StepType.TOOL_EXECUTION, StepType.ERROR, StepType.FINAL_RESPONSE]
    steps = [step(number, kind) for number, kind in enumerate(kinds, 1)]
    snapshot = SlimSerializer(preset).serialize(state(conversation(3)), steps)
    validate(snapshot, SCHEMA)
    assert json.loads(json.dumps(snapshot)) == snapshot
    if preset.include_steps:
        assert [one["type"] for one in snapshot["steps"]] == ["tool_execution", "error", "final"]
        assert [one["errors"] for one in snapshot["steps"]] == [0, 1, 0]


@pytest.mark.parametrize(("preset", "kept"), [(MINIMAL, 20), (STANDARD, 50), (FULL, 100)])
def test_only_the_newest_messages_are_kept(preset: SlimSerializationConfig, kept: int) -> None:
    """SER-07"""
    messages = tuple(Message.user(f"message {number}") for number in range(120))
    told = SlimSerializer(preset).serialize(state(messages))["messages"]
    assert [one["content"] for one in told] == [f"message {n}" for n in range(120 - kept, 120)]


def test_long_texts_are_cut_between_characters_and_marked() -> None:
    """SER-08: also in blocks, whose texts share the limit."""
    blocks: list[dict[str, Any]] = [
        {"text": "é" * 400},
        {"text": "漢" * 400},
        {"text": "left out"},
        {"image": {"a": 1}},
    ]
    told = SlimSerializer(MINIMAL).serialize(
        state((Message.user("ü" * 501), Message.user("ü" * 500), Message.user(blocks)))
    )["messages"]
    assert told[0]["content"] == "ü" * 500 + "..."
    assert told[1]["content"] == "ü" * 500
    assert told[2]["content"] == [
        {"text": "é" * 400},
        {"text": "漢" * 100 + "..."},
        {"image": {"a": 1}},
    ]
    picture = Message.user([{"image": {"data": "A" * 9000}}])
    told = SlimSerializer(MINIMAL).serialize(state((picture,)))["messages"]
    assert told[0]["content"] == [{"text": "[image omitted]"}]


def test_redaction_leaves_only_ids_and_names_of_calls() -> None:
    """SER-09: also where a message carries calls in a provider's form."""
    foreign = [
        {"id": "c8", "function": {"name": "fly", "arguments": SECRET}},
        {"id": "c9", "args": SECRET},
    ]
    odd = Message(role=Role.ASSISTANT, content="", metadata={"tool_calls": foreign})
    config = SlimSerializationConfig(redact_tool_args=True)
    snapshot = SlimSerializer(config).serialize(state((*conversation(2), odd)), [step(1), step(2)])
    assert SECRET not in json.dumps(snapshot)
    assert snapshot["messages"][2]["metadata"]["tool_calls"] == [{"id": "c0", "name": "look"}]
    assert snapshot["messages"][-1]["metadata"]["tool_calls"] == [
        {"id": "c8", "name": "fly"},
        {"id": "c9", "name": "unknown"},
    ]
    plain = SlimSerializer().serialize(state(conversation(1)))
    assert plain["messages"][2]["metadata"]["tool_calls"][0]["arguments"] == {"at": f"{SECRET}-0"}


def test_excluded_tool_results_are_reported_by_a_mark_however_long_they_were() -> None:
    """SER-10"""
    told = SlimSerializer(MINIMAL).serialize(state(conversation(2, "x" * 2000)))["messages"]
    results = [one["content"] for one in told if one["role"] == "tool"]
    assert results == ["[tool result omitted]"] * 2


def test_steps_keep_their_numbers() -> None:
    """SER-11"""
    told = SlimSerializer(FULL).serialize(state(), [step(n) for n in range(1, 61)])["steps"]
    assert [one["step_number"] for one in told] == list(range(11, 61))
    assert told[-1] == {
        "step_number": 60,
        "type": "tool_execution",
        "has_tool_calls": True,
        "finish_reason": "tool_calls",
        "errors": 0,
        "usage": {"total": 60},
        "duration_ms": 600.0,
        "tool_calls": [{"id": "c60", "name": "look"}],
    }


def test_the_newest_decision_is_there_only_where_it_is_asked_for() -> None:
    """SER-12"""
    assert SlimSerializer(STANDARD).serialize(state())["last_continuation"] is None
    assert SlimSerializer(FULL).serialize(state())["last_continuation"] == {
        "should_continue": False,
        "stop_reason": "steps_limit",
        "resolved_by": "StepsLimit",
    }


def test_the_cumulative_time_is_reported() -> None:
    """SER-13"""
    assert SlimSerializer().serialize(state())["execution"]["cumulative_seconds"] == 12.5


@pytest.mark.parametrize("preset", PRESETS)
def test_a_state_that_was_read_back_takes_a_further_step(preset: SlimSerializationConfig) -> None:
    """SER-14, SER-01"""
    serializer: CanSerializeAgentState = SlimSerializer(preset)
    back = serializer.deserialize(serializer.serialize(state(conversation(80))))
    following = after_step(back, step(4), (Message.assistant("more"),), NOW)
    assert following.step_count == 4
    assert following.usage.total_tokens == 19
    assert following.messages[-1].text == "more"


@pytest.mark.parametrize("preset", PRESETS)
def test_ids_status_usage_times_metadata_and_kept_messages_come_back(
    preset: SlimSerializationConfig,
) -> None:
    """SER-15, SER-23"""
    named = Message(role=Role.USER, content="hi", name="Ann", metadata={"from": "chat"})
    whole = state((*conversation(2), named), status=Lifecycle.PAUSED)
    back = SlimSerializer(preset).deserialize(SlimSerializer(preset).serialize(whole))
    for name in ("agent_id", "parent_agent_id", "info", "status", "usage", "metadata"):
        assert getattr(back, name) == getattr(whole, name)
    if preset.include_tool_results:
        assert back.messages == whole.messages
    else:
        assert back.messages[3].text == "[tool result omitted]"
        assert back.messages[2].tool_calls == whole.messages[2].tool_calls


@pytest.mark.parametrize("limit", [0, -1])
def test_limits_of_0_or_less_keep_nothing(limit: int) -> None:
    """SER-17"""
    config = SlimSerializationConfig(max_messages=limit, max_steps=limit)
    snapshot = SlimSerializer(config).serialize(state(conversation(3)), [step(1)])
    assert (snapshot["messages"], snapshot["steps"]) == ([], [])


def test_counters_and_failures_come_back() -> None:
    """SER-21: a limit of 5 that is read back at 3 stops at 5."""
    failures = ErrorContext(
        type=ErrorType.TOOL, consecutive_failures=2, total_failures=4, message="broken"
    )
    back = SlimSerializer().deserialize(SlimSerializer().serialize(state(failures=failures)))
    assert (back.step_count, back.failures) == (3, failures)
    criteria = base_criteria(max_steps=5)
    plain = SlimSerializer().deserialize(SlimSerializer().serialize(state()))
    four = after_step(plain, step(4), (), NOW)
    five = after_step(four, step(5), (), NOW)
    assert criteria.evaluate(four).should_continue
    assert criteria.evaluate(five).stop_reason is StopReason.STEPS_LIMIT


@pytest.mark.parametrize("limit", range(1, 12))
def test_cutting_keeps_calls_with_their_results_and_the_instructions(limit: int) -> None:
    """SER-22, MSG-18"""
    config = SlimSerializationConfig(max_messages=limit)
    back = SlimSerializer(config).deserialize(
        SlimSerializer(config).serialize(state(conversation(4)))
    )
    assert back.messages[0].is_system()
    assert len(back.messages) <= limit
    asked = [call.id for message in back.messages for call in message.tool_calls]
    assert asked == [one.tool_call_id for one in back.messages if one.is_tool()]


def test_the_version_before_is_read_and_a_newer_one_is_refused() -> None:
    """SER-24"""
    snapshot = SlimSerializer().serialize(state(conversation(1)))
    for older in ({**snapshot, "version": 0}, {k: snapshot[k] for k in SCHEMA["required"]}):  # type: ignore[attr-defined]
        assert SlimSerializer().deserialize(older).step_count == 3
    for version in (2, "1", None):
        with pytest.raises(SerializationError, match=r"field 'version'.*upgrade"):
            SlimSerializer().deserialize({**snapshot, "version": version})
    with pytest.raises(SerializationError, match="agent_id"):
        SlimSerializer().deserialize({**snapshot, "agent_id": None})


def test_a_standard_snapshot_of_a_long_session_stays_small() -> None:
    """SER-25: 1,000 messages of 10,000 characters; the bound is 50 texts and 20 steps."""
    long = state(conversation(499, "x" * 10_000))
    size = len(json.dumps(SlimSerializer().serialize(long, [step(n) for n in range(1, 500)])))
    assert size < 120_000
