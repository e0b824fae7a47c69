"""How many workers a fleet should have, decided from what there is to do. Pure."""

import math
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfleet.orchestrator.cli.scale import sentence
from stepfleet.orchestrator.limits.limit import Limit
from stepfleet.orchestrator.protocol.attempt import Wait
from stepfleet.orchestrator.protocol.waiting import StepWait, WaitReason
from stepfleet.orchestrator.store.fleet.demand import CallLook, RunLook, need_of
from stepfleet.orchestrator.store.fleet.overview import WorkerSeen
from stepfleet.orchestrator.store.fleet.scale import (
    ScaleDemand,
    ScaleSignal,
    StepGroup,
    admitted,
    room_of,
    slots_of,
    wanted,
    work_of,
)
from stepfleet.orchestrator.store.limits import BudgetUse, LimitUse

NAMES = (
    "openai:m",
    "openai:n",
    "openai:*",
    "tenant:a",
    "tenant:b",
    "batch:1",
    "starts of tenant:a",
)
NUMBERS = st.integers(0, 3000)
GROUPS = st.lists(
    st.builds(
        StepGroup,
        limits=st.lists(st.sampled_from(NAMES), unique=True, max_size=4).map(tuple),
        queued=NUMBERS,
        due_soon=NUMBERS,
    ),
    max_size=6,
).map(tuple)
DEMANDS = st.builds(
    ScaleDemand,
    in_hand=NUMBERS,
    groups=GROUPS,
    room=st.dictionaries(st.sampled_from(NAMES), st.integers(0, 500).map(float)),
)
SLOTS = st.integers(1, 1000)


@given(DEMANDS, SLOTS, st.data())
def test_more_to_do_never_wants_fewer_workers(
    demand: ScaleDemand, slots: int, data: st.DataObject
) -> None:
    """OPS-02"""
    more = demand.model_copy(
        update={
            "in_hand": demand.in_hand + data.draw(NUMBERS),
            "groups": tuple(
                one.model_copy(update={"queued": one.queued + data.draw(NUMBERS)})
                for one in demand.groups
            ),
        }
    )
    assert wanted(more, slots) >= wanted(demand, slots)


@given(DEMANDS, SLOTS)
def test_workers_are_never_more_than_limits_admit(demand: ScaleDemand, slots: int) -> None:
    """OPS-02: of each limit by itself, whatever the others leave."""
    steps = sum(one.queued + one.due_soon for one in demand.groups)
    for name, room in demand.room.items():
        under = sum(one.queued + one.due_soon for one in demand.groups if name in one.limits)
        most = demand.in_hand + steps - under + min(under, room)
        if all(_of_the_kind(one.limits, name) <= 1 for one in demand.groups):
            assert wanted(demand, slots) <= math.ceil(most / slots)


def _of_the_kind(limits: tuple[str, ...], name: str) -> int:
    """How many names of a group are of the kind of `name`: the fleet's steps have one of each."""
    kind = name.partition(":")[0] if "*" not in name else name
    return sum((one.partition(":")[0] if "*" not in one else one) == kind for one in limits)


@given(DEMANDS, SLOTS)
def test_nothing_is_wanted_where_there_is_nothing_to_do_and_only_there(
    demand: ScaleDemand, slots: int
) -> None:
    """OPS-02"""
    assert (wanted(demand, slots) == 0) == (sum(work_of(demand)) == 0)


@pytest.mark.parametrize(
    ("steps", "room", "expected"),
    [
        ([((), 1000)], {}, 1000),
        ([(("openai:m",), 1000)], {"openai:m": 50}, 50),
        ([(("openai:m",), 1000), (("openai:n",), 7)], {"openai:m": 50}, 57),
        ([(("openai:m", "tenant:a"), 90), (("openai:m", "tenant:b"), 90)], {"tenant:a": 5}, 95),
        (
            [(("openai:m", "tenant:a"), 90), (("openai:m", "tenant:b"), 90)],
            {"tenant:a": 5, "openai:m": 50},
            50,
        ),
        (
            [(("openai:m", "tenant:b"), 90), (("openai:n", "tenant:a"), 90)],
            {"tenant:a": 5, "openai:m": 5},
            10,
        ),
        ([(("openai:m", "openai:*"), 90), (("openai:n", "openai:*"), 90)], {"openai:*": 30}, 30),
    ],
)
def test_steps_are_counted_as_their_limits_admit_them(
    steps: list[tuple[tuple[str, ...], float]], room: dict[str, float], expected: float
) -> None:
    """OPS-02"""
    assert admitted(steps, room) == expected


def use(limit: Limit | None, **given_: object) -> LimitUse:
    return LimitUse(name="openai:m", limit=limit, **given_)  # type: ignore[arg-type]


BUDGET = BudgetUse(
    field="usd", budget=Decimal(1), spent=Decimal(1), reserved=Decimal(0), left=Decimal(0)
)
RATE = Limit(requests_per_minute=60)
TOKENS = Limit(tokens_per_minute=6000)


