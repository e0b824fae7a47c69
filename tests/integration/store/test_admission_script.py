"""The admission script on a real Redis: what it grants, whom it lets wait, and in which order."""

from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from redis import Redis
from support.runs.admissions import LEASE, Admissions, request

from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.keys import NO_PREFIX

MODEL = "openai:m"
WAITING = NO_PREFIX.of(keys.LIMIT_WAITING)


@pytest.fixture
def gate(redis_url: str) -> Iterator[Admissions]:
    """The script on the test's Redis."""
    with Redis.from_url(redis_url, decode_responses=True) as client:
        yield Admissions(client)


def test_what_does_not_fit_waits_and_is_admitted_when_a_call_ends(gate: Admissions) -> None:
    gate.limit(MODEL, in_flight=2)
    assert [gate.ask(f"r{at}", MODEL) for at in range(4)] == ["granted"] * 2 + ["waits"] * 2
    assert (gate.waiting, gate.pause) == (2, -1)
    assert gate.settle("r0") == "done"
    assert set(gate.granted) == {"r1", "r2"}
    assert gate.settle("r0") == "none"
    assert gate.ask("r3", MODEL) == "waits"  # once more: it has its place
    assert gate.waiting == 1


def test_a_step_is_granted_once_however_often_it_asks(gate: Admissions) -> None:
    gate.limit(MODEL, in_flight=2)
    for _ in range(3):
        assert gate.ask("r0", MODEL, op="try") == "granted"
    assert gate.in_flight(MODEL) == 1
    assert gate.ask("r0", MODEL, step=1) == "granted"  # the settlement of step 0 was lost
    assert gate.in_flight(MODEL) == 1


def test_a_try_takes_no_place_in_the_line(gate: Admissions) -> None:
    gate.limit(MODEL, in_flight=1)
    gate.ask("r0", MODEL)
    assert gate.ask("r1", MODEL, op="try") == "full"
    assert gate.waiting == 0


def test_rates_fill_with_time_and_never_beyond_their_burst(gate: Admissions) -> None:
    gate.limit(MODEL, requests_per_minute=600)  # ten per second, ten at once
    words = [gate.ask(f"r{at}", MODEL) for at in range(30)]
    assert words.count("granted") == 10
    assert 0 < gate.pause <= 100
    gate.tick(500)
    assert len(gate.granted) == 15
    gate.tick(60_000)
    assert len(gate.granted) == 25


def test_tokens_are_settled_by_what_was_used(gate: Admissions) -> None:
    gate.limit(MODEL, tokens_per_minute=60_000)  # 1,000 per second
    assert gate.ask("r0", MODEL, i=400, o=400) == "granted"
    assert gate.ask("r1", MODEL, i=400) == "waits"
    gate.settle("r0", r=1, i=300, o=100)
    assert "r1" in gate.granted
    assert gate.ask("r2", MODEL, i=5_000) == "waits"  # larger than the bucket: when that is full
    gate.tick(900)
    assert "r2" in gate.granted
    assert gate.ask("r3", MODEL, i=1) == "waits"
    gate.tick(3_500)
    assert "r3" not in gate.granted
    gate.tick(700)
    assert "r3" in gate.granted


def test_a_refund_gives_all_of_it_back(gate: Admissions) -> None:
    gate.limit(MODEL, requests_per_minute=60)
    assert gate.ask("r0", MODEL) == "granted"
    assert gate.ask("r1", MODEL) == "waits"
    gate.refund("r0")
    assert "r1" in gate.granted


def test_every_limit_of_a_step_has_to_have_room_and_others_pass(gate: Admissions) -> None:
    gate.limit(MODEL, in_flight=3)
    gate.limit("batch:*", in_flight=1)
    assert gate.ask("r0", MODEL, "batch:a") == "granted"
    assert gate.ask("r1", MODEL, "batch:a") == "waits"
    assert gate.ask("r2", MODEL, "batch:b") == "granted"  # passes those whose batch is full
    assert gate.ask("r3", MODEL) == "granted"
    gate.settle("r3")
    assert "r1" not in gate.granted
    gate.settle("r0")
    assert "r1" in gate.granted


