"""Under which ids calls are sent."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfleet.orchestrator import Message, Role, ToolCall, supports
from stepfleet.worker.attempt.sanitize import own_id
from stepfleet.worker.models import blocks as call_ids
from stepfleet.worker.models.blocks import with_sent_ids

MODELS = (
    "openai:m", "azure:m", "openai-responses:m", "anthropic:m", "bedrock:m", "google:m",
    "mistral:m", "groq:m",
)  # fmt: skip
PLAIN = supports("anthropic:m").call_ids
MISTRAL = supports("mistral:m").call_ids
IDS = st.one_of(
    st.sampled_from(["call_0", "call.0", "call 0", "0", "functions.look:0", "x" * 41, "é", ""]),
    st.text(max_size=600),
    st.from_regex(r"[A-Za-z0-9]{9}", fullmatch=True),
)


def answer(*ids: str) -> tuple[Message, ...]:
    calls = tuple(ToolCall(id=one, name="look", arguments={"id": one}) for one in ids)
    return (Message.assistant("", calls), *(Message.tool(one, one.id) for one in calls))


def ids_of(messages: tuple[Message, ...]) -> list[str]:
    return [call.id for message in messages for call in message.tool_calls]


@st.composite
def talks(draw: st.DrawFn) -> tuple[Message, ...]:
    turns = draw(st.lists(st.lists(IDS, min_size=1, max_size=4), max_size=5))
    return (Message.user("hi"), *(message for ids in turns for message in answer(*ids)))


@given(talk=talks(), model=st.sampled_from(MODELS))
def test_every_id_fits_its_service_and_no_two_calls_share_one(
    talk: tuple[Message, ...], model: str
) -> None:
    fits = supports(model).call_ids
    sent = ids_of(with_sent_ids(talk, fits))
    assert len(sent) == len(set(sent)) == len(ids_of(talk))
    assert all(fits.fullmatch(one) for one in sent)


@given(talk=talks(), model=st.sampled_from(MODELS))
def test_every_result_answers_its_own_call(talk: tuple[Message, ...], model: str) -> None:
    asked: list[ToolCall] = []
    for message in with_sent_ids(talk, supports(model).call_ids):
        if message.is_tool():
            call = asked.pop(0)
            assert (message.tool_call_id, message.content) == (call.id, call.arguments["id"])
        asked += message.tool_calls


@given(talk=talks(), more=talks(), model=st.sampled_from(MODELS))
def test_what_was_sent_before_is_sent_again_when_the_conversation_goes_on(
    talk: tuple[Message, ...], more: tuple[Message, ...], model: str
) -> None:
    fits = supports(model).call_ids
    assert with_sent_ids(talk + more, fits)[: len(talk)] == with_sent_ids(talk, fits)


def test_ids_that_fit_stay_and_cost_no_copy() -> None:
    talk = (Message.user("hi"), *answer("call_0", "call_1"))
    assert with_sent_ids(talk, PLAIN) is talk


@pytest.mark.parametrize("model", MODELS)
def test_an_id_that_a_later_answer_repeats_is_sent_once(model: str) -> None:
    talk = (*answer("abcdef012"), *answer("abcdef012"))
    first, second = ids_of(with_sent_ids(talk, supports(model).call_ids))
    assert first == "abcdef012"
    assert re.fullmatch(r"[0-9a-f]{9}", second)


def test_ids_that_differ_in_characters_which_a_service_lacks_stay_apart() -> None:
    sent = ids_of(with_sent_ids(answer("call.1", "call:1", "call_1"), PLAIN))
    assert sent[2] == "call_1"
    assert len(set(sent)) == 3


def test_an_id_that_an_earlier_one_was_sent_under_is_not_sent_again() -> None:
    (taken,) = ids_of(with_sent_ids(answer("call.1"), MISTRAL))
    assert len(set(ids_of(with_sent_ids((*answer("call.1"), *answer(taken)), MISTRAL)))) == 2


def test_blocks_of_calls_and_results_have_these_ids_too() -> None:
    use: dict[str, Any] = {"toolUse": {"toolUseId": "call 1", "name": "look", "input": {}}}
    result: dict[str, Any] = {"toolResult": {"toolUseId": "call 1", "content": [{"text": "one"}]}}
    talk = (Message.assistant([{"text": "ok"}, use]), Message.user([result]))
    used, answered = with_sent_ids(talk, PLAIN)
    assert used.content[0] == {"text": "ok"}
    name = used.content[1]["toolUse"]["toolUseId"]  # type: ignore[index]
    assert PLAIN.fullmatch(name)
    assert answered.content[0]["toolResult"]["toolUseId"] == name  # type: ignore[index]
    assert use["toolUse"]["toolUseId"] == "call 1"


def test_a_result_without_its_call_has_an_id_that_fits() -> None:
    (lone,) = with_sent_ids((Message(role=Role.TOOL, content="x", tool_call_id="call 1"),), PLAIN)
    assert PLAIN.fullmatch(lone.tool_call_id or "")


def test_an_id_of_every_step_of_a_long_run_is_hashed_once_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[object, ...]] = []

    def counted(*parts: object) -> str:
        made.append(parts)
        return own_id(*parts)

    monkeypatch.setattr(call_ids, "own_id", counted)
    talk = tuple(message for _ in range(500) for message in answer("call_0"))
    assert len(set(ids_of(with_sent_ids(talk, PLAIN)))) == 500
    assert len(made) == 499
