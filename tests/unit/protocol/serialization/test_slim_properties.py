"""Whatever the conversation and the limits: what a snapshot keeps is a sound conversation."""

import json
from datetime import UTC, datetime

from hypothesis import given, settings
from hypothesis import strategies as st

from stepfleet.orchestrator import (
    AgentState,
    Message,
    SlimSerializationConfig,
    SlimSerializer,
    ToolCall,
)
from stepfleet.orchestrator.records.state import StateInfo

NOW = datetime(2026, 1, 2, tzinfo=UTC)
TEXTS = st.text(max_size=30)
BLOCKS = st.lists(st.fixed_dictionaries({"text": TEXTS}) | st.just({"image": {"a": 1}}), max_size=3)
TURNS = st.tuples(st.integers(0, 4), TEXTS, TEXTS | BLOCKS)
CONFIGS = st.builds(
    SlimSerializationConfig,
    max_messages=st.integers(-1, 30),
    max_content_length=st.integers(-1, 20),
    include_tool_results=st.booleans(),
    redact_tool_args=st.booleans(),
)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Message, ...]:
    told = [Message.system("Be brief.")] if draw(st.booleans()) else []
    told.append(Message.user(draw(TEXTS | BLOCKS)))
    for turn, (count, text, result) in enumerate(draw(st.lists(TURNS, max_size=8))):
        asked = tuple(
            ToolCall(id=f"c{turn}-{n}", name="look", arguments={"what": [text]})
            for n in range(count)
        )
        told.append(Message.assistant(text, asked))
        for one in asked:
            answer = Message.tool(one, "")
            told.append(answer.model_copy(update={"content": result}))
        if draw(st.booleans()):
            told.append(Message.user(draw(TEXTS)))
    return tuple(told)


@settings(max_examples=300, deadline=None)
@given(conversations(), CONFIGS)
def test_a_snapshot_is_a_sound_conversation_within_its_limits(
    messages: tuple[Message, ...], config: SlimSerializationConfig
) -> None:
    """SER-07, SER-08, SER-22, MSG-18"""
    info = StateInfo(id="r1", execution_id="r1:1", started_at=NOW, updated_at=NOW)
    state = AgentState(agent_id="r1", info=info, messages=messages)
    snapshot = json.loads(json.dumps(SlimSerializer(config).serialize(state)))
    back = SlimSerializer(config).deserialize(snapshot).messages
    assert len(back) <= max(config.max_messages, 0)
    if back and messages[0].is_system():
        assert back[0] == messages[0].model_copy(update={"content": back[0].content})
    asked = [call.id for message in back for call in message.tool_calls]
    assert asked == [one.tool_call_id for one in back if one.is_tool()]
    limit = max(config.max_content_length, 0)
    pictures = 3 * len("[image omitted]")
    for message in back:
        if message.is_tool() and not config.include_tool_results:
            assert message.text == "[tool result omitted]"
        else:
            assert len(message.text) <= limit + len("...") + pictures
    if config.max_messages >= len(messages) and limit == 20 and config.include_tool_results:
        assert [one.role for one in back] == [one.role for one in messages]
