"""What a worker learns of the limits of models, and when it is worth a word to the fleet."""

import asyncio

from stepfleet.orchestrator.models.rate_headers import Standing
from stepfleet.worker.runtime.admission.learning import HOLD, MOST_MODELS, Learning

MODEL = "openai:m"


class Clock:
    """Monotonic seconds that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_calls_without_a_grant_are_reported_once() -> None:
    clock = Clock()
    learning = Learning(clock)
    for _ in range(20):
        learning.turn(MODEL)
        clock.now += 0.7
    found = learning.refused(MODEL, is_limited=False)
    assert found["sent"] == 20
    assert abs(found["secs"] - 14) < 1
    assert learning.refused(MODEL, is_limited=True) == {}


def test_calls_are_held_back_for_a_moment_where_no_limit_was_known() -> None:
    clock = Clock()
    learning = Learning(clock)
    learning.refused("openai:known", is_limited=True)
    learning.refused(MODEL, is_limited=False)
    assert learning.holds(MODEL)
    assert not learning.holds("openai:known")
    clock.now += HOLD
    assert not learning.holds(MODEL)


def test_headers_are_sent_when_they_change_something() -> None:
    clock = Clock()
    learning = Learning(clock)
    ample = {"r": Standing(600, 500, 0.1)}
    assert learning.stated(MODEL, ample, 0.1, is_limited=False) is None, "it needs no limit"
    first = learning.stated(MODEL, ample, 0.1, is_limited=True)
    assert first is not None
    assert first["said"] == {"r": 600}
    assert learning.stated(MODEL, ample, 0.1, is_limited=True) is None
    low = {"r": Standing(600, 3, 1.0)}
    clock.now += 2
    assert learning.stated(MODEL, low, 5.0, is_limited=True) is None, "the rest is out of date"
    second = learning.stated(MODEL, low, 0.1, is_limited=True)
    assert second is not None
    assert second["left"] == {"r": 3}
    assert learning.stated(MODEL, low, 0.1, is_limited=True) is None, "once a second"
    halved = learning.stated(MODEL, {"r": Standing(300, 300)}, 5.0, is_limited=True)
    assert halved is not None
    assert halved["said"] == {"r": 300}


async def test_a_model_without_a_limit_gets_one_where_little_is_left() -> None:
    learning = Learning(Clock())
    scarce = {"r": Standing(600, 2, 1.0)}
    made = learning.stated(MODEL, scarce, 0.1, is_limited=False)
    assert made is not None
    assert made["make"]
    for _ in range(5):
        learning.turn("openai:wrong")
    wrong = {"r": Standing(1, 0, 60.0)}
    assert learning.stated("openai:wrong", wrong, 0.1, is_limited=False) is None, (
        "five calls were answered in this window"
    )


async def test_names_of_models_take_no_memory_for_ever() -> None:
    learning = Learning(Clock())
    for number in range(3 * MOST_MODELS):
        name = f"openai:{number}"
        learning.turn(name)
        learning.stated(name, {"t": Standing(5)}, 0.1, is_limited=True)
        learning.refused(name, is_limited=False)
    sizes = [len(one) for one in vars(learning).values() if isinstance(one, dict)]
    assert 0 < max(sizes) <= MOST_MODELS


async def test_a_thousand_first_calls_do_not_go_out_together() -> None:
    clock = Clock()
    learning = Learning(clock)
    turns = [learning.turn(MODEL) for _ in range(1000)]
    assert turns.count(None) == 32
    clock.now += 0.1
    assert turns[32] is not None
    await asyncio.wait_for(turns[32], 60)
    assert 40 <= sum(turn is None or turn.done() for turn in turns) <= 60
    learning.answered(MODEL)
    learning.refused(MODEL, is_limited=False)
    assert all(turn is None or turn.done() for turn in turns), "they see that it is held back"


async def test_calls_of_a_model_that_answers_are_not_paced_any_more() -> None:
    clock = Clock()
    learning = Learning(clock)
    learning.turn(MODEL)
    clock.now += 3.1
    assert all(learning.turn(MODEL) is None for _ in range(1000))


async def test_workers_share_one_ramp() -> None:
    """Each sends its part, so that many send no more than one."""
    clock = Clock()
    first = {}
    for workers in (1, 4, 100):
        learning = Learning(clock)
        learning.workers = workers
        first[workers] = sum(learning.turn(MODEL) is None for _ in range(1000))
    assert first == {1: 32, 4: 8, 100: 1}
