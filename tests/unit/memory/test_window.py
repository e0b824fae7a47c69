from hypothesis import given
from hypothesis import strategies as st
from support.runs.conversations import check_pairs, exchanges, texts

from stepfleet.orchestrator import MemoryPolicy, Message
from stepfleet.orchestrator.memory.pruning import estimate_tokens
from stepfleet.orchestrator.memory.window import History, Part, advance, shown
from stepfleet.orchestrator.records.memory_window import Summary, Window

SYSTEM = (Message.system("rules"),)
policies = st.builds(
    MemoryPolicy,
    max_messages=st.none() | st.integers(1, 12),
    max_tokens=st.none() | st.integers(1, 400),
    keep_system=st.booleans(),
)


@st.composite
def logs(draw: st.DrawFn) -> list[Part]:
    """Return the parts of a run: the first has a question, others may have one or be empty."""
    parts = [Part((Message.user(draw(texts)),), draw(exchanges(0)))]
    for turn in range(1, draw(st.integers(1, 14))):
        question = (Message.user(draw(texts)),) if draw(st.booleans()) else ()
        failed = draw(st.integers(0, 5)) == 0
        parts.append(Part(question, () if failed else draw(exchanges(turn))))
    return parts


def at_step(parts: list[Part], step: int, first: int = 0, task: int | None = None) -> History:
    """Return what a claim of `step` reads: the log from `first` on, and the task before it."""
    seen = [*parts[first:step], Part(parts[step].given)]
    earlier = {0: parts[0].given} | ({task: parts[task].given} if task is not None else {})
    return History(tuple(seen), SYSTEM, first, earlier if first else {})


@given(logs(), policies)
def test_a_claim_that_reads_the_end_comes_to_the_same_request_as_one_that_reads_all(
    parts: list[Part], policy: MemoryPolicy
) -> None:
    """MEM-08, MEM-16: and every request keeps calls and results together."""
    window = Window()
    for step in range(len(parts)):
        whole = at_step(parts, step)
        end = at_step(parts, step, window.since, window.task)
        after = advance(window, whole, policy)
        assert advance(window, end, policy) == after
        request = shown(after, whole, policy)
        assert shown(after, end, policy) == request
        check_pairs(request)
        assert after.since >= window.since
        newest = whole.parts[-1].given or parts[step - 1].added
        assert not newest or request[-1] == newest[-1]
        told = [one for one in request if not one.is_system()]
        assert told[0].is_user()
        window = after


@given(logs(), st.integers(1, 12))
def test_a_message_limit_holds_unless_the_newest_exchange_alone_is_longer(
    parts: list[Part], most: int
) -> None:
    """MEM-04"""
    policy = MemoryPolicy(max_messages=most)
    window = Window()
    for step in range(len(parts)):
        history = at_step(parts, step)
        window = advance(window, history, policy)
        told = [one for one in shown(window, history, policy) if not one.is_system()]
        others = [part for part in history.since(window.since) if part.messages]
        assert len(told) <= most or len(others) <= 1


def test_a_window_stays_until_its_limit_is_exceeded_again() -> None:
    """Prefixes of requests change in strides, so that providers' prompt caches hit."""
    parts = [Part((Message.user("task"),), (Message.assistant("0"),))]
    parts += [Part((), (Message.assistant(f"{n}"),)) for n in range(1, 101)]
    policy, window, moved = MemoryPolicy(max_messages=40), Window(), 0
    for step in range(101):
        after = advance(window, at_step(parts, step), policy)
        moved, window = moved + (after != window), after
    assert moved == 6


def test_a_token_limit_counts_instructions_summary_and_task() -> None:
    """MEM-05, MEM-06"""
    parts = [Part((Message.user("t" * 400),), (Message.assistant("x" * 400),)) for _ in range(9)]
    history = History((*parts, Part()), SYSTEM, summary=Summary(text="s" * 400))
    policy = MemoryPolicy(max_tokens=900)
    request = shown(advance(Window(), history, policy), history, policy)
    assert request[0].text == "rules"
    assert sum(map(estimate_tokens, request)) <= 900


def test_a_learned_limit_holds_beside_a_larger_one_of_the_policy() -> None:
    """MEM-10"""
    parts = [Part((Message.user("q"),), (Message.assistant("x" * 400),)) for _ in range(9)]
    history = History((*parts, Part()), SYSTEM)
    for policy in (MemoryPolicy(), MemoryPolicy(max_tokens=10_000)):
        window = advance(Window(limit=300), history, policy)
        assert window.since == 7
        assert window.limit == 300