@pytest.mark.parametrize(
    ("found", "tokens", "expected"),
    [
        (use(Limit(in_flight=50), in_flight=20), {}, 30),
        (use(Limit(in_flight=50), in_flight=70), {}, 0),
        (use(RATE, levels={"requests_per_minute": 1.0}), {}, 61),
        (use(RATE, levels={"requests_per_minute": -20.5}), {}, 39),
        (use(RATE, levels={"requests_per_minute": 0.0}, cool_seconds=30.0), {}, 30),
        (use(RATE, levels={"requests_per_minute": 0.0}, cool_seconds=90.0), {}, 0),
        (
            use(None, levels={"requests_per_minute": 0.0}, learned={"requests_per_minute": 12}),
            {},
            12,
        ),
        (use(TOKENS, levels={"tokens_per_minute": 0.0}), {"tokens_per_minute": 100.0}, 60),
        (use(TOKENS, levels={"tokens_per_minute": 0.0}), {"tokens_per_minute": 0.0}, None),
        (use(Limit(usd=1, on_budget="hold"), budgets=(BUDGET,)), {}, 0),
        (use(Limit(usd=1), budgets=(BUDGET,)), {}, None),
        (
            use(Limit(usd=1), budgets=(BUDGET.model_copy(update={"reserved": Decimal("0.1")}),)),
            {},
            0,
        ),
    ],
)
def test_the_room_of_a_limit_is_what_it_admits_within_a_minute(
    found: LimitUse, tokens: dict[str, float], expected: int | None
) -> None:
    """OPS-02: a budget that stops runs admits them: a worker has to end them."""
    assert room_of(found, tokens).get("openai:m") == expected


def test_a_limit_of_starts_leaves_further_steps_alone() -> None:
    """OPS-02"""
    found = room_of(use(Limit(starts_per_minute=6), levels={"starts_per_minute": 1.0}), {})
    assert found == {"starts of openai:m": 7}


NOW = datetime(2026, 1, 1, tzinfo=UTC)
MS = NOW.timestamp() * 1000
FREE = {"token": "", "lease": None, "uncalled": None, "ahead": None, "status": "in_progress"}
HELD = {**FREE, "token": "t", "lease": str(MS + 1)}
READY = RunLook("r", 1.0, FREE)


def waiting(reason: WaitReason, seconds: float | None, **fields: object) -> RunLook:
    at = None if seconds is None else datetime.fromtimestamp(NOW.timestamp() + seconds, UTC)
    return replace(READY, wait=StepWait(reason, NOW, at, calls=(Wait(0, "q", "t"),)), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("look", "expected"),
    [
        (READY, "ready"),
        (replace(READY, is_kept=True), "paused"),
        (replace(READY, header=HELD), "held"),
        (replace(READY, header=HELD, is_kept=True), "held"),
        (replace(READY, header={**HELD, "lease": str(MS - 1)}), "ready"),
        (replace(READY, header={**HELD, "uncalled": "t"}), "ready"),
        (replace(READY, header={**HELD, "uncalled": "t"}, in_line=True), "limits"),
        (replace(READY, header={**HELD, "uncalled": "t"}, is_granted=True), "held"),
        (waiting(WaitReason.DELAY, 30), "due"),
        (waiting(WaitReason.DELAY, 600), "delays"),
        (waiting(WaitReason.DELAY, -1), "ready"),
        (waiting(WaitReason.SERVICE, 6000), "circuits"),
        (waiting(WaitReason.LIMIT, 0, in_line=True), "limits"),
        (waiting(WaitReason.LIMIT, 0), "ready"),
        (waiting(WaitReason.RUNS, None), "ready"),
        (replace(waiting(WaitReason.RUNS, None), header={**FREE, "ahead": "2"}), "runs"),
        (waiting(WaitReason.CALLS, 900, calls=(CallLook("gpu"),)), "tools"),
        (waiting(WaitReason.CALLS, 900, calls=(CallLook("@run"),)), "children"),
        (waiting(WaitReason.CALLS, 900, calls=(CallLook("@run", needs_worker=True),)), "ready"),
        (waiting(WaitReason.CALLS, 900, calls=(CallLook("@approval"), CallLook("@run"))), "people"),
        (waiting(WaitReason.OTHER, 900), "others"),
    ],
)
def test_a_run_is_work_only_where_a_worker_could_go_on(look: RunLook, expected: str) -> None:
    """OPS-02"""
    assert need_of(look, MS) == expected


def seen(name: str, **fields: object) -> WorkerSeen:
    told = {"process": "h:7", "seen_seconds_ago": 0.0, "slots": 20, **fields}
    return WorkerSeen(name=name, **told)  # type: ignore[arg-type]


def test_capacity_is_that_of_living_workers_of_the_queue_which_take_steps() -> None:
    """OPS-02: a pool of processes is one worker."""
    fleet = [
        seen("a@h", queues=("stepfleet",)),
        seen("b@h", queues=("gpu", "stepfleet"), slots=40),
        seen("c@h", queues=("gpu",)),
        seen("d@h", queues=("stepfleet",), alive=False),
        seen("e@h", queues=("stepfleet",), stopping=True),
        seen("f@h:7", queues=None, slots=1),
        seen("f@h:8", queues=None, slots=1, process="h:8"),
    ]
    assert slots_of(fleet, "stepfleet", 1000) == (62, 3, 21)
    assert slots_of(fleet, "gpu", 1000) == (62, 3, 21)
    assert slots_of([], "gpu", 1000) == (0, 0, 1000)


def test_people_read_a_sentence() -> None:
    found = ScaleSignal(
        queue="stepfleet",
        work=11_400,
        queued=11_000,
        due_soon=100,
        in_hand=300,
        slots=3000,
        workers=3,
        wanted=12,
        slots_per_worker=1000,
        waits={"limits": 950, "people": 1, "paused": 4, "others": 2},
    )
    assert sentence(found) == (
        "12 workers wanted, 3 alive: 11,100 could go on now or within a minute, 300 in hand; "
        "950 wait for limits; 1 waits for people; 4 paused; 2 wait for other things"
    )
    few = found.model_copy(update={"wanted": 1, "waits": {}, "estimated": True})
    assert sentence(few).startswith("1 worker wanted, 3 alive: ~11,100 could go on")
