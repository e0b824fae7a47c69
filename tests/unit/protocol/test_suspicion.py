"""What losses say of work, and who shares a process."""

import pytest

from stepfleet.orchestrator.protocol.claim import (
    FREE,
    LONGEST_DELAY,
    MOST_IN_GROUP,
    UNPROVEN,
    How,
    Loss,
    Losses,
    Stance,
    Suspicion,
    losses,
    next_group,
)

LIMIT = 3
TOOL, MODEL = Suspicion(Stance.SUSPECT, by_tools=True), Suspicion(Stance.SUSPECT)


def told(*known: str, count: int | None = None) -> Losses:
    """Return losses as a record tells them: `m`, `t`, `p8`, `a1`, `c`."""
    text = " ".join(["0", *(f"t{n}:{one}" for n, one in enumerate(known))])
    return losses(len(known) if count is None else count, text, 0, new=True)


@pytest.mark.parametrize(
    ("known", "stance"),
    [
        ((), Stance.CLEAR),
        (("m", "m"), Stance.CLEAR),
        (("m", "m", "m"), Stance.SUSPECT),
        (("t",), Stance.CLEAR),
        (("m", "t"), Stance.SUSPECT),
        (("t", "m"), Stance.SUSPECT),
        (("t", "t", "p1"), Stance.SUSPECT),
        (("t", "t", "p1", "p1", "p1"), Stance.SUSPECT),
        (("t", "t", "a2"), Stance.SUSPECT),
        (("t", "t", "a1"), Stance.PROVEN),
        (("m", "m", "m", "a128", "a16", "a2"), Stance.SUSPECT),
        (("m", "m", "m", "a128", "a16", "a2", "a1"), Stance.PROVEN),
        (("c", "c"), Stance.CLEAR),
        (("c", "m", "m"), Stance.SUSPECT),
        (("c", "c", "c"), Stance.PROVEN),
        (("a1",), Stance.SUSPECT),
    ],
)
def test_only_what_died_alone_beside_a_living_worker_is_proven(
    known: tuple[str, ...], stance: Stance
) -> None:
    """DIST-08: and tools are suspect before model calls are."""
    assert told(*known).suspicion(LIMIT).stance is stance


@pytest.mark.parametrize(
    ("known", "most"),
    [("a128", 16), ("a16", 2), ("a9", 2), ("a8", 1), ("a2", 1), ("p128", 64), ("p3", 2), ("p1", 1)],
)
def test_a_group_is_divided_after_its_death(known: str, most: int) -> None:
    """By eight where the death was seen, by two where it proves nothing."""
    assert told("m", "m", "m", known).suspicion(LIMIT).most == most


def test_a_limit_of_one_gives_up_with_the_first_loss() -> None:
    assert told("m").suspicion(1).stance is Stance.PROVEN


def test_a_limit_of_two_asks_for_a_proof_as_well() -> None:
    assert told("t").suspicion(2).stance is Stance.SUSPECT
    assert told("t", "p1").suspicion(2).stance is Stance.SUSPECT
    assert told("t", "a1").suspicion(2).stance is Stance.PROVEN


def test_losses_that_an_older_worker_has_counted_prove_nothing() -> None:
    """Its scripts count, and note no more."""
    found = losses(LIMIT, "", 0)
    assert found.suspicion(LIMIT).stance is Stance.SUSPECT


def test_what_was_lost_at_an_earlier_step_or_before_a_retry_is_void() -> None:
    assert losses(3, "4 a:a1 b:a1 c:a1", 5).known == ()
    assert losses(1, "5 a:a1 b:m", 5).known == (Loss("b", How.MODEL),)
    assert losses(0, "5 a:a1", 5).known == ()


def test_what_cannot_be_read_of_a_newer_version_is_left_out() -> None:
    assert losses(3, "0 a:z9 b:t c", 0).known == (Loss("b", How.TOOLS),)


def test_what_goes_on_without_a_proof_is_tried_at_growing_intervals_and_ends() -> None:
    delays = [told(*["m"] * count).delay(LIMIT, 5.0) for count in range(1, LIMIT + UNPROVEN + 1)]
    first = LIMIT + FREE
    assert delays[: first - 1] == [0.0] * (first - 1)
    assert delays[first - 1 : first + 3] == [5.0, 10.0, 20.0, 40.0]
    assert max(delays) == LONGEST_DELAY
    assert sum(delays) > 45 * 60, "who is innocent outlasts a bad hour"
    assert told(*["m"] * (LIMIT + UNPROVEN)).suspicion(LIMIT).stance is Stance.PROVEN


def test_deaths_that_were_seen_delay_nobody() -> None:
    assert told("m", "m", "m", *["a64"] * 9).delay(LIMIT, 5.0) == 0.0


def test_a_claim_that_counted_no_loss_is_not_put_off_again() -> None:
    assert losses(LIMIT + FREE + 2, "", 0, new=False).delay(LIMIT, 5.0) == 0.0


def test_suspects_of_tools_are_spread_over_the_places() -> None:
    assert next_group([TOOL], 4) == [0]
    assert next_group([TOOL] * 4, 4) == [0]
    assert next_group([TOOL] * 20, 4) == [0, 1, 2, 3, 4]


def test_suspects_of_model_calls_go_together() -> None:
    assert next_group([MODEL, TOOL, MODEL], 4) == [0, 2]
    assert len(next_group([MODEL] * 1000, 4)) == MOST_IN_GROUP


def test_nobody_is_in_a_larger_group_than_it_may_be() -> None:
    small, alone = Suspicion(Stance.SUSPECT, 2), Suspicion(Stance.SUSPECT, 1)
    assert next_group([small, MODEL, MODEL], 4) == [0, 1]
    assert next_group([MODEL, alone, MODEL, small], 4) == [0, 2]
    assert next_group([MODEL, small, MODEL], 4) == [0, 1]
    assert next_group([alone, MODEL], 4) == [0]
