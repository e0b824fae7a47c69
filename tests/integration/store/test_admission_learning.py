"""What the admission script learns from refusals and headers, on a real Redis."""

from collections.abc import Iterator
from hashlib import sha1
from typing import Any

import orjson
import pytest
from redis import Redis
from support.runs.admissions import Admissions

from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.keys import NO_PREFIX

MODEL = "openai:m"
HOUR = 3_600_000


@pytest.fixture
def gate(redis_url: str) -> Iterator[Admissions]:
    """The script on the test's Redis."""
    with Redis.from_url(redis_url, decode_responses=True) as client:
        yield Admissions(client)


def refuse(gate: Admissions, times: int = 1, **given: Any) -> str:
    return gate.refuse(MODEL, times, **given)


def rate(gate: Admissions) -> float | None:
    """Return the learned requests per minute."""
    state = orjson.loads(str(gate.client.hget(NO_PREFIX.of(keys.LIMIT_STATE), MODEL) or "{}"))
    found = state.get("l", {}).get("r")
    return None if found is None else float(found)


def stored(gate: Admissions) -> dict[str, str]:
    found = gate.client.hgetall(NO_PREFIX.of(keys.LIMIT_SETTINGS))
    return {str(name): str(text) for name, text in found.items()}


def flood(gate: Admissions, runs: int) -> None:
    for number in range(runs):
        gate.ask(f"r{number}", MODEL)


def test_one_refusal_stops_nobody_but_the_call_that_was_refused(gate: Admissions) -> None:
    """ERR-22"""
    flood(gate, 30)
    assert refuse(gate, ms=60_000, sent=1, secs=10) == "alone"
    assert refuse(gate, ms=60_000, sent=1, secs=10) == "alone"
    flood(gate, 60)
    assert len(gate.granted) == 60
    assert rate(gate) is None


def test_the_first_refusal_of_a_model_makes_a_limit_that_everybody_finds(gate: Admissions) -> None:
    refuse(gate, ms=2000, sent=100, secs=10)
    assert stored(gate) == {MODEL: '{"learned":1}', "version": f"{gate.now}000"}
    refuse(gate, 49, ms=2000)  # of the same moment: others of those hundred
    assert rate(gate) == pytest.approx(0.97 * 600 * 0.5)
    flood(gate, 3)
    assert len(gate.granted) == 1, "behind a cut calls go out evenly"
    gate.tick(210)
    assert len(gate.granted) == 2


def test_headers_name_the_limit_of_a_model_that_has_none(gate: Admissions) -> None:
    refuse(gate, 3, ms=100, said={"r": 600, "t": 60_000})
    flood(gate, 50)
    gate.tick(500)
    gate.tick(1000)
    assert len(gate.granted) == 11
    gate.call({"op": "headers", "names": ["openai:other"], "said": {"r": 5}})
    assert "openai:other" not in stored(gate), "it has room"
    gate.call({"op": "headers", "names": ["openai:other"], "said": {"r": 5}, "make": True})
    assert "openai:other" in stored(gate)


def test_refusals_of_calls_without_a_grant_show_nothing_where_the_limit_is_stated(
    gate: Admissions,
) -> None:
    """Workers that do not know of it yet use it up: what others get is no measure of it."""
    for _ in range(5):
        refuse(gate, 4, ms=100, said={"r": 600})
        flood(gate, 20)
        gate.tick(900)
    assert rate(gate) is None
    gate.tick(5000)
    flood(gate, 40)
    refuse(gate, 20, ms=100, said={"r": 600})
    assert rate(gate) is not None, "by then all know of it"


