"""The settings of limits in Redis: written by several at once, lost, and not to be read."""

import asyncio
import json

import pytest
from support.runs.stored_runs import Bench

from stepfleet.orchestrator import ConfigurationError, Limit, StoreError
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.keys import NO_PREFIX
from stepfleet.orchestrator.store.limits import (
    SETTLED_MS,
    SUBMITTED,
    LimitStore,
)

MODEL = "openai:m"
SETTINGS = NO_PREFIX.of(keys.LIMIT_SETTINGS)


def of(desk: Bench) -> LimitStore:
    return desk.opened.limits


async def test_people_who_change_different_fields_at_once_lose_nothing(desk: Bench) -> None:
    fields = ("requests_per_minute", "tokens_per_minute", "in_flight", "starts_per_minute")

    async def change(field: str) -> None:
        for number in range(1, 21):
            await of(desk).change(MODEL, {field: number})

    await asyncio.gather(*map(change, fields))
    _, limits = await of(desk).read()
    assert limits[MODEL].model_dump(exclude_unset=True) == dict.fromkeys(fields, 20)


async def test_a_limit_that_cannot_be_read_keeps_its_name_until_it_is_set(desk: Bench) -> None:
    for text in ("{nonsense", "[1]", "7", '{"in_flight": "many"}'):
        await desk.opened.connection.execute("HSET", SETTINGS, MODEL, text)
        await of(desk).provide({MODEL: Limit(in_flight=9)})
        _, limits = await of(desk).known()
        assert list(limits) == [MODEL], "steps still name it, and wait"
        with pytest.raises(StoreError, match="limits set"):
            await of(desk).read()
        with pytest.raises(ConfigurationError, match="in_flight"):
            await of(desk).change(MODEL, {"in_flight": 0})
    await of(desk).change(MODEL, {"in_flight": 3})
    assert (await of(desk).read())[1] == {MODEL: Limit(in_flight=3)}


async def test_lost_limits_come_back_as_what_they_were(desk: Bench) -> None:
    configured, by_hand = Limit(in_flight=1), Limit(in_flight=2)
    await of(desk).provide({MODEL: configured})
    await of(desk).change("openai:x", {"in_flight": 2})
    before, limits = await of(desk).read()
    await desk.opened.connection.execute("DEL", SETTINGS)
    await of(desk).change("openai:y", {"in_flight": 5})
    assert (await of(desk).version()) != before, "a version never comes twice"
    await of(desk).begin_with({**limits, "openai:y": configured}, {MODEL: configured})
    newer = Limit(in_flight=7)
    await of(desk).provide(dict.fromkeys((MODEL, "openai:x", "openai:y"), newer))
    assert (await of(desk).read())[1] == {
        MODEL: newer,  # still a configuration's
        "openai:x": by_hand,
        "openai:y": Limit(in_flight=5),  # somebody was faster
    }
    stored = await desk.opened.connection.execute("HGET", SETTINGS, MODEL)
    assert json.loads(stored)["provided"]


async def test_the_limit_of_a_run_goes_some_time_after_its_end(desk: Bench) -> None:
    """Those of others stay: of a run that goes on, of a new one, and what somebody has set."""
    ended, begun, fresh, by_hand = [f"run:{await desk.create()}" for _ in range(4)]
    execute, settings = desk.opened.connection.execute, of(desk)
    for name in (ended, begun, fresh, "run:gone"):
        assert await settings.submitted(name, Limit(usd=1))
    await settings.change(by_hand, {"usd": 1})
    for name in (ended, begun, "run:gone"):
        stored = json.loads(await execute("HGET", SETTINGS, name))
        stored[SUBMITTED] -= SETTLED_MS
        await execute("HSET", SETTINGS, name, json.dumps(stored))
    for name in (ended, fresh, by_hand):
        await desk.control.cancel_unread(name.removeprefix("run:"), "")
    before, at = await settings.version(), "0"
    while (at := await settings.sweep(at)) != "0":
        pass
    assert set(await settings.names()) == {begun, fresh, by_hand}
    assert await settings.version() != before, "workers read it again"
