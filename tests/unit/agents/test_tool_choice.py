"""One rule for `tool_choice`: agents, overrides, batch lines and forks accept and refuse alike."""

from collections.abc import Callable
from typing import Any

import pytest

from stepfleet.orchestrator import (
    Agent,
    AgentConfig,
    AgentState,
    ConfigurationError,
    ReturnAnswer,
    SpecialTool,
    ToolCall,
    mcp_server,
    tool,
)
from stepfleet.orchestrator.agents.answers import ErrorSink, Outcome
from stepfleet.orchestrator.agents.config import stored_overrides
from stepfleet.orchestrator.batches.check import Plan, check
from stepfleet.orchestrator.batches.files.source import open_input
from stepfleet.orchestrator.client.copies import with_tools
from stepfleet.orchestrator.store.runs.submission import Submission


def take(call: ToolCall, state: AgentState, sink: ErrorSink) -> Outcome:
    """End the run."""
    return ReturnAnswer("escalated")


ESCALATE = SpecialTool(name="escalate", description="Hand the case over.", handler=take)


@tool
def look(what: str) -> str:
    """Look."""
    return what


def agent(**given: Any) -> Agent:
    return Agent("a", model="openai:m", **{"tools": [look], **given})


def submit_line(config: AgentConfig, overrides: dict[str, Any]) -> None:
    def unknown(name: str) -> AgentConfig:
        raise ConfigurationError(name)

    plan = Plan(Submission(agent="a", agents={"a": config}), unknown)
    with open_input([{"input": "x", "overrides": overrides}]) as source:
        check(source, plan)


def refusal_of(way: Callable[[], object]) -> str | None:
    try:
        way()
    except ConfigurationError as error:
        return str(error)
    return None


def every_way(choice: str, **given: Any) -> list[Any]:
    """Return the four ways to choose a tool: at the agent, per run, per line, and in a fork."""
    wanted = {"tool_choice": choice}
    config = agent(**given).config
    return [
        lambda: agent(**given, **wanted),
        lambda: stored_overrides(config, wanted),
        lambda: submit_line(config, wanted),
        lambda: with_tools(config.model_copy(update=wanted), config, ["look"]).check_tool_choice(),
    ]


@pytest.mark.parametrize(
    ("choice", "given"),
    [
        ("escalate", {"special_tools": [ESCALATE]}),
        ("escalate", {"special_tools": [ESCALATE], "tools": []}),
        ("look", {"special_tools": [ESCALATE]}),
        ("look", {}),
        ("any", {"strategy": "react", "strategy_options": {"mode": "text"}}),
        ("look", {"strategy": "noop"}),
        ("auto", {"strategy": "react"}),
        ("none", {}),
        ("anything", {"tools": [look, mcp_server("clock", url="http://x/mcp")]}),
        ("none", {"output_type": {"type": "object"}, "answer_mode": "native"}),
    ],
)
def test_a_choice_that_an_agent_may_have_is_accepted_in_every_way(
    choice: str, given: dict[str, Any]
) -> None:
    ways = every_way(choice, **given)
    if given.get("tools") == []:
        ways.pop()  # the fork names `look`
    assert [refusal_of(way) for way in ways] == [None] * len(ways)


@pytest.mark.parametrize(
    ("choice", "given", "message"),
    [
        ("escalate", {}, r"'escalate' is neither auto, any, none nor one of its tools \(look\)"),
        ("jump", {"special_tools": [ESCALATE]}, r"one of its tools \(look, escalate\)"),
        ("none", {"special_tools": [ESCALATE]}, "'none' keeps the model from giving its answer"),
        ("none", {"require_final_answer": True}, "'none' keeps the model from giving its answer"),
    ],
)
def test_a_choice_that_an_agent_cannot_have_is_refused_in_every_way(
    choice: str, given: dict[str, Any], message: str
) -> None:
    for way in every_way(choice, **given):
        with pytest.raises(ConfigurationError, match=f"field 'tool_choice': .*{message}"):
            way()


@pytest.mark.parametrize("strategy", ["react", "cot"])
@pytest.mark.parametrize("choice", ["any", "look", "none"])
def test_the_json_mode_of_a_strategy_leaves_no_choice(strategy: str, choice: str) -> None:
    """A fork has the choice that was refused before."""
    for way in every_way(choice, strategy=strategy)[:3]:
        with pytest.raises(ConfigurationError, match=f"'{choice}' needs native tool calls"):
            way()


def test_a_fork_without_the_chosen_tool_is_refused() -> None:
    config = agent(tool_choice="look").config
    with pytest.raises(ConfigurationError, match="'look' is neither"):
        with_tools(config, config, []).check_tool_choice()
