"""Summaries, payloads and numbers of envelopes, without a store."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from stepfleet.orchestrator import Agent, BroadcastConfig, ConfigurationError
from stepfleet.orchestrator.events.envelope import (
    Event,
    EventType,
    args_shown,
    args_summary,
    channel_of,
    numbered,
    result_summary,
    stamp,
)

NOON = datetime(2026, 1, 2, 12, 0, 0, 5600, tzinfo=UTC)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, ""),
        ({"a": 1, "b": True, "c": None, "d": 4}, "a: 1, b: true, c: null"),
        ({"city": "Paris"}, 'city: "Paris"'),
        ({"text": "x" * 40}, 'text: "' + "x" * 26 + "..."),
        ({"deep": {"list": [1, {"a": "b"}]}}, 'deep: {"list": [1, {"a": "b"}]}'),
        ({"list": list(range(30))}, "list: [0, 1, 2, 3, 4, 5, 6, 7, 8,..."),
    ],
)
def test_arguments_are_summed_up_by_the_rules(arguments: dict[str, Any], said: str) -> None:
    """EVT-12: at most three, strings quoted, others as JSON, each at most 30 characters."""
    assert args_summary(arguments) == said


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (None, None),
        ("short", "short"),
        ("y" * 100, "y" * 100),
        ("y" * 101, "y" * 97 + "..."),
        ({"a": [1, None]}, '{"a": [1, null]}'),
        (0, "0"),
    ],
)
def test_results_are_summed_up_by_the_rules(result: Any, said: str | None) -> None:
    """EVT-12: text or JSON, at most 100 characters, null stays null."""
    assert result_summary(result) == said


def test_whole_arguments_are_cut_each_for_itself() -> None:
    """EVT-23: in debug all arguments are told, each to its longest."""
    shown = args_shown({"a": "x" * 12, "b": [1, 2], "c": list(range(9)), "d": "ok"}, 10)
    assert shown == {"a": "xxxxxxx...", "b": [1, 2], "c": "[0, 1, ...", "d": "ok"}


def test_times_are_utc_with_milliseconds_wherever_they_were_made() -> None:
    """EVT-18"""
    tokyo = NOON.astimezone(timezone(timedelta(hours=9)))
    odd = NOON.astimezone(timezone(timedelta(hours=9, microseconds=5000)))
    assert stamp(tokyo) == stamp(odd) == stamp(NOON) == "2026-01-02T12:00:00.005Z"


@pytest.mark.parametrize("micros", [0, 1, 999])
def test_a_time_of_a_whole_second_has_its_milliseconds_too(micros: int) -> None:
    assert stamp(NOON.replace(microsecond=micros)) == "2026-01-02T12:00:00.000Z"


def test_an_envelope_has_its_five_fields_and_a_parent_only_where_there_is_one() -> None:
    """EVT-02, MULTI-02"""
    plain = Event(EventType.STATUS, "s", "s:1", NOON, {})
    child = Event(EventType.STATUS, "s", "s:1", NOON, {}, "parent")
    assert set(plain.to_dict()) == {"type", "session_id", "execution_id", "timestamp", "payload"}
    assert child.to_dict()["parent_agent_id"] == "parent"
    assert channel_of("s") == "agent.s"


def test_stored_envelopes_get_numbers_ids_and_the_time_of_their_write() -> None:
    """EVT-19"""
    told = numbered([{"session_id": "s"}, {"session_id": "s", "timestamp": "then"}], 7, NOON)
    assert [one["sequence"] for one in told] == [7, 8]
    assert [one["event_id"] for one in told] == ["s:7", "s:8"]
    assert [one["timestamp"] for one in told] == ["2026-01-02T12:00:00.005Z", "then"]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("minimal", (False, False, False, 100, True)),
        ("standard", (True, False, False, 100, True)),
        ("debug", (True, True, True, 500, True)),
    ],
)
def test_the_presets_have_their_fields(name: str, fields: tuple[Any, ...]) -> None:
    """EVT-23"""
    preset = getattr(BroadcastConfig, name)()
    assert tuple(preset.model_dump().values()) == fields
    chosen: Any = name
    assert Agent("a", model="openai:x", broadcast=chosen).config.broadcast == preset
    assert Agent("a", model="openai:x").config.broadcast == BroadcastConfig.minimal()


def test_an_unknown_preset_is_reported_with_those_there_are() -> None:
    """EVT-23"""
    with pytest.raises(ConfigurationError, match="minimal, standard, debug"):
        Agent("a", model="openai:x", broadcast="loud")  # type: ignore[arg-type]
