import pytest

from stepfleet.orchestrator import Agent, ConfigurationError, Message, Role
from stepfleet.orchestrator.agents.strategies.strategy import prompt_of, rendered, with_prompt

HISTORY = [{"thought": "a", "action": {"tool": "x"}, "observation": None}, "plain", 3]


def test_both_names_are_filled_in_and_nothing_else() -> None:
    """STRAT-08"""
    template = "{prompt}|{{ history }}|{other}|{prompt.__class__}|{{{{"
    said = rendered(template, "why {history}?", HISTORY)
    assert said == (
        'why {history}?|thought: a\naction: {"tool": "x"}\n\nplain\n\n3'
        "|{other}|{prompt.__class__}|{{{{"
    )


def test_the_newest_prompt_of_a_user_is_worded_and_added_messages_never_are() -> None:
    """STRAT-08"""
    nudge = Message(role=Role.USER, content="go on", metadata={"added_by": "strategy"})
    talk = (Message.user("old"), Message.assistant("x"), Message.user("new"), nudge)
    worded = with_prompt(talk, "<{prompt}>", [])
    assert [one.text for one in worded] == ["old", "x", "<new>", "go on"]
    assert prompt_of(talk) == "new"
    assert with_prompt((nudge,), "<{prompt}>", []) == (nudge,)
    assert prompt_of((nudge,)) == ""


def test_media_of_the_prompt_stay() -> None:
    image = {"image": {"source": {"url": "http://x"}}}
    talk = (Message.user([{"text": "what is this"}, image]),)
    assert with_prompt(talk, "<{prompt}>", [])[0].content == [{"text": "<what is this>"}, image]


def test_a_template_without_a_place_for_the_prompt_is_refused() -> None:
    """STRAT-08, CONF-04"""
    with pytest.raises(ConfigurationError, match=r"field 'user_template'.*put \{prompt\} into it"):
        Agent("a", model="openai:m", user_template="{history}")
