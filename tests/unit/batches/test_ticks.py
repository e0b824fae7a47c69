"""When schedules tick: time zones, jitter, missed ticks. Pure."""

from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfleet.orchestrator import ConfigurationError
from stepfleet.orchestrator.batches.scheduling import (
    MOST_MADE_UP,
    at,
    check_times,
    due,
    placed,
    tick_id,
    ticks_after,
    ticks_until,
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
        ("0 0 30 2 *", "UTC", 0, "has no date that exists; change day or month"),
        ("0 0 31 2,4 *", "UTC", 0, "has no date that exists; change day or month"),
        ("0 0 32 2 *", "UTC", 0, "Bad day-of-month"),
        ("0 0 31 13 *", "UTC", 0, "Bad month"),
        ("@every 5s", "UTC", 0, "@every 15m"),
        ("@every day", "UTC", 0, "@every 15m"),
        ("@every 400d", "UTC", 0, "@every 15m"),
        ("@nightly", "UTC", 0, "write one of @yearly, @monthly, @weekly, @daily, @hourly, or @eve"),
        (6, "UTC", 0, "cron is 6; write it as text"),
        ("@daily", None, 0, "tz is None; write it as text"),
        ("@daily", "UTC", "5m", "jitter is '5m'; write seconds"),
    ],
)
def test_what_never_ticks_is_refused_and_named(cron: Any, tz: Any, jitter: Any, named: str) -> None:
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
    assert found.last == (NOON + timedelta(hours=int(hours)) if int(hours) else None)


def test_a_gap_of_years_costs_no_years_of_ticks() -> None:
    years = NOON + timedelta(days=3650, minutes=1)
    found = due(schedule("* * * * *", missed="all"), NOON, years)
    assert len(found.ticks) == MOST_MADE_UP
    assert found.ticks[-1] == years
    assert found.next_look == years + timedelta(minutes=1)


def test_a_long_gap_whose_ticks_lie_together_is_over_with_its_newest_ones() -> None:
    january = schedule("* * * 1 *", missed="all", created=datetime(2026, 1, 1, tzinfo=UTC))
    found = due(january, None, datetime(2026, 2, 20, tzinfo=UTC))
    assert len(found.ticks) == MOST_MADE_UP
    assert tick_id(found.ticks[-1]) == "20260131T235900Z"
    assert found.next_look == datetime(2027, 1, 1, tzinfo=UTC)


def test_a_long_gap_is_over_also_where_ticks_wait_for_most_of_a_day() -> None:
    shaken = schedule("* * * * *", jitter=86_400)
    assert due(shaken, NOON, NOON + timedelta(days=20)).ticks


def test_a_clock_that_was_set_back_ticks_no_tick_again() -> None:
    found = due(schedule(), NOON + timedelta(hours=3), NOON)
    assert found.ticks == ()
    assert found.next_look == NOON + timedelta(hours=4)


@given(st.floats(0, 3600), st.integers(0, 10_000))
def test_jitter_is_the_same_each_time_and_never_longer(jitter: float, minutes: int) -> None:
    one, tick = schedule(jitter=jitter), NOON + timedelta(minutes=minutes)
    assert at(one, tick) == at(one, tick)
    assert tick <= at(one, tick) <= tick + timedelta(seconds=jitter)


def test_intervals_are_counted_from_1970_whatever_the_zone() -> None:
    assert ticks("@every 15m", NOON, 2) == ["23 12:15", "23 12:30"]
    assert ticks("@every 15m", NOON - timedelta(seconds=1), 1) == ["23 12:00"]
    (day,) = islice(ticks_after(" @every 1d ", "Europe/Berlin", NOON), 1)
    assert day == datetime(2026, 11, 24, tzinfo=UTC)


def test_lines_have_the_ticks_time_and_date_in_the_schedules_zone() -> None:
    night = datetime(2026, 11, 23, 23, 30, tzinfo=UTC)
    row = '{"input": "News of {tick_date}, at {tick}: {other}"}'
    assert placed(row, night, "Europe/Berlin") == (
        '{"input": "News of 2026-11-24, at 2026-11-24T00:30:00+01:00: {other}"}'
    )


CRONS = ("30 2 * * *", "*/20 * * * *", "0 * * * *", "@every 90m", "15 1-3 * * *")
"""Also those of the hours that clocks skip, or have twice."""
CHANGES = (datetime(2026, 3, 28, 22, tzinfo=UTC), datetime(2026, 10, 24, 22, tzinfo=UTC))


@given(
    cron=st.sampled_from(CRONS),
    begin=st.sampled_from(CHANGES),
    looks=st.lists(st.integers(-400, 400), min_size=1, max_size=30),
    jitter=st.sampled_from([0.0, 600.0]),
    missed=st.sampled_from(["newest", "all", "skip"]),
)
def test_whatever_the_clock_does_no_tick_comes_twice_and_none_is_lost(
    cron: str, begin: datetime, looks: list[int], jitter: float, missed: str
) -> None:
    """The clock is read at times that go forward and back, over a change of local clocks."""
    one = schedule(cron, tz="Europe/Berlin", jitter=jitter, missed=missed, created=begin)
    now, last, submitted, left_out = begin, None, list[datetime](), 0
    latest = begin
    for minutes in looks:
        now = now + timedelta(minutes=minutes)
        latest = max(latest, now)
        found = due(one, last, now)
        assert found.next_look > now
        submitted += found.ticks
        left_out += found.left_out
        last = found.last or last
    passed = [
        tick
        for tick in ticks_until(ticks_after(cron, "Europe/Berlin", begin), latest)
        if at(one, tick) <= latest
    ]
    assert submitted == sorted(set(submitted))
    assert set(submitted) <= set(passed)
    assert len(submitted) + left_out == len(passed)
    if missed == "all":
        assert submitted == passed
    if missed == "newest" and passed:
        assert submitted[-1] == passed[-1]
