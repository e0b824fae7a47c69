"""What a worker learns of prompts: tokens beside those that are counted of the messages."""

from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.worker.runtime.admission.learning import MOST_EXPECTED, Prompts


def test_what_a_prompt_takes_beside_its_messages_is_expected_of_the_next_one() -> None:
    prompts = Prompts()
    first, second = Work("r1", 0), Work("r1", 1)
    assert prompts.expect("clerk", first, 20, whole=True) == 20
    prompts.learn("clerk", first, 71)
    assert prompts.expect("clerk", second, 80, whole=False) == 80, "learned apart"
    assert prompts.expect("clerk", second, 60, whole=True) == 111, "a claim counts it once more"
    prompts.learn("clerk", second, 130)
    assert prompts.expect("clerk", Work("r2", 1), 80, whole=False) == 130
    assert prompts.expect("clerk", Work("r3", 0), 20, whole=True) == 71
    assert prompts.expect("other", Work("r4", 0), 20, whole=True) == 20


def test_what_was_not_expected_here_teaches_nothing_and_nothing_grows() -> None:
    prompts = Prompts()
    prompts.learn("clerk", Work("r1", 0), 10_000)
    for run in range(MOST_EXPECTED + 10):
        prompts.expect("clerk", Work(f"r{run}", 0), 20, whole=True)
    prompts.learn("clerk", Work("r0", 0), 10_000)  # forgotten meanwhile
    assert prompts.expect("clerk", Work("r", 0), 20, whole=True) == 20