def test_headers_lower_what_is_configured_and_never_raise_it(gate: Admissions) -> None:
    gate.limit(MODEL, requests_per_minute=1200)
    gate.call({"op": "headers", "names": [MODEL], "said": {"r": 6000, "t": 1}})
    flood(gate, 100)
    assert len(gate.granted) == 20
    gate.call({"op": "headers", "names": [MODEL], "said": {"r": 600}})
    gate.tick(1000)
    assert len(gate.granted) == 30
    gate.call({"op": "headers", "names": [MODEL], "said": {"r": 1200}})
    gate.tick(1000)
    assert len(gate.granted) == 50


def test_what_is_left_by_the_providers_count_is_all_there_is(gate: Admissions) -> None:
    gate.limit(MODEL, requests_per_minute=1200)
    gate.call({"op": "headers", "names": [MODEL], "said": {"r": 1200}, "left": {"r": 3}})
    flood(gate, 10)
    assert len(gate.granted) == 3


def test_few_refusals_leave_a_rate_that_somebody_has_set(gate: Admissions) -> None:
    """Estimates of tokens err a little; a refusal is no reason to call ever more slowly."""
    gate.limit(MODEL, tokens_per_minute=300_000)
    flood(gate, 8)
    assert refuse(gate, 4, ms=1000) == "alone"
    assert rate(gate) is None
    assert refuse(gate, 2, ms=1000) == "paused"
    assert rate(gate) is not None, "most are refused: the provider allows less"


def test_a_provider_that_refuses_all_is_asked_ever_more_seldom(gate: Admissions) -> None:
    gate.limit(MODEL, requests_per_minute=6000)
    flood(gate, 50)
    asked = []
    for _ in range(1500):
        gate.tick(100)
        asked.append(len(gate.granted))
        for run, (step, *_) in list(gate.granted.items()):
            refuse(gate)
            gate.settle(run, step, r=1)
            gate.ask(run, MODEL, step=step + 1, op="again")
    assert sum(asked[600:]) <= 60, "in 90 seconds"
    assert (rate(gate) or 0) >= 300, "the rate comes back soon when the provider does"


def test_setting_or_clearing_a_limit_ends_what_was_learned(gate: Admissions) -> None:
    refuse(gate, ms=1, sent=10, secs=10)
    refuse(gate, 8, ms=1)
    gate.tick(1000)
    flood(gate, 100)
    gate.tick(1000)
    assert len(gate.granted) <= 2
    assert rate(gate) is not None
    gate.limit(MODEL, requests_per_minute=1200)
    gate.tick(1000)
    assert len(gate.granted) >= 20
    assert rate(gate) is None
    refuse(gate, ms=1)
    gate.client.hdel(NO_PREFIX.of(keys.LIMIT_SETTINGS), MODEL)
    gate.tick(1000)
    assert rate(gate) is None


def test_a_learned_limit_that_nobody_needs_is_dropped_after_an_hour(gate: Admissions) -> None:
    refuse(gate, ms=1000, sent=6001, secs=10)
    gate.tick(HOUR - 2000)
    assert MODEL in stored(gate)
    gate.tick(5000)
    gate.tick(1000)
    assert MODEL not in stored(gate)
    assert stored(gate)["version"] > f"{gate.now - 7000}000", "a time: none comes twice"
    assert rate(gate) is None


def test_what_a_worker_of_the_release_before_has_learned_is_learned_anew(gate: Admissions) -> None:
    """Both work side by side: its record has other fields, and stops nobody."""
    gate.limit(MODEL, requests_per_minute=600)
    text = gate.client.hget(NO_PREFIX.of(keys.LIMIT_SETTINGS), MODEL)
    before = {"of": sha1(str(text).encode()).hexdigest(), "at": gate.now, "n": 5, "from": gate.now}  # noqa: S324 - the script's digest
    state = {"l": before | {"r": 1, "wave": 0, "up": gate.now, "k": 0, "need": gate.now}}
    gate.client.hset(NO_PREFIX.of(keys.LIMIT_STATE), MODEL, orjson.dumps(state).decode())
    assert refuse(gate, ms=1000) == "alone"
    flood(gate, 10)
    assert len(gate.granted) == 10
