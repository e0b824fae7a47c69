import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from support.runs.conversations import check_pairs, conversations

from stepfleet.orchestrator import AgentConfig, ConfigurationError, MemoryPolicy, Message
from stepfleet.orchestrator.memory.pruning import limited, paired

limits = st.none() | st.integers(1, 12)
policies = st.builds(
    MemoryPolicy,
    max_messages=limits,
    max_tokens=st.none() | st.integers(1, 400),
    keep_system=st.booleans(),
)


def test_a_policy_has_no_limits_unless_they_are_given() -> None:
    """MEM-03"""
    policy = MemoryPolicy()
    assert (policy.max_messages, policy.max_tokens, policy.summarize_after) == (None, None, None)
    assert policy.keep_system
    assert not policy.active
    assert MemoryPolicy(max_tokens=5).active


def test_a_policy_whose_limit_hides_its_summaries_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"summarize_after \(10\) must be below"):
        MemoryPolicy(summarize_after=10, max_messages=10)


def test_a_policy_is_part_of_the_stored_configuration_and_the_default_leaves_no_trace() -> None:
    """MEM-03"""
    plain = AgentConfig(name="a", model="openai:m")
    assert "memory" not in plain.to_json()
    assert plain.digest == plain.model_copy(update={"memory": MemoryPolicy()}).digest
    limited_ = AgentConfig(name="a", model="openai:m", memory=MemoryPolicy(max_messages=5))
    assert AgentConfig.from_json(limited_.to_json()) == limited_


def test_code_cannot_be_chosen_per_run() -> None:
    """MEM-17"""
    plain = AgentConfig(name="a", model="openai:m")
    assert plain.with_overrides({"memory": {"max_messages": 5}}).memory.max_messages == 5
    with pytest.raises(ConfigurationError, match=r"memory\.custom"):
        plain.with_overrides({"memory": {"custom": "os:getcwd"}})


@given(conversations(), policies)
def test_calls_stay_with_their_results_under_every_policy(
    messages: tuple[Message, ...], policy: MemoryPolicy
) -> None:
    """MEM-08"""
    check_pairs(limited(messages, policy))


@given(conversations(), policies)
def test_what_is_kept_is_the_end_of_the_conversation(
    messages: tuple[Message, ...], policy: MemoryPolicy
) -> None:
    """MEM-05, MEM-06: it holds the newest message, and the instructions where they stay."""
    kept = limited(messages, policy)
    assert kept[-1] == messages[-1]
    if policy.keep_system:
        system = [one for one in messages if one.is_system()]
        assert [one for one in kept if one.is_system()] == system


def test_the_message_limit_comes_first() -> None:
    """MEM-09: the tokens are those of the messages that the first rule has left."""
    counted: list[str] = []

    def count(message: Message) -> int:
        counted.append(message.text)
        return 10

    messages = [Message.user(f"{number}") for number in range(6)]
    policy = MemoryPolicy(max_messages=3, max_tokens=20)
    assert [one.text for one in limited(messages, policy, count)] == ["4", "5"]
    assert counted == ["3", "4", "5"]


@given(conversations(), st.data())
def test_what_a_policy_tears_apart_is_mended(
    messages: tuple[Message, ...], data: st.DataObject
) -> None:
    """MEM-08: any choice of messages becomes one that a provider accepts."""
    chosen = [one for one in messages if data.draw(st.booleans())]
    mended = paired(chosen)
    check_pairs(mended)
    assert {one.text for one in chosen if one.is_user()} <= {one.text for one in mended}
