"""When schedules tick: time zones, jitter, missed ticks. Pure."""

from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfleet.orchestrator import ConfigurationError
from stepfleet.orchestrator.batches.ticks import (
    MOST_MADE_UP,
    at,
    check_times,
    due,
    tick_id,
    ticks_after,
)
from stepfleet.orchestrator.records.schedule import Schedule

NOON = datetime(2026, 11, 23, 12, 0, tzinfo=UTC)


def schedule(cron: str = "0 * * * *", **fields: Any) -> Schedule:
    return Schedule(
        **{"name": "s", "cron": cron, "agent": "a", "config": "c", "created": NOON, **fields}
    )


def ticks(cron: str, after: datetime, count: int, tz: str = "Europe/Berlin") -> list[str]:
    return [f"{one:%d %H:%M}" for one in islice(ticks_after(cron, tz, after), count)]


def test_a_daily_tick_keeps_its_local_time_over_a_change_of_clocks() -> None:
    assert ticks("0 6 * * *", datetime(2026, 3, 27, 12, tzinfo=UTC), 3) == [
        "28 05:00",
        "29 04:00",
        "30 04:00",
    ]


def test_an_hour_that_does_not_exist_and_one_that_comes_twice() -> None:
    """Clocks go forward at 02:00 of March 29, and back at 03:00 of October 25."""
    assert ticks("30 2 * * *", datetime(2026, 3, 28, 12, tzinfo=UTC), 2) == ["29 01:00", "30 00:30"]
    assert ticks("30 2 * * *", datetime(2026, 10, 24, 12, tzinfo=UTC), 2) == [
        "25 00:30",
        "26 01:30",
    ]
    hours = ticks("0 * * * *", datetime(2026, 10, 24, 23, 30, tzinfo=UTC), 3)
    assert hours == ["25 00:00", "25 01:00", "25 02:00"]


@pytest.mark.parametrize(
    ("cron", "tz", "jitter", "named"),
    [
        ("0 66 * * *", "UTC", 0, "Bad hour"),
        ("* * * *", "UTC", 0, "4 fields"),
        ("* * * * * *", "UTC", 0, "6 fields"),
        ("", "UTC", 0, "0 fields"),
        ("0 6 * * *", "Mars", 0, "time zone"),
        ("0 6 * * *", "../etc", 0, "time zone"),
        ("0 6 * * *", "localtime", 0, "time zone"),
        ("0 6 * * *", "posix/Europe/Berlin", 0, "time zone"),
        ("0 6 * * *", "UTC", -1, "jitter"),
        ("0 6 * * *", "UTC", float("nan"), "jitter"),
        ("0 0 30 2 *", "UTC", 0, "day-of-month"),
    ],
)
def test_what_never_ticks_is_refused_and_named(
    cron: str, tz: str, jitter: float, named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        check_times(cron, tz, jitter, NOON)


@pytest.mark.parametrize(
    ("missed", "hours", "submitted", "left_out"),
    [
        ("newest", 5.5, ["20261123T170000Z"], 4),
        ("all", 2.5, ["20261123T130000Z", "20261123T140000Z"], 0),
        ("skip", 5.5, [], 5),
        ("skip", 1.0, ["20261123T130000Z"], 0),
        ("newest", 0.5, [], 0),
    ],
)
def test_missed_ticks_are_made_up_as_the_schedule_says(
    missed: str, hours: float, submitted: list[str], left_out: int
) -> None:
    found = due(schedule(missed=missed), NOON, NOON + timedelta(hours=hours))
    assert [tick_id(one) for one in found.ticks] == submitted
    assert found.left_out == left_out
    assert found.next_look == NOON + timedelta(hours=int(hours) + 1)


def test_a_gap_of_years_costs_no_years_of_ticks() -> None:
    years = NOON + timedelta(days=3650, minutes=1)
    found = due(schedule("* * * * *", missed="all"), NOON, years)
    assert len(found.ticks) == MOST_MADE_UP
    assert found.ticks[-1] == years
    assert found.next_look == years + timedelta(minutes=1)


def test_a_clock_that_was_set_back_ticks_no_tick_again() -> None:
    found = due(schedule(), NOON + timedelta(hours=3), NOON)
    assert found.ticks == ()
    assert found.next_look == NOON + timedelta(hours=4)


@given(st.floats(0, 3600), st.integers(0, 10_000))
def test_jitter_is_the_same_each_time_and_never_longer(jitter: float, minutes: int) -> None:
    one, tick = schedule(jitter=jitter), NOON + timedelta(minutes=minutes)
    assert at(one, tick) == at(one, tick)
    assert tick <= at(one, tick) <= tick + timedelta(seconds=jitter)
