"""What claims read of logged steps: kept by the stored text, within a bound."""

from datetime import UTC, datetime

import pytest

from stepfleet.orchestrator.errors import SerializationError
from stepfleet.orchestrator.records.calls.tools import ToolCall, ToolCallRecord
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.steps import LoggedStep, StepResult
from stepfleet.orchestrator.store.codec import stored_step
from stepfleet.orchestrator.store.runs.step_reader import StepReader

NOW = datetime(2026, 7, 1, tzinfo=UTC)


def logged(step: int, text: str) -> LoggedStep:
    call = ToolCallRecord(tool_name="look", call_id=f"c{step}", result=text, timestamp=NOW)
    result = StepResult(step=step + 1, tool_calls=(call,), started_at=NOW)
    return LoggedStep(result=result, messages=(Message.assistant(text),))


def log_of(*texts: str) -> dict[str, str]:
    return {str(n): stored_step(logged(n, text)) for n, text in enumerate(texts)}


def test_a_step_is_read_once_however_often_its_run_is_claimed() -> None:
    reader = StepReader()
    reader.said("r", log_of("a"))
    (known,) = reader.kept["r"].values()
    (first, second), calls = reader.said("r", log_of("a", "b"))

    assert [one[0].text for one in (first, second)] == ["a", "b"]
    assert [one.result for one in calls] == ["a", "b"]
    assert next(iter(reader.kept["r"].values())) is known
    assert len(reader.kept["r"]) == 2


def test_what_a_claim_changes_in_its_messages_no_other_claim_sees() -> None:
    calls = (ToolCall(id="c", name="look", arguments={"at": [{"page": 1}]}),)
    step = logged(0, "a").model_copy(update={"messages": (Message.assistant("a", calls),)})
    fields, reader = {"0": stored_step(step)}, StepReader()
    for _ in range(3):
        ((message,),), _ = reader.said("r", fields)
        assert (message.metadata, message.tool_calls) == ({}, calls)
        message.metadata["seen"] = True
        message.tool_calls[0].arguments["at"][0]["page"] = 2


def test_steps_with_blocks_or_metadata_are_read_anew() -> None:
    reader, marked = StepReader(), Message.added("note", by="tests")
    for message in (Message.assistant([{"text": "a"}]), marked):
        step = logged(0, "a").model_copy(update={"messages": (message,)})
        assert reader.said("r", {"0": stored_step(step)})[0] == [(message,)]
    assert not reader.kept


def test_a_step_that_was_taken_back_and_made_anew_is_read_anew() -> None:
    reader = StepReader()
    reader.said("r", log_of("a", "b"))
    said, calls = reader.said("r", log_of("a", "c"))

    assert [one[0].text for one in said] == ["a", "c"]
    assert [one.result for one in calls] == ["a", "c"]


def test_what_was_not_read_for_longest_goes_first() -> None:
    one, two, three = (log_of(letter * 100) for letter in "abc")
    alone = StepReader()
    alone.said("1", one)
    reader = StepReader(most=2 * alone.size + 50)
    for run_id, fields in (("1", one), ("2", two), ("1", one), ("3", three)):
        reader.said(run_id, fields)

    assert list(reader.kept) == ["1", "3"]
    assert reader.size == 2 * alone.size


def test_nothing_is_kept_of_steps_that_claims_read_no_more_or_of_a_run_that_is_forgotten() -> None:
    reader, last, fields = StepReader(), StepReader(), log_of("a", "b")
    reader.said("r", fields)
    reader.said("r", fields, first=1)
    last.said("r", fields, first=1)

    assert list(reader.kept["r"]) == [fields["1"]]
    assert reader.size == last.size
    reader.forget("r")
    assert (reader.size, reader.kept) == (0, {})


def test_many_small_objects_weigh_more_than_their_text() -> None:
    reader, plain = StepReader(), StepReader()
    call = ToolCall(id="c", name="look", arguments={"at": [{}] * 1000})
    small = logged(0, "a").model_copy(update={"messages": (Message.assistant("a", (call,)),)})
    reader.said("r", {"0": stored_step(small)})
    plain.said("r", log_of("a" * len(small.to_json())))

    assert reader.size > 10 * plain.size


def test_a_log_beyond_the_bound_is_read_whole() -> None:
    said, calls = StepReader(most=10).said("r", log_of("a", "b", "c"))

    assert [one[0].text for one in said] == ["a", "b", "c"]
    assert len(calls) == 3


def test_a_damaged_step_is_refused_each_time() -> None:
    reader = StepReader()
    for _ in range(2):
        with pytest.raises(SerializationError, match="a record of the run cannot be read"):
            reader.said("r", {"0": '{"messages":[{"role":"nobody"}]}'})