def test_begun_runs_come_before_fresh_ones_and_refused_calls_first(gate: Admissions) -> None:
    gate.limit(MODEL, in_flight=1)
    gate.ask("r0", MODEL)
    gate.ask("fresh", MODEL, fresh=True)
    gate.ask("begun", MODEL, step=3)
    gate.ask("refused", MODEL, op="again")
    order = []
    for run, step in (("r0", 0), ("refused", 0), ("begun", 3), ("fresh", 0)):
        assert run in gate.granted
        order.append(run)
        gate.settle(run, step)
    assert not gate.granted
    assert gate.waiting == 0


def test_a_higher_priority_goes_first_and_the_lowest_is_not_left_waiting_for_ever(
    gate: Admissions,
) -> None:
    gate.limit(MODEL, in_flight=1)
    gate.ask("r0", MODEL)
    for n in range(8):
        gate.ask(f"low{n}", MODEL, priority=2, fresh=n > 0)
    for n in range(30):
        gate.ask(f"normal{n}", MODEL, fresh=True)
    for n in range(30):
        gate.ask(f"high{n}", MODEL, priority=0, fresh=n < 15)
    order = []
    run = "r0"
    while gate.waiting:
        gate.settle(run)
        [run] = gate.granted
        order.append(run)
    high = [at for at, one in enumerate(order) if one.startswith("high")]
    lower = [one for one in order[: high[-1]] if not one.startswith("high")]
    assert order[0] == "high15", "begun runs come before fresh ones of their priority"
    assert high[:8] == [0, 1, 2, 3, 4, 5, 6, 8], "one admission in eight is of another"
    assert lower == ["low0", "normal0", "low1", "normal1"], "in turn"
    assert [one for one in order if one.startswith("low")] == [f"low{n}" for n in range(8)]


def test_a_flood_delays_others_by_their_share_only(gate: Admissions) -> None:
    gate.limit(MODEL, in_flight=10)
    gate.limit("tenant:big", weight=3)
    for at in range(200):
        gate.ask(f"f{at}", MODEL, tenant="flood")
    for at in range(100):
        gate.ask(f"b{at}", MODEL, tenant="big")
        gate.ask(f"s{at}", MODEL, tenant="small")
    gate.served.clear()
    for _ in range(100):
        gate.settle(next(iter(gate.granted)))
    assert gate.served["big"] == pytest.approx(60, abs=2)
    assert gate.served["small"] == pytest.approx(20, abs=2)
    assert gate.served["flood"] == pytest.approx(20, abs=2)
    for _ in range(300):  # alone, the flood has everything
        gate.settle(next(iter(gate.granted)))
    assert gate.waiting == 0


def test_a_tenant_that_comes_and_goes_has_no_more_than_its_share(gate: Admissions) -> None:
    gate.limit(MODEL, in_flight=1)
    for at in range(100):
        gate.ask(f"a{at}", MODEL, tenant="a")
        gate.ask(f"c{at}", MODEL, tenant="c")
    gate.served.clear()
    for at in range(60):
        gate.ask(f"now{at}", MODEL, tenant="comes")
        gate.settle(next(iter(gate.granted)))
    assert gate.served["comes"] == pytest.approx(20, abs=3)


def test_a_grant_that_nobody_renews_is_dispatched_again_then_given_back(gate: Admissions) -> None:
    gate.limit(MODEL, in_flight=1)
    gate.ask("lost", MODEL)
    gate.ask("next", MODEL)
    gate.call({"op": "renew", "run": "lost", "step": 0})
    gate.granted.clear()
    gate.tick(LEASE - 1000)
    assert not gate.granted
    gate.tick(2000)
    assert set(gate.granted) == {"lost"}  # its hint may be lost: once more
    gate.granted.clear()
    gate.tick(LEASE + 1000)
    assert gate.in_flight(MODEL) == 1
    assert gate.waiting == 1
    assert set(gate.granted) == {"lost"}, "it waits again, at the head: its run may live"
    gate.refund("lost")
    assert set(gate.granted) == {"next"}


