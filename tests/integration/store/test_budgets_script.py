"""Budgets in the admission script on a real Redis: spent + reserved never exceeds them."""

from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis
from support.runs.admissions import LEASE, Admissions, request

from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.keys import NO_PREFIX

MODEL, ACME = "openai:m", "tenant:acme"
USD = 10**9
DAY = 86_400_000


@pytest.fixture
def gate(redis_url: str) -> Iterator[Admissions]:
    """The script on the test's Redis."""
    with Redis.from_url(redis_url, decode_responses=True) as client:
        yield Admissions(client)


def based(gate: Admissions, name: str = ACME, **spent: int) -> None:
    """Bring what the ledger has of a name."""
    today = gate.now // DAY
    gate.call({"op": "base", "names": [name], "all": spent, "day": spent, "today": today})


def test_what_is_reserved_and_spent_fits_the_budget(gate: Admissions) -> None:
    gate.limit(ACME, usd=1, on_budget="hold")
    based(gate)
    words = [gate.ask(f"r{at}", ACME, u=3 * USD // 10) for at in range(4)]
    assert words == ["granted"] * 3 + ["waits"]
    assert gate.numbers(keys.LIMIT_RESERVED, ACME)[0] == 9 * USD // 10
    gate.refund("r0")
    assert "r3" in gate.granted, "what was not sent is given back at once"
    gate.spend("r1", u=123_456_789)  # less than it had reserved
    gate.spend("r2", u=3 * USD // 10)
    assert gate.numbers(keys.LIMIT_SPENT, ACME)[0] == 423_456_789
    assert gate.ask("r4", ACME, u=3 * USD // 10) == "waits"
    assert gate.pause == -1, "nothing is polled"
    gate.limit(ACME, usd=2, on_budget="hold")
    gate.tick()
    assert "r4" in gate.granted, "a raised budget lets it go on"


@pytest.mark.parametrize(
    ("costs", "budget", "at_once", "later"),
    [
        (USD // 10, USD, 10, 1),  # as much as they may take at most
        (USD // 50, USD, 10, 34),  # less: once eight have ended, the others reserve that
        (USD // 50, USD // 11, 1, 1),  # the budget pays for no call at most: one by one
    ],
)
def test_the_first_calls_of_an_agent_do_not_overdraw_a_budget_together(
    gate: Admissions, costs: int, budget: int, at_once: int, later: int
) -> None:
    """A hundred at once, of which nothing is known but what each may take at most."""
    gate.limit(ACME, usd=budget / USD, on_budget="hold")
    based(gate)
    wave: dict[str, Any] = {
        "agent": "new",
        "u": USD // 100,
        "k": 300,
        "n": 1,
        "m": {"u": USD // 10, "k": 5000},
    }
    words = [gate.ask(f"r{at}", ACME, **wave) for at in range(100)]
    assert words.count("granted") == len(gate.granted) == at_once
    under_way, spent = [0], 0
    overdraft = costs if at_once == 1 else 0
    while gate.granted:
        gate.spend(next(iter(gate.granted)), u=costs, n=1)
        under_way.append(len(gate.granted))
        spent = gate.numbers(keys.LIMIT_SPENT, ACME)[0]
        assert spent < budget + overdraft + 1, "none but the last one that goes alone"
    assert spent > budget - costs
    assert max(under_way) >= later
    assert gate.numbers(keys.LIMIT_RESERVED, ACME) == (0, 0, 0, 0)


def test_a_spent_budget_ends_runs_and_one_that_others_reserve_does_not(gate: Admissions) -> None:
    gate.limit(ACME, usd=1, calls_per_day=100)
    based(gate)
    assert gate.ask("r0", ACME, u=USD // 2, n=1) == "granted"
    assert gate.ask("r1", ACME, u=6 * USD // 10, n=1) == "waits", "r0 may cost less"
    assert gate.ask("r2", ACME, u=USD // 10, n=1) == "waits"
    gate.granted.clear()
    gate.spend("r0", u=USD // 2, n=1)
    granted = dict(gate.granted)
    assert "r2" in granted
    assert gate.numbers(keys.LIMIT_RESERVED, ACME)[0] == USD // 10, "r1 has none: it is to end"
    word = gate.ask("r1", ACME, u=6 * USD // 10, n=1, op="try")
    assert word == f"over u {USD} {USD // 2} {6 * USD // 10} {ACME}"
    assert gate.waiting == 0


def test_runs_of_a_spent_budget_leave_the_line_in_portions(gate: Admissions) -> None:
    gate.limit(ACME, usd=1)
    based(gate)
    gate.ask("r0", ACME, u=USD)
    for at in range(1, 150):
        assert gate.ask(f"r{at}", ACME, u=USD // 10) == "waits"
    gate.spend("r0", u=USD)
    assert 60 <= len(gate.ended) <= 64
    gate.tick()
    gate.tick()
    assert len(gate.ended) == 149
    assert gate.waiting == 0


def test_a_held_tenant_holds_up_no_other(gate: Admissions) -> None:
    gate.limit(MODEL, in_flight=3)
    gate.limit(ACME, usd=1, on_budget="hold")
    based(gate, u=USD)
    for at in range(300):
        assert gate.ask(f"held{at}", MODEL, ACME, tenant="acme", u=1) == "waits"
    for at in range(50):
        word = gate.ask(f"r{at}", MODEL, tenant="b")
        assert word == "granted"
        gate.settle(f"r{at}")
    assert gate.waiting == 300


def test_runs_that_are_cancelled_while_they_are_held_wait_no_more(gate: Admissions) -> None:
    gate.limit(ACME, usd=1, on_budget="hold")
    based(gate, u=USD)
    for at in range(300):
        assert gate.ask(f"r{at}", ACME, u=1) == "waits"
    for at in range(299):
        gate.refund(f"r{at}")
    for _ in range(20):
        gate.tick(500)
    assert gate.waiting == 1
    assert gate.client.zscore(NO_PREFIX.of(keys.LIMIT_LINES), ACME) == 1
    gate.refund("r299")
    gate.tick(500)
    assert not gate.client.exists(NO_PREFIX.of(keys.LIMIT_LINES), NO_PREFIX.of(keys.LIMIT_WAITING))


def test_a_day_ends_at_midnight_utc(gate: Admissions) -> None:
    gate.now = 20_500 * DAY - 5_000
    gate.limit(ACME, usd_per_day=1, on_budget="hold")
    based(gate, u=USD)
    assert gate.ask("r0", ACME, u=USD // 2) == "waits"
    assert gate.pause == 5_000
    gate.tick(4_999)
    assert not gate.granted
    gate.tick(1)
    assert "r0" in gate.granted
    gate.spend("r0", u=USD // 2)
    today = f"{keys.LIMIT_SPENT}:20500"
    assert gate.numbers(today, ACME)[0] == USD // 2
    assert gate.numbers(keys.LIMIT_SPENT, ACME)[0] == USD * 3 // 2
    assert gate.client.ttl(NO_PREFIX.of(today)) > 0


def test_a_name_without_numbers_waits_for_the_ledger(gate: Admissions) -> None:
    gate.limit("tenant:*", usd=1)
    assert gate.ask("r0", ACME, u=USD // 2) == "waits"
    assert gate.missing == [ACME]
    gate.spend("other", 0, ACME, u=USD)  # in the ledger already
    based(gate, u=USD * 6 // 10)
    assert gate.ask("r0", ACME, u=USD // 2, op="try").startswith(f"over u {USD} {USD * 6 // 10}")
    based(gate, u=0)  # a second worker has read it too
    assert gate.numbers(keys.LIMIT_SPENT, ACME)[0] == USD * 6 // 10
    gate.client.delete(NO_PREFIX.of(keys.LIMIT_SPENT))
    assert gate.ask("r1", ACME, u=1) == "waits"
    assert gate.missing == [ACME]


def test_each_lost_worker_is_charged_once(gate: Admissions) -> None:
    gate.limit(ACME, usd=1)
    based(gate)

    def ask(run: str, **given: int) -> str:
        return gate.ask(run, ACME, op="try", u=USD // 10, **given)

    ask("r0")
    gate.tick(LEASE + 1000)
    gate.tick(LEASE + 1000)  # nobody has renewed it: it has waited, and is granted again
    for crashes, spent in ((1, 1), (1, 1), (3, 3)):
        gate.call({"op": "lost", "run": "r0", "step": 0, "crashes": crashes})
        assert ask("r0", crashes=crashes) == "granted"
        assert gate.numbers(keys.LIMIT_SPENT, ACME)[0] == spent * USD // 10
        assert gate.numbers(keys.LIMIT_RESERVED, ACME)[0] == USD // 10
    assert ask("r1", crashes=1, lost=1) == "granted"
    assert gate.numbers(keys.LIMIT_SPENT, ACME)[0] == 4 * USD // 10
    again = request("r1", ACME, op="try", u=USD // 10, crashes=2, lost=1)
    gate.call({"op": "lost", "run": "r1", "step": 0, "crashes": 2}, again)  # as a worker sends it
    assert gate.numbers(keys.LIMIT_SPENT, ACME)[0] == 5 * USD // 10


def test_sums_are_exact(gate: Admissions) -> None:
    gate.limit(ACME, usd=1_000_000)
    based(gate, u=999_999 * USD + 123_456_788)  # more digits than JSON has here
    gate.ask("r0", ACME, u=1)
    gate.spend("r0", u=1)
    assert gate.numbers(keys.LIMIT_SPENT, ACME)[0] == 999_999 * USD + 123_456_789


def test_runs_with_budgets_bring_what_they_have_spent(gate: Admissions) -> None:
    for at in range(3):
        gate.limit(f"run:{at}", calls=5, on_budget="hold")
        assert gate.ask(f"{at}", "run:*", f"run:{at}", n=1, own={"n": 5}) == "waits"
    assert gate.client.zcard(NO_PREFIX.of(keys.LIMIT_LINES)) == 1
    gate.limit("run:1", calls=6, on_budget="hold")
    gate.tick()
    assert set(gate.granted) == {"1"}
    gate.spend("1", n=1)
    assert gate.client.exists(NO_PREFIX.of(keys.LIMIT_SPENT)) == 0


def test_calls_under_way_when_a_budget_is_set_take_nothing_from_those_after(
    gate: Admissions,
) -> None:
    gate.limit(ACME, in_flight=100)
    for at in range(10):
        gate.ask(f"old{at}", ACME, u=USD // 10)
    gate.limit(ACME, in_flight=100, usd=1, on_budget="hold")
    based(gate)
    for at in range(9):
        assert gate.ask(f"r{at}", ACME, u=USD // 10) == "granted"
    for at in range(5):
        gate.spend(f"old{at}", u=1)
    assert gate.numbers(keys.LIMIT_RESERVED, ACME)[0] == 9 * USD // 10
    assert gate.ask("r9", ACME, u=USD // 10) == "waits"
    for _ in range(
        2 * LEASE // 1000
    ):  # the others are found in rounds, and hold what they may spend
        for run in list(gate.granted):
            gate.call({"op": "renew", "run": run, "step": 0})
        gate.tick(1000)
    assert gate.numbers(keys.LIMIT_RESERVED, ACME)[0] == 14 * USD // 10
    for at in range(5, 10):
        gate.spend(f"old{at}", u=1)
    assert gate.numbers(keys.LIMIT_RESERVED, ACME)[0] == 9 * USD // 10


def test_what_nobody_holds_is_not_reserved(gate: Admissions) -> None:
    gate.limit(ACME, usd=1)
    based(gate)
    gate.ask("r0", ACME, u=USD)
    gate.client.delete(NO_PREFIX.of(keys.LIMIT_GRANTS))
    gate.tick(1000)
    assert gate.numbers(keys.LIMIT_RESERVED, ACME)[0] == 0
    assert gate.ask("r1", ACME, u=USD) == "granted"


@pytest.mark.parametrize("lost", [keys.LIMIT_STATE, keys.LIMIT_GRANTS, keys.LIMIT_RESERVED])
def test_what_is_reserved_is_counted_anew_in_a_busy_fleet(gate: Admissions, lost: str) -> None:
    gate.limit(ACME, usd=1, on_budget="hold")
    based(gate)
    gate.ask("other", MODEL)  # there is always some grant
    words = [gate.ask(f"r{at}", ACME, u=3 * USD // 10) for at in range(5)]
    assert words == ["granted"] * 3 + ["waits"] * 2
    before = set(gate.granted) - {"other"}
    if lost == keys.LIMIT_GRANTS:
        gate.client.hdel(NO_PREFIX.of(lost), "r0", "r1")
        before -= {"r0", "r1"}
    else:
        gate.client.delete(NO_PREFIX.of(lost))
    reserved = 0
    for _ in range(4 * LEASE // 1000):
        for run in {*before, *gate.granted}:
            gate.call({"op": "renew", "run": run, "step": 0})
        gate.tick(1000)
        reserved = gate.numbers(keys.LIMIT_RESERVED, ACME)[0]
        assert lost != keys.LIMIT_STATE or reserved == 9 * USD // 10, "no reservation is lost"
    held = set(gate.client.hkeys(NO_PREFIX.of(keys.LIMIT_GRANTS))) - {"other"}
    assert reserved == len(held) * 3 * USD // 10
    assert len(held) == (5 if lost == keys.LIMIT_RESERVED else 3), (
        "lost grants make room for others"
    )


def test_an_operation_whose_reply_is_lost_adds_up_once(gate: Admissions) -> None:
    """A charge, and a lost worker's call that a request brings; with the repetition of each."""
    gate.limit(ACME, calls=10)
    gate.limit(MODEL, requests_per_minute=60, burst=10)
    based(gate)
    charge = {"op": "charge", "names": [ACME], "amounts": {"r": 1}, "spent": {"n": 2}, "id": "a"}
    asked = request("r0", ACME, op="try", n=20, crashes=1, lost=1) | {"id": "b"}
    for operation in (charge, asked):
        gate.call(operation)
        gate.call(operation | {"repeated": 1})
    assert gate.numbers(keys.LIMIT_SPENT, ACME)[2] == 22
    gate.call(charge | {"id": "c"})
    assert gate.numbers(keys.LIMIT_SPENT, ACME)[2] == 24, "another one counts"


def test_a_settlement_ends_its_own_grant_alone(gate: Admissions) -> None:
    """A step is refused for now, and asks again; then the repetition of its settlement arrives."""
    gate.limit(ACME, calls=10)
    based(gate)
    settled = {"op": "settle", "run": "r0", "step": 0, "amounts": {"r": 1}, "key": "k1"}
    settled |= {"spent": {"n": 1}, "names": [ACME]}
    gate.call(request("r0", ACME, op="try", n=1) | {"key": "k1"})
    gate.call(settled)
    assert gate.call(request("r0", ACME, op="try", n=1) | {"key": "k2"}) == ["granted"]
    assert gate.call(settled | {"repeated": 1}) == ["none"]
    assert gate.numbers(keys.LIMIT_SPENT, ACME)[2] == 1
    assert gate.numbers(keys.LIMIT_RESERVED, ACME)[2] == 1
    assert gate.call(settled | {"key": "k2"}) == ["done"]
    assert gate.numbers(keys.LIMIT_SPENT, ACME)[2] == 2


def test_a_grant_that_a_duplicate_has_ended_is_settled_once(gate: Admissions) -> None:
    """A stale hint finds the grant of a committed step just before its worker settles it."""
    gate.limit(ACME, usd=1)
    based(gate)
    gate.call(request("r0", ACME, op="try", u=500, n=1) | {"key": "k1"})
    by_duplicate = {"op": "settle", "run": "r0", "step": 0, "key": "k1", "other": 1}
    assert gate.call(by_duplicate) == ["done"]
    assert gate.numbers(keys.LIMIT_SPENT, ACME)[0] == 500, "its worker may be lost"
    owner = by_duplicate | {"other": None, "amounts": {"r": 1}, "names": [ACME]}
    owner = {name: value for name, value in owner.items() if value is not None}
    assert gate.call(owner | {"spent": {"u": 320, "n": 1}}) == ["none"]
    assert gate.numbers(keys.LIMIT_SPENT, ACME)[:3] == (320, 0, 1)


def test_a_call_of_another_model_has_a_grant_of_its_own(gate: Admissions) -> None:
    """It ends that of the first model in the same moment; shared limits keep their place."""
    gate.limit(MODEL, in_flight=1)
    gate.limit("other:m", in_flight=1, calls=1)
    gate.limit(ACME, in_flight=1, calls=9)
    based(gate)
    assert gate.ask("r0", MODEL, ACME, op="try", n=1) == "granted"
    assert gate.ask("r1", MODEL, ACME, n=1) == "waits"
    ended = {"op": "settle", "run": "r0", "step": 0, "spent": {"n": 1}, "names": [MODEL, ACME]}
    turned = request("r0", "other:m", ACME, op="try", n=1) | {"of": "other:m", "ended": ended}
    for repeated in ({}, {"repeated": 1}):
        assert gate.call(turned | repeated) == ["granted"]
    assert [gate.in_flight(name) for name in (MODEL, "other:m", ACME)] == [0, 1, 1]
    assert gate.numbers(keys.LIMIT_SPENT, ACME)[2] == 1
    assert gate.spend("r0", n=1) == "done"
    assert [gate.numbers(keys.LIMIT_SPENT, name)[2] for name in ("other:m", ACME)] == [1, 2]
    assert "r1" in gate.granted
    again = gate.call(request("r2", "other:m", op="try", n=1) | {"of": "other:m"})
    assert again == ["over n 1 1 1 other:m"]


def test_who_asks_again_ends_the_grant_that_its_place_in_the_line_gets(gate: Admissions) -> None:
    """The ledger's sums come with the second request: the grant is for the first one's place."""
    gate.limit(MODEL, calls=9)
    gate.limit("other:m", calls=9)
    gate.limit(ACME, calls=9)
    first = request("r0", MODEL, ACME, n=1)
    assert gate.call(first | {"key": "k1"}) == ["waits"]
    base = {"op": "base", "names": [ACME], "all": {}, "day": {}, "today": gate.now // DAY}
    assert gate.call(first | {"key": "k2", "op": "try"}, base) == ["granted", "done"]
    ended = {"op": "settle", "run": "r0", "step": 0, "key": "k2", "names": [MODEL, ACME]}
    turned = request("r0", "other:m", ACME, op="try", n=1) | {"of": "other:m", "key": "k3"}
    assert gate.call(turned | {"ended": ended | {"spent": {"n": 1}}}) == ["granted"]
    settled = {"op": "settle", "run": "r0", "step": 0, "key": "k3", "names": ["other:m", ACME]}
    assert gate.call(settled | {"spent": {"n": 1}}) == ["done"]
    spent = [gate.numbers(keys.LIMIT_SPENT, name)[2] for name in (MODEL, "other:m", ACME)]
    assert spent == [1, 1, 2]


def test_calls_without_a_tenant_have_no_budget(gate: Admissions) -> None:
    gate.limit("tenant:*", calls=5)
    gate.limit(MODEL, in_flight=1)
    assert gate.ask("r0", MODEL, n=1) == "granted"
    assert gate.ask("r1", MODEL, n=1) == "waits"
    gate.spend("r0", n=1)
    assert "r1" in gate.granted
    assert not gate.missing
    assert not gate.client.hexists(NO_PREFIX.of(keys.LIMIT_SPENT), "tenant:")
