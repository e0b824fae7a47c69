"""The history that a chat window shows, from stored records."""

import json
from datetime import timedelta

import pytest
from jsonschema import Draft202012Validator
from support.runs.agent_records import START, a_call, a_failed_step, an_error
from support.runs.ui_records import RUN, USAGE, a_recorded, a_turn, two_steps

from stepfleet.orchestrator import LoggedStep, Message, UIMessage
from stepfleet.orchestrator.client.rendering import (
    StatusType,
    UIMetadata,
    UIRole,
    rendered,
    should_render_assistant_content,
)
from stepfleet.orchestrator.records.outcome import RunAnswer
from stepfleet.orchestrator.records.steps import Progress

GOLDEN = [
    {
        "id": "run-1:input:0:0",
        "role": "user",
        "content": "hi",
        "timestamp": "2026-03-01T12:00:00Z",
    },
    {
        "id": "run-1:step:1",
        "role": "assistant",
        "content": "Let me add.",
        "timestamp": "2026-03-01T12:00:01Z",
        "metadata": {
            "tool_calls": [
                {"id": "c1", "name": "add", "args": {"a": 1, "b": 2}, "args_summary": "a: 1, b: 2"}
            ],
            "step": 1,
            "step_duration_ms": 120.0,
            "usage": {
                "prompt_tokens": 10,
                "completion_tokens": 5,
                "total_tokens": 15,
                "llm_calls": 1,
            },
            "group": "step-1",
            "collapsed": True,
        },
    },
    {
        "id": "run-1:step:1:tool:c1",
        "role": "tool",
        "content": "3",
        "timestamp": "2026-03-01T12:00:00Z",
        "metadata": {
            "tool_calls": [
                {"id": "c1", "name": "add", "args": {"a": 1, "b": 2}, "args_summary": "a: 1, b: 2"}
            ],
            "tool_call_id": "c1",
            "tool_name": "add",
            "tool_result": 3,
            "tool_duration_ms": 12.0,
            "step": 1,
            "group": "step-1",
            "collapsed": True,
        },
    },
    {
        "id": "run-1:step:2",
        "role": "assistant",
        "content": "It is 3.",
        "timestamp": "2026-03-01T12:00:02Z",
        "metadata": {
            "step": 2,
            "step_duration_ms": 120.0,
            "usage": {
                "prompt_tokens": 10,
                "completion_tokens": 5,
                "total_tokens": 15,
                "llm_calls": 1,
            },
            "group": "step-2",
        },
    },
]


def texts(*log: LoggedStep, **inputs: tuple[Message, ...]) -> list[tuple[str, str]]:
    return [(one.role.value, one.content) for one in rendered(a_recorded(*log, **inputs))]


def test_a_run_becomes_the_golden_messages() -> None:
    """UI-01, UI-02, UI-09, UI-10: roles, calls, results, timing, groups."""
    assert [one.to_dict() for one in rendered(two_steps())] == GOLDEN


def test_every_message_fits_the_schema_of_messages() -> None:
    """UI-01: names and kinds of the fields."""
    schema = UIMessage.model_json_schema(mode="serialization")
    assert set(schema["properties"]) == {"id", "role", "content", "timestamp", "metadata"}
    assert {"tool_calls", "tool_call_id", "tool_name", "tool_result", "tool_error"} <= set(
        UIMetadata.model_fields
    )
    assert {"tool_duration_ms", "status_type", "continuation"} <= set(UIMetadata.model_fields)
    assert {one.value for one in UIRole} == {"user", "assistant", "tool", "status"}
    assert {one.value for one in StatusType} == {
        *("thinking", "tool_call", "tool_result", "error", "info", "continuation")
    }
    validator = Draft202012Validator(schema)
    for message in rendered(two_steps()):
        validator.validate(json.loads(json.dumps(message.to_dict())))
        assert UIMessage.model_validate(message.to_dict()) == message


