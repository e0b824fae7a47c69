"""Calls of an answer get ids that no other call of their run has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfleet.orchestrator import LLMResponse, Message, ToolCall
from stepfleet.worker.attempt.sanitize import own_id, with_own_ids

IDS = st.one_of(st.sampled_from(["call_0", "0", "", " ", own_id(1, 0, 0)]), st.text(max_size=600))


def answer(*ids: str) -> LLMResponse:
    calls = tuple(ToolCall(id=one, name="look", arguments={"id": one}) for one in ids)
    return LLMResponse(tool_calls=calls)


def ids_of(response: LLMResponse) -> list[str]:
    return [call.id for call in response.tool_calls or ()]


@given(answers=st.lists(st.lists(IDS, max_size=4), max_size=6))
def test_ids_are_unique_in_a_run_and_its_calls_keep_their_arguments(
    answers: list[list[str]],
) -> None:
    talk: tuple[Message, ...] = ()
    for number, ids in enumerate(answers, 1):
        found = with_own_ids(answer(*ids), talk, number)
        assert [call.arguments["id"] for call in found.tool_calls or ()] == ids
        talk += (Message.assistant("", found.tool_calls or ()),)
    used = [call.id for message in talk for call in message.tool_calls]
    assert len(used) == len(set(used))
    assert all(0 < len(one.strip()) <= len(one) <= 512 for one in used)


def test_an_answer_whose_ids_are_its_own_stays_as_it_is() -> None:
    given = answer("a", "b")
    assert with_own_ids(given, (Message.assistant("", answer("c").tool_calls or ()),), 2) is given
    text = LLMResponse(content="hello")
    assert with_own_ids(text, (), 1) is text


@pytest.mark.parametrize("odd", ["call_0", "", "  ", "x" * 513, "a\x00b"])
def test_an_id_that_repeats_or_is_none_becomes_nine_letters_and_digits(odd: str) -> None:
    before = (Message.assistant("", answer("call_0").tool_calls or ()),)
    (name,) = ids_of(with_own_ids(answer(odd), before, 2))
    assert name == own_id(2, 0, 0)
    assert (len(name), name.isalnum()) == (9, True)


def test_the_same_answer_in_the_same_step_gets_the_same_ids() -> None:
    """So the response cache finds the next request again."""
    before = (Message.assistant("", answer("a").tool_calls or ()),)
    first, second = (ids_of(with_own_ids(answer("a", "a"), before, 2)) for _ in range(2))
    assert first == second