@pytest.mark.parametrize(
    "text", ["{", "7", "[1]", '{"in_flight": "x"}', '{"requests_per_minute": 0}']
)
def test_a_limit_that_makes_no_sense_lets_nobody_through(gate: Admissions, text: str) -> None:
    settings = NO_PREFIX.of(keys.LIMIT_SETTINGS)
    gate.client.hset(settings, MODEL, text)
    assert gate.ask("r0", MODEL) == "waits"
    gate.limit(MODEL, in_flight=1)
    gate.client.hset(settings, "version", "next")
    gate.tick(1000)
    assert "r0" in gate.granted


@pytest.mark.parametrize("lost", [keys.LIMIT_STATE, keys.LIMIT_GRANTS])
def test_calls_in_flight_are_counted_anew_in_a_busy_fleet(gate: Admissions, lost: str) -> None:
    gate.limit(MODEL, in_flight=4)
    gate.limit("openai:other", in_flight=1)
    for at in range(4):
        gate.ask(f"old{at}", MODEL)
    gate.tick(1000)
    gate.client.delete(NO_PREFIX.of(lost))
    if lost == keys.LIMIT_GRANTS:
        gate.granted.clear()
    gate.ask("other", "openai:other")  # there is always some grant
    for at in range(20):
        gate.ask(f"new{at}", MODEL)
    for _ in range(4 * LEASE // 1000):
        for run in [run for run in gate.granted if run.startswith("old")]:
            gate.settle(run)
        gate.call({"op": "renew", "run": "other", "step": 0})
        for run, (step, *_) in gate.granted.items():
            gate.call({"op": "renew", "run": run, "step": step})
        gate.tick(1000)
    held = sorted(run for run in gate.granted if run != "other")
    assert len(held) == gate.in_flight(MODEL) == 4
    gate.settle(held[0])
    assert sum(run.startswith("new") for run in gate.granted) == 4, "the limit holds again"
    gate.client.hdel(NO_PREFIX.of(keys.LIMIT_GRANTS), *held[1:])  # some of many
    for _ in range(3 * LEASE // 1000):
        gate.call({"op": "renew", "run": "other", "step": 0})
        gate.tick(1000)
    assert gate.waiting < 20 - 6, "and what was lost is given to others"


@pytest.mark.parametrize(
    "lost",
    ["lines", "tenants:*", "flows:*", "flow:*", "left:*", "blocked:*", "when", "ready", "every"],
)
def test_each_key_of_the_lines_heals_by_itself(gate: Admissions, lost: str) -> None:
    gate.limit(MODEL, in_flight=2)
    gate.limit("batch:*", in_flight=1)
    for at in range(12):
        gate.ask(f"r{at}", MODEL, f"batch:{at % 3}", tenant="ab"[at % 2])
    found = list(gate.client.scan_iter(f"sf:{{limits}}:{lost}"))
    gate.client.delete(*found) if found else None
    done: set[str] = set()
    while len(done) < 12 and gate.now < 1_800_000_100_000:
        done |= set(gate.granted)
        for run in list(gate.granted):
            gate.settle(run)
        gate.tick(500)
        places = gate.client.hlen(WAITING)
        if not gate.granted and not places:  # workers have runs without a place ask again
            for at in range(12):
                if f"r{at}" not in done:
                    gate.ask(f"r{at}", MODEL, f"batch:{at % 3}", tenant="ab"[at % 2])
    assert len(done) == 12


@pytest.mark.parametrize("text", ["{", "{}", "7", '{"run": "x", "step": 0, "names": []}'])
def test_what_somebody_has_written_by_hand_stops_nobody(gate: Admissions, text: str) -> None:
    gate.limit(MODEL, in_flight=1)
    gate.ask("r0", MODEL)
    assert gate.ask("r1", MODEL) == "waits"
    [flow] = gate.client.scan_iter("sf:{limits}:flow:*")
    gate.client.lpush(flow, text)
    gate.client.hset(NO_PREFIX.of(keys.LIMIT_GRANTS), "x", text)
    assert gate.ask("x", MODEL) == "waits"
    gate.tick(1000)
    gate.settle("r0")
    assert "r1" in gate.granted
    gate.settle("r1")
    assert "x" in gate.granted


def test_a_lost_part_of_a_line_heals_in_a_fleet_that_is_never_idle(gate: Admissions) -> None:
    gate.limit(MODEL, in_flight=1)
    ours = [f"a{at}" for at in range(4)]
    for run in ours:
        gate.ask(f"b{run}", MODEL, tenant="b")
        gate.ask(run, MODEL, tenant="a")
    gate.now += 1000
    assert gate.client.delete(*gate.client.scan_iter("sf:{limits}:flow:*a\x1fopenai:m")) == 1
    done: set[str] = set()
    for turn in range(40):
        done |= set(gate.granted)
        for run in list(gate.granted):
            gate.settle(run)
        gate.ask(f"c{turn}", MODEL, tenant="b")
        gate.tick(500)
        own = orjson.loads(str(gate.client.hget(NO_PREFIX.of(keys.LIMIT_STATE), "*")))
        for run in ours:  # workers have runs ask again that have waited since before the loss
            place = str(gate.client.hget(WAITING, run) or "0 0").split()
            if run not in done and int(place[1]) <= own.get("lost", 0):
                gate.ask(run, MODEL, tenant="a")
    assert done >= set(ours)


def test_calls_in_flight_are_none_where_no_grant_is_left(gate: Admissions) -> None:
    gate.limit(MODEL, in_flight=1)
    gate.ask("r0", MODEL)
    gate.client.delete(NO_PREFIX.of(keys.LIMIT_GRANTS))
    assert gate.ask("r1", MODEL) == "waits"
    gate.tick(1000)
    gate.tick(1000)
    assert "r1" in gate.granted


def test_nobody_calls_before_the_time_that_a_refusal_names(gate: Admissions) -> None:
    gate.limit(MODEL, in_flight=5)
    gate.ask("r0", MODEL)
    assert gate.refuse(MODEL, 3, ms=2000) == "paused"
    assert gate.ask("r1", MODEL) == "waits"
    assert gate.pause == 2000
    gate.tick(1999)
    assert "r1" not in gate.granted
    gate.tick(1)
    assert "r1" in gate.granted


def test_a_limit_that_is_cleared_pauses_nobody(gate: Admissions) -> None:
    gate.ask("r0", MODEL)
    assert gate.refuse(MODEL, 3, ms=3_600_000) == "paused"
    assert gate.ask("r1", MODEL) == "waits"
    gate.tick(60_000)
    gate.limit(MODEL, in_flight=5)  # it is the provider's wish: who sets a limit ends no pause
    gate.tick(1000)
    assert "r1" not in gate.granted
    gate.client.delete(NO_PREFIX.of(keys.LIMIT_SETTINGS))
    gate.tick(1000)
    assert "r1" in gate.granted


def test_one_caller_has_the_turn_until_it_stays_away(gate: Admissions) -> None:
    gate.limit(MODEL, requests_per_minute=600)
    assert gate.tick(caller="one")
    assert not gate.tick(caller="two")
    assert gate.tick(3000, caller="two")
    assert not gate.tick(caller="one")
    for at in range(10):
        assert gate.ask(f"r{at}", MODEL) == "granted"
    gate.ask("late", MODEL)  # by w1: it can be admitted before the other comes back
    assert gate.tick(caller="w1")
    assert not gate.tick(caller="two")


def test_a_limit_that_is_taken_away_holds_nobody(gate: Admissions) -> None:
    gate.limit(MODEL, in_flight=1)
    for at in range(100):
        gate.ask(f"r{at}", MODEL)
    gate.client.delete(NO_PREFIX.of(keys.LIMIT_SETTINGS))
    gate.tick()
    assert len(gate.granted) == 65  # sixty-four at a time
    gate.tick()
    assert len(gate.granted) == 100


def test_more_blocked_flows_than_a_call_looks_at_hide_nobody(gate: Admissions) -> None:
    gate.limit(MODEL, in_flight=1000)
    gate.limit("batch:*", in_flight=1)
    for at in range(300):
        assert gate.ask(f"held{at}", MODEL, f"batch:{at}", step=1) == "granted"
        gate.ask(f"begun{at}", MODEL, f"batch:{at}", step=1)
    gate.ask("r0", MODEL, "batch:new", fresh=True)
    for _ in range(10):
        gate.now += 20
        gate.tick()
    assert "r0" in gate.granted
    gate.settle("held250", 1)
    for _ in range(200):
        gate.now += 20
        gate.tick()
    assert "begun250" in gate.granted


def test_a_change_of_the_limits_reaches_every_line_without_a_tick(gate: Admissions) -> None:
    models = [f"openai:m{at}" for at in range(100)]
    for model in models:
        gate.limit(model, in_flight=1)
    for model in models:
        gate.call(*(request(f"{model}-{at}", model) for at in range(6)))
    assert gate.waiting == 500
    gate.client.delete(NO_PREFIX.of(keys.LIMIT_SETTINGS))
    gate.client.hset(NO_PREFIX.of(keys.LIMIT_SETTINGS), "version", 2)
    gate.call()
    for _ in range(50):
        if gate.pause == 0:
            gate.call()
    assert gate.waiting == 0


def commands(gate: Admissions, tenants: int, *line: str) -> int:
    """Return the commands of 20 calls, each ends a step, while steps of so many tenants wait."""
    gate.client.flushdb()
    gate.limit("tenant:*", in_flight=1)
    if line:
        gate.limit(*line, in_flight=10_000)

    def ask(kind: str, tenant: int, step: int = 0) -> dict[str, Any]:
        return request(f"{kind}{tenant}", *line, f"tenant:{tenant}", tenant=f"{tenant}", step=step)

    for kind in ("under way", "waits"):
        for first in range(0, tenants, 50):
            gate.call(*(ask(kind, tenant) for tenant in range(first, first + 50)))
    while gate.pause == 0:
        gate.call()
    gate.client.config_resetstat()
    for tenant in range(20):
        gate.call({"op": "settle", "run": f"under way{tenant}", "step": 0}, ask("next", tenant))
        assert f"waits{tenant}" in gate.granted
    return sum(one["calls"] for one in gate.client.info("commandstats").values())


@pytest.mark.parametrize("line", [(), (MODEL,)])
def test_a_call_costs_the_same_however_many_names_wait(
    gate: Admissions, line: tuple[str, ...]
) -> None:
    assert commands(gate, 2000, *line) <= 1.2 * commands(gate, 50, *line)


def test_a_call_for_which_nobody_waits_takes_seven_commands(gate: Admissions) -> None:
    gate.limit(MODEL, in_flight=10)
    gate.ask("r0", MODEL)
    gate.ask("r1", MODEL, step=1)
    gate.client.config_resetstat()
    assert gate.call({"op": "settle", "run": "r0", "step": 0}, request("r0", MODEL, step=1)) == [
        "done",
        "granted",
    ]
    used = gate.client.info("commandstats")
    own = {"cmdstat_config|resetstat", "cmdstat_evalsha", "cmdstat_info"}  # and the test's clock
    assert sum(one["calls"] for name, one in used.items() if name not in own) <= 7 + 2