@pytest.mark.parametrize(
    ("content", "has_tool_calls", "shown"),
    [
        ("I'll look it up.", True, True),
        ("", True, False),
        ("  \n ", True, False),
        (' {"a": 1}', True, False),
        ("[1, 2]", True, False),
        ('{"a": 1}', False, True),
    ],
)
def test_text_beside_calls_is_shown_where_it_is_natural_language(
    content: str, has_tool_calls: bool, shown: bool
) -> None:
    """UI-03"""
    assert should_render_assistant_content(content, has_tool_calls=has_tool_calls) is shown


@pytest.mark.parametrize("text", ["", '{"a": 1}'])
def test_a_step_with_calls_and_no_natural_language_adds_no_assistant_message(text: str) -> None:
    """UI-05: its call is told by the tool's own message, with the step's timing."""
    shown = rendered(a_recorded(a_turn(1, text, a_call("c1"))))
    assert [one.role for one in shown] == [UIRole.USER, UIRole.TOOL]
    metadata = shown[1].metadata
    assert metadata is not None
    assert [one.args_summary for one in metadata.tool_calls] == ["a: 1, b: 2"]
    assert (metadata.step_duration_ms, metadata.usage) == (120.0, USAGE)


def test_a_failed_tool_has_its_error_in_place_of_a_result() -> None:
    """UI-02, UI-04"""
    failed = a_call("c1", result=None, is_error=True, error=an_error(message="no luck"))
    tool = rendered(a_recorded(a_turn(1, "", failed)))[1]
    assert tool.metadata is not None
    assert (tool.content, tool.metadata.tool_error, tool.metadata.tool_result) == (
        "no luck",
        "no luck",
        None,
    )


def test_only_what_was_said_is_shown() -> None:
    """UI-02: no instructions, no words of the fleet, no failed calls of the model."""
    failed = LoggedStep(result=a_failed_step(2))
    said = (Message.system("Be brief."), Message.user("one"), Message.added("Go on.", by="x"))
    assert texts(a_turn(1, "first"), failed, a_turn(3, "second"), at_0=said) == [
        ("user", "one"),
        ("assistant", "first"),
        ("assistant", "second"),
    ]


def test_a_further_turn_stands_where_it_was_said() -> None:
    """UI-02: behind the step before it, also where earlier steps were let go."""
    inputs = {"at_0": (Message.user("one"),), "at_1": (Message.user("two"),)}
    both = [("user", "one"), ("assistant", "first"), ("user", "two"), ("assistant", "second")]
    assert texts(a_turn(1, "first"), a_turn(2, "second"), **inputs) == both
    assert texts(a_turn(2, "second"), **inputs) == [both[0], *both[2:]]
    asked = rendered(a_recorded(a_turn(1, "first"), **inputs))[-1]
    assert asked.timestamp == START + timedelta(seconds=1, milliseconds=500)


def test_an_answer_that_a_call_gave_is_shown_as_the_models_words() -> None:
    """UI-02: behind the call; data alone stay in the call."""
    call = a_call("c1", tool_name="final_answer", arguments={"answer": "It is 3."})
    answered = Progress(answer=RunAnswer(text="It is 3."))
    told = texts(a_turn(1, "", call, progress=answered))
    assert told[-1] == ("assistant", "It is 3.")
    assert len(told) == 3


def test_the_messages_of_a_step_share_a_group_and_tell_its_tokens_once() -> None:
    """UI-09, UI-10"""
    log = (a_turn(1, "Both.", a_call("c1"), a_call("c2")), a_turn(2, "Done."))
    shown = [one.metadata for one in rendered(a_recorded(*log)) if one.metadata]
    assert [one.group for one in shown] == ["step-1", "step-1", "step-1", "step-2"]
    assert [one.usage is not None for one in shown] == [True, False, False, True]
    assert [one.tool_duration_ms for one in shown] == [None, 12.0, 12.0, None]
    assert [one.collapsed for one in shown] == [True, True, True, False]
    assert RUN in rendered(a_recorded(*log))[0].id
