from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.runs.conversations import check_pairs, exchanges

from stepfleet.orchestrator import ConfigurationError, MemoryManager, MemoryPolicy, Message
from stepfleet.orchestrator.memory.conversation import SUMMARY


def texts(manager: MemoryManager) -> list[str]:
    return [one.text for one in manager.get_messages()]


def filled(manager: MemoryManager, count: int) -> MemoryManager:
    manager.add_message(Message.system("rules"))
    for number in range(1, count + 1):
        manager.add_message(Message.user(f"{number}"))
    return manager


def test_the_returned_list_is_the_callers_own() -> None:
    """MEM-01"""
    manager = filled(MemoryManager(), 2)
    manager.get_messages().clear()
    assert texts(manager) == ["rules", "1", "2"]


def test_the_policy_holds_after_every_addition() -> None:
    """MEM-02"""
    manager = MemoryManager(MemoryPolicy(max_messages=7))
    for number in range(100):
        manager.add_message(Message.user(f"{number}"))
        assert len(manager.get_messages()) == min(number + 1, 7)


def test_a_message_limit_keeps_the_newest() -> None:
    """MEM-04, MEM-06"""
    manager = filled(MemoryManager(MemoryPolicy(max_messages=5)), 20)
    assert texts(manager) == ["rules", "16", "17", "18", "19", "20"]


@pytest.mark.parametrize("policy", [MemoryPolicy(max_messages=5), MemoryPolicy(max_tokens=40)])
def test_instructions_stay_first_under_either_limit(policy: MemoryPolicy) -> None:
    """MEM-06: after 100 additions, and after clearing."""
    manager = filled(MemoryManager(policy), 100)
    assert (texts(manager)[0], texts(manager)[-1]) == ("rules", "100")
    assert len(texts(manager)) < 10
    manager.clear()
    assert texts(manager) == ["rules"]


def test_instructions_are_messages_like_others_where_they_need_not_stay() -> None:
    """MEM-06"""
    manager = filled(MemoryManager(MemoryPolicy(max_messages=2, keep_system=False)), 3)
    assert texts(manager) == ["2", "3"]
    manager.clear()
    assert texts(manager) == []


def test_a_giant_message_stays_alone() -> None:
    """MEM-05"""
    manager = filled(MemoryManager(MemoryPolicy(max_tokens=30)), 9)
    manager.add_message(Message.user("x" * 10_000))
    assert [len(text) for text in texts(manager)] == [5, 10_000]


def test_clearing_leaves_the_instructions() -> None:
    """MEM-01, MEM-06"""
    manager = filled(MemoryManager(), 3)
    manager.clear()
    assert texts(manager) == ["rules"]


def test_pruning_to_a_token_limit_keeps_the_task_and_the_end() -> None:
    """MEM-10"""
    manager = filled(MemoryManager(), 50)
    manager.prune_to_token_limit(30)
    assert texts(manager)[:2] == ["rules", "1"]
    assert texts(manager)[-1] == "50"
    assert len(texts(manager)) < 10


def test_old_messages_become_one_summary() -> None:
    """MEM-07: instructions, summary, recent messages; the next summary builds on the first."""
    asked: list[tuple[str | None, list[str]]] = []

    def summarize(earlier: str | None, messages: Sequence[Message]) -> str:
        asked.append((earlier, [one.text for one in messages]))
        return f"summary {len(asked)}"

    manager = filled(MemoryManager(MemoryPolicy(summarize_after=4), summarize=summarize), 5)
    assert texts(manager) == ["rules", f"{SUMMARY}summary 1", "4", "5"]
    for number in (6, 7, 8):
        manager.add_message(Message.user(f"{number}"))
    assert asked == [(None, ["1", "2", "3"]), ("summary 1", ["4", "5", "6"])]
    assert texts(manager) == ["rules", f"{SUMMARY}summary 2", "7", "8"]


def test_summaries_need_somebody_who_makes_them() -> None:
    """MEM-07"""
    with pytest.raises(ConfigurationError, match="summarize="):
        MemoryManager(MemoryPolicy(summarize_after=4))


@given(st.lists(exchanges(), max_size=8), st.integers(2, 6))
def test_calls_stay_with_their_results_when_a_summary_is_made(
    given_: list[tuple[Message, ...]], after: int
) -> None:
    """MEM-08"""
    policy = MemoryPolicy(summarize_after=after)
    manager = MemoryManager(policy, summarize=lambda _, messages: f"{len(messages)}")
    for exchange in given_:
        for message in exchange:
            manager.add_message(message)
        check_pairs(manager.get_messages())
