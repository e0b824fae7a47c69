"""Conversations for property tests, and the invariant that every request keeps."""

from collections.abc import Iterable

from hypothesis import strategies as st

from stepfleet.orchestrator import Message, ToolCall

texts = st.text(max_size=200)


@st.composite
def exchanges(draw: st.DrawFn, turn: int = 0) -> tuple[Message, ...]:
    """Return an assistant's message with the results of its calls."""
    calls = tuple(
        ToolCall(id=f"{turn}.{n}", name="look", arguments={"a": draw(texts)})
        for n in range(draw(st.integers(0, 3)))
    )
    answers = [Message.tool(call, draw(texts)) for call in calls]
    return (Message.assistant(draw(texts), calls), *answers)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Message, ...]:
    """Return a conversation: perhaps instructions, then questions and exchanges."""
    messages = [Message.system(draw(texts))] if draw(st.booleans()) else []
    messages.append(Message.user(draw(texts)))
    for turn in range(draw(st.integers(0, 8))):
        messages += draw(exchanges(turn))
        if draw(st.booleans()):
            messages.append(Message.user(draw(texts)))
    return tuple(messages)


def check_pairs(messages: Iterable[Message]) -> None:
    """Assert MSG-18: calls are followed by all their results, and results by nothing else."""
    asked: list[str] = []
    for message in messages:
        if message.is_tool():
            assert asked.pop(0) == message.tool_call_id
        else:
            assert asked == []
            asked = [call.id for call in message.tool_calls]
    assert asked == []
