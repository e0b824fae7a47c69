import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfleet.orchestrator import Message, Role, ToolCall
from stepfleet.orchestrator.records.conversation.blocks import from_blocks, to_blocks

EXAMPLE: list[dict[str, Any]] = [
    {"role": "user", "content": [{"text": "What is the weather in Paris?"}]},
    {
        "role": "assistant",
        "content": [
            {"text": "I'll check"},
            {"toolUse": {"toolUseId": "t1", "name": "weather", "input": {"city": "Paris"}}},
        ],
    },
    {
        "role": "user",
        "content": [{"toolResult": {"toolUseId": "t1", "content": [{"text": "Sunny"}]}}],
    },
]

TEXT = st.text(max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
OBJECTS = st.dictionaries(TEXT, JSON, max_size=2)
IDS = st.sampled_from(["c1", "c2", "c3"])
NAMES = st.sampled_from(["add", "find", "say"])
BLOCKS = st.one_of(
    st.fixed_dictionaries({"text": TEXT}),
    st.fixed_dictionaries({"text": TEXT, "cachePoint": JSON}),
    st.fixed_dictionaries({"image": OBJECTS}),
    st.fixed_dictionaries({"toolUse": JSON}),
    st.fixed_dictionaries({"toolResult": JSON}),
    OBJECTS,
)
CONTENT = TEXT | st.lists(BLOCKS, max_size=3)
METADATA: st.SearchStrategy[dict[str, Any]] = (
    st.just({}) | OBJECTS | st.fixed_dictionaries({"toolResult": OBJECTS | JSON})
)
CALLS = st.builds(ToolCall, id=IDS, name=NAMES, arguments=OBJECTS, error=st.none() | TEXT)
SPOKEN = st.builds(
    Message,
    role=st.sampled_from([Role.SYSTEM, Role.DEVELOPER, Role.USER]),
    content=CONTENT,
    name=st.none() | NAMES,
    metadata=METADATA,
)
ASSISTANT = st.builds(
    Message,
    role=st.just(Role.ASSISTANT),
    content=CONTENT,
    name=st.none() | NAMES,
    tool_calls=st.lists(CALLS, max_size=3).map(tuple),
    metadata=METADATA,
)
TOOL = st.builds(
    Message,
    role=st.just(Role.TOOL),
    content=CONTENT,
    name=st.none() | NAMES,
    tool_call_id=st.none() | IDS,
    metadata=METADATA,
)
CONVERSATIONS = st.lists(SPOKEN | ASSISTANT | TOOL, max_size=6).map(tuple)


def stored(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list(json.loads(json.dumps(blocks)))


def wreck(value: Any) -> None:
    """Empty all that is mutable, from the inside out."""
    if isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            wreck(inner)
        value.clear()


@given(CONVERSATIONS)
def test_any_conversation_returns_from_block_form_as_it_was(
    conversation: tuple[Message, ...],
) -> None:
    """MSG-08"""
    assert from_blocks(stored(to_blocks(conversation))) == conversation


@given(CONVERSATIONS)
def test_converting_never_changes_nor_shares_what_it_was_given(
    conversation: tuple[Message, ...],
) -> None:
    """MSG-08"""
    before = [message.to_json() for message in conversation]
    wreck(to_blocks(conversation))
    assert [message.to_json() for message in conversation] == before


def test_the_three_message_example_converts_is_stored_and_returns_identically() -> None:
    """MSG-06"""
    flat = from_blocks(EXAMPLE)
    assert flat == (
        Message.user("What is the weather in Paris?"),
        Message.assistant(
            "I'll check", (ToolCall(id="t1", name="weather", arguments={"city": "Paris"}),)
        ),
        Message(role=Role.TOOL, content="Sunny", name="weather", tool_call_id="t1"),
    )
    read = [Message.from_json(message.to_json()) for message in flat]
    assert to_blocks(read) == EXAMPLE


def test_parallel_results_become_one_user_message_in_call_order() -> None:
    """MSG-08"""
    calls = tuple(ToolCall(id=f"c{n}", name="add") for n in range(3))
    results = [Message.tool(call, str(n)) for n, call in enumerate(calls)]
    told = to_blocks([Message.assistant("", calls), *results, Message.user("thanks")])
    assert [message["role"] for message in told] == ["assistant", "user", "user"]
    ids = [block["toolResult"]["toolUseId"] for block in told[1]["content"]]
    assert ids == ["c0", "c1", "c2"]


def test_an_unknown_block_passes_through_both_ways() -> None:
    """MSG-06"""
    blocks = [{"role": "user", "content": [{"hologram": {"x": [1]}}, {"text": "What is it?"}]}]
    assert to_blocks(from_blocks(blocks)) == blocks


def test_the_status_of_a_result_and_its_json_content_are_kept() -> None:
    """MSG-06"""
    result = {"toolUseId": "t1", "status": "error", "content": [{"json": {"why": "no"}}]}
    blocks = [*EXAMPLE[:2], {"role": "user", "content": [{"toolResult": result}]}]
    assert to_blocks(from_blocks(blocks)) == blocks


def test_results_and_text_in_one_user_message_come_apart() -> None:
    """MSG-08"""
    mixed = {"role": "user", "content": [*EXAMPLE[2]["content"], {"text": "and now?"}]}
    flat = from_blocks([*EXAMPLE[:2], mixed])
    assert [message.role for message in flat[2:]] == [Role.TOOL, Role.USER]
    assert flat[3].content == "and now?"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"content": []}, "''"),
        ({"role": "narrator", "content": []}, "narrator"),
        ({"role": "user", "content": [], "extra": 1}, "'extra'"),
        ({"role": "user", "content": ["text"]}, "'content'"),
        ({"role": "user", "content": [], "literal": "x"}, "'literal'"),
        ({"role": "user", "content": [{"toolResult": 1}]}, "'toolResult'"),
        ({"role": "assistant", "content": [{"toolUse": 1}]}, "'toolUse'"),
        ({"role": "assistant", "content": [{"toolUse": {"name": "x"}}]}, "id"),
        ({"role": "assistant", "content": [{"toolUse": {"odd": 1}}]}, "'toolUse.odd'"),
    ],
)
def test_what_is_no_block_message_is_refused_with_its_field(
    message: dict[str, Any], field: str
) -> None:
    with pytest.raises(ValueError, match=field):
        from_blocks([message])


@pytest.mark.parametrize(
    "message",
    [
        Message(role=Role.USER, tool_calls=(ToolCall(id="c", name="add"),)),
        Message(role=Role.ASSISTANT, tool_call_id="c"),
    ],
)
def test_a_message_that_no_conversation_has_is_refused(message: Message) -> None:
    """MSG-08"""
    with pytest.raises(ValueError, match="field 'tool_call"):
        to_blocks([message])
