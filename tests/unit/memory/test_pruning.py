from hypothesis import given
from hypothesis import strategies as st

from stepfleet.orchestrator import Message, ToolCall
from stepfleet.orchestrator.memory.pruning import estimate_tokens, prune_to_token_limit

texts = st.text(max_size=200)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Message, ...]:
    messages = [Message.system(draw(texts))] if draw(st.booleans()) else []
    messages.append(Message.user(draw(texts)))
    for turn in range(draw(st.integers(0, 8))):
        calls = tuple(
            ToolCall(id=f"{turn}.{n}", name="look", arguments={"a": draw(texts)})
            for n in range(draw(st.integers(0, 3)))
        )
        messages.append(Message.assistant(draw(texts), calls))
        messages += [Message.tool(call, draw(texts)) for call in calls]
    return tuple(messages)


@given(conversations(), st.integers(0, 500))
def test_calls_stay_with_their_results(messages: tuple[Message, ...], limit: int) -> None:
    """MSG-18, trap F18."""
    asked: list[str] = []
    for message in prune_to_token_limit(messages, limit):
        if message.is_tool():
            assert asked.pop(0) == message.tool_call_id
        else:
            assert asked == []
            asked = [call.id for call in message.tool_calls]
    assert asked == []


@given(conversations(), st.integers(0, 500))
def test_system_messages_the_task_and_the_newest_exchange_stay(
    messages: tuple[Message, ...], limit: int
) -> None:
    kept = prune_to_token_limit(messages, limit)
    assert [one for one in kept if one.is_system()] == [one for one in messages if one.is_system()]
    assert [one for one in kept if one.is_user()] == [one for one in messages if one.is_user()]
    assert kept[-1] == messages[-1]


@given(conversations(), st.integers(0, 2000))
def test_what_is_kept_fits_or_is_a_single_exchange(
    messages: tuple[Message, ...], limit: int
) -> None:
    """ERR-23"""
    kept = prune_to_token_limit(messages, limit)
    exchanges = sum(one.is_assistant() for one in kept)
    assert exchanges <= 1 or sum(map(estimate_tokens, kept)) <= limit


def test_half_is_kept_where_the_limit_is_unknown() -> None:
    messages = tuple(Message.assistant("x" * 400) for _ in range(10))
    assert len(prune_to_token_limit(messages, None)) == 5


def test_a_summary_and_the_task_stay_and_notes_go_with_what_they_are_behind() -> None:
    """MEM-10"""
    summary = Message.added("s" * 100, "memory")
    turns = [Message.assistant(f"{n}" * 100) for n in range(1, 6)]
    note = Message.added("n" * 100, "memory")
    messages = (Message.system("rules"), summary, Message.user("task"), *turns, note)
    kept = prune_to_token_limit(messages, 60)
    assert [one.text[0] for one in kept] == ["r", "s", "t", "5", "n"]


def test_short_reasoning_counts_as_its_text_and_long_reasoning_as_any_other_block() -> None:
    def tokens(thinking: str) -> int:
        block = {"reasoning": {"provider": "anthropic", "at": 0, "data": {"thinking": thinking}}}
        return estimate_tokens(Message.assistant([block, {"text": "ok"}]))

    image = Message.assistant([{"image": {}}, {"text": "ok"}])
    assert tokens("Hm.") < 50
    assert tokens("word " * 50_000) == estimate_tokens(image)
