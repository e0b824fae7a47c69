"""Events of one write as they are stored, and back: the envelopes that were told."""

from datetime import UTC, datetime

import orjson
import pytest

from stepfleet.orchestrator.errors import SerializationError
from stepfleet.orchestrator.events.envelope import Event, Events, EventType, status_payload
from stepfleet.orchestrator.store.codec import load_events, stored_events

AT = datetime(2026, 3, 1, 12, 0, 0, 5000, UTC)


def events(execution: str, parent: str | None) -> Events:
    return Events(
        Event(kind, "run-1", execution, AT, {"step_number": 3, "kind": kind.value}, parent)
        for kind in EventType
    )


@pytest.mark.parametrize("parent", [None, "run-0"])
@pytest.mark.parametrize("execution", ["run-1:1", "run-1:2", "another"])
def test_envelopes_come_back_as_they_were_told(execution: str, parent: str | None) -> None:
    told = events(execution, parent)
    found = load_events("run-1", stored_events(told))
    assert found == [event.to_dict() for event in told]
    assert [list(one) for one in found] == [list(event.to_dict()) for event in told]


def test_what_the_key_and_the_dictionary_say_is_not_stored() -> None:
    told = events("run-1:1", None)
    whole = orjson.dumps([event.to_dict() for event in told])
    assert len(stored_events(told)) < len(whole) / 4


def test_no_events_are_no_text() -> None:
    assert stored_events(Events()) == ""


def test_a_change_of_status_that_a_script_told_is_an_envelope_without_a_time() -> None:
    stored = 's["paused","in_progress",2,"so far",null,null]'
    assert load_events("run-1", stored) == [
        {
            "type": "agent.status",
            "session_id": "run-1",
            "execution_id": "run-1:1",
            "payload": status_payload(
                "paused", before="in_progress", steps=2, last_response="so far"
            ),
        }
    ]
    (found,) = load_events("run-1", 's["paused","queued",0,null,"run-1:4","run-0"]')
    assert (found["execution_id"], found["parent_agent_id"]) == ("run-1:4", "run-0")


def test_plain_envelopes_of_version_1_are_read() -> None:
    told = [event.to_dict() for event in events("run-1:1", None)]
    assert load_events("run-1", orjson.dumps(told).decode()) == told


@pytest.mark.parametrize(
    "damaged", ["", "s", "s[1]", "[]", "[1]", "[null,null,3]", "[null,null,[1]]", "7", "null", "a!"]
)
def test_damaged_events_are_refused_clearly(damaged: str) -> None:
    with pytest.raises(SerializationError, match="cannot be read"):
        load_events("run-1", damaged)
