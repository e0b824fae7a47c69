"""What the admission script learns from refusals and headers, on a real Redis."""

from collections.abc import Iterator
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


def refuse(gate: Admissions, **given: Any) -> None:
    gate.call({"op": "throttled", "names": [MODEL], "age": 10, **given})


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


class Provider:
    """Allows so many requests per minute, in bursts of two seconds."""

    def __init__(self, gate: Admissions) -> None:
        self.gate = gate
        self.level = 0.0

    def play(self, allowed: float, seconds: float) -> tuple[int, int]:
        """Answer what is admitted; return how many calls were accepted, and refused."""
        gate, accepted, refused = self.gate, 0, 0
        for _ in range(int(seconds * 20)):
            gate.tick(50)
            self.level = min(self.level + allowed / 1200, allowed / 30)
            for run, (step, *_) in list(gate.granted.items()):
                is_refused = self.level < 1
                if is_refused:
                    refused += 1
                    refuse(gate, ms=1000)
                else:
                    self.level, accepted = self.level - 1, accepted + 1
                gate.settle(run, step, r=1)
                gate.ask(run, MODEL, step=step + 1, op="again" if is_refused else "ask")
        return accepted, refused


def test_the_first_refusal_of_a_model_makes_a_limit_that_everybody_finds(gate: Admissions) -> None:
    refuse(gate, ms=2000, sent=101, secs=10)
    assert stored(gate) == {MODEL: '{"learned":1}', "version": f"{gate.now}000"}
    assert rate(gate) == 600
    refuse(gate, ms=2000)  # of the same moment: another of those 101
    assert rate(gate) == pytest.approx(594)
    flood(gate, 3)
    assert not gate.granted
    gate.tick(2000)
    assert len(gate.granted) == 1, "behind a pause calls go out evenly"
    gate.tick(250)
    assert len(gate.granted) == 3


def test_headers_name_the_limit_of_a_model_that_has_none(gate: Admissions) -> None:
    refuse(gate, ms=100, said={"r": 600, "t": 60_000})
    flood(gate, 50)
    gate.tick(100)
    gate.tick(1000)
    assert len(gate.granted) == 11
    gate.call({"op": "headers", "names": ["openai:other"], "said": {"r": 5}})
    assert "openai:other" not in stored(gate), "it has room"
    gate.call({"op": "headers", "names": ["openai:other"], "said": {"r": 5}, "make": True})
    assert "openai:other" in stored(gate)


def test_the_rate_is_back_soon_after_a_minute_in_which_every_call_was_refused(
    gate: Admissions,
) -> None:
    provider = Provider(gate)
    refuse(gate, ms=500, sent=101, secs=10)
    flood(gate, 100)
    assert provider.play(0, 60)[0] == 0
    provider.play(1200, 20)
    accepted, refused = provider.play(1200, 20)
    assert accepted >= 0.9 * 400
    assert refused <= 20


def test_refusals_of_calls_without_a_grant_show_nothing_where_the_limit_is_stated(
    gate: Admissions,
) -> None:
    """Workers that do not know of it yet use it up: what others get is no measure of it."""
    for _ in range(10):
        refuse(gate, ms=100, said={"r": 600})
        flood(gate, 20)
        gate.tick(400)
    assert rate(gate) is None
    gate.tick(5000)
    refuse(gate, ms=100, said={"r": 600})
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


@pytest.mark.parametrize("configured", [None, 6000])
def test_a_rate_without_headers_comes_to_what_the_provider_allows(
    gate: Admissions, configured: float | None
) -> None:
    """LLM-15: unknown, or configured too high; then halved, then doubled at the provider."""
    if configured:
        gate.limit(MODEL, requests_per_minute=configured)
    else:
        refuse(gate, ms=1000, sent=400, secs=1)
    flood(gate, 200)
    play = Provider(gate).play
    play(600, 20)
    accepted, refused = play(600, 60)
    assert accepted > 0.95 * 600
    assert refused < 0.02 * accepted
    play(300, 20)
    accepted, refused = play(300, 40)
    assert accepted > 0.95 * 200
    assert refused < 0.05 * accepted
    play(600, 60)
    accepted, refused = play(600, 15)
    assert accepted > 0.95 * 150


def test_few_refusals_pause_calls_and_leave_a_rate_that_somebody_has_set(gate: Admissions) -> None:
    """Estimates of tokens err a little; one refusal is no reason to call ever more slowly."""
    gate.limit(MODEL, tokens_per_minute=300_000)
    for _ in range(5):
        refuse(gate, ms=1000)
    assert rate(gate) is None
    assert gate.ask("r0", MODEL) == "waits"
    gate.tick(1100)
    assert "r0" in gate.granted
    refuse(gate, ms=1000)  # the sixth
    assert rate(gate) is not None, "many within a minute: the provider allows less"


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
    accepted, _ = Provider(gate).play(6000, 40)
    assert accepted > 500


def test_setting_or_clearing_a_limit_ends_what_was_learned(gate: Admissions) -> None:
    refuse(gate, ms=1, sent=11, secs=10)
    flood(gate, 100)
    gate.tick(1000)
    assert len(gate.granted) <= 2
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
