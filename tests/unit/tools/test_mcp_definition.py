"""What may be said of an MCP server where an agent is defined."""

from typing import Any

import pytest
from support.loaded_modules import loaded_by

from stepfleet.orchestrator import Agent, ConfigurationError, mcp_server, tool
from stepfleet.orchestrator.agents.config import stored_overrides

CLOCK = mcp_server("clock", command=["clock-server"], env=["CLOCK_KEY"])


@tool
def echo(text: str) -> str:
    """Say it again."""
    return text


def test_a_run_keeps_the_names_of_servers_beside_those_of_tools() -> None:
    agent = Agent("a", model="openai:m", tools=[echo, CLOCK])
    assert [one.name for one in agent.config.tools] == ["echo"]
    assert [(one.name, one.version) for one in agent.config.mcp_servers] == [("clock", "1")]
    assert "clock-server" not in agent.config.to_json()
    assert "CLOCK_KEY" not in agent.config.to_json()


def test_an_agent_without_servers_is_stored_as_before() -> None:
    agent = Agent("a", model="openai:m", tools=[echo])
    assert "mcp" not in agent.config.to_json()
    assert not agent.tools.late


def test_a_definition_needs_neither_the_server_nor_the_protocols_package() -> None:
    loaded = loaded_by(
        "from stepfleet import Agent, mcp_server\n"
        "Agent('a', model='openai:m', tools=[mcp_server('x', command=['nowhere'])])"
    )
    assert loaded.isdisjoint({"mcp", "mcp_types", "anyio"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "field 'command' or 'url': give one of them"),
        ({"command": ["x"], "url": "http://x"}, "field 'command' or 'url': give one of them"),
        ({"command": "clock --now"}, "field 'command' is text; write a list"),
        ({"command": ["x", ""]}, "field 'command' must hold texts that are not empty"),
        ({"url": "ftp://x"}, "field 'url' must begin with http:// or https://"),
        ({"url": "https://u:secret@x/mcp"}, "field 'url' holds a password"),
        ({"command": ["x"], "header_env": {"A": "B"}}, "field 'header_env' is for a url"),
        ({"url": "http://x", "env": ["A"]}, "field 'env' is for a command"),
        ({"url": "http://x", "cwd": "/"}, "field 'cwd' is for a command"),
        ({"command": ["x"], "env": ["TOKEN=abc"]}, "field 'env' must name environment variables"),
        ({"url": "http://x", "header_env": {"A": "Bearer x"}}, "field 'header_env' must name"),
        (
            {"url": "http://x", "header_env": {"A B": "C"}},
            "has 'A B', which is not the name of a header",
        ),
        ({"command": ["x"], "timeout": 0}, "field 'timeout' must be seconds"),
        ({"command": ["x"], "refresh": -1}, "field 'refresh' must be seconds"),
    ],
)
def test_a_wrong_definition_names_the_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        mcp_server("x", **fields)
    assert message in raised.value.message
    assert raised.value.message.startswith("MCP server 'x':")


def test_a_servers_name_is_one_that_may_stand_before_its_tools() -> None:
    with pytest.raises(ConfigurationError, match="field 'name' must be 1 to 32 letters"):
        mcp_server("my server", command=["x"])


def test_an_agent_has_no_two_servers_of_one_name() -> None:
    with pytest.raises(ConfigurationError, match="'clock' appears twice"):
        Agent("a", model="openai:m", tools=[CLOCK, mcp_server("clock", url="http://x/mcp")])


def test_the_model_may_be_told_to_use_a_servers_tool_by_its_name() -> None:
    agent = Agent("a", model="openai:m", tools=[CLOCK], tool_choice="tell_time")
    assert stored_overrides(agent.config, {"tool_choice": "set_time"}) == {
        "tool_choice": "set_time"
    }
    with pytest.raises(ConfigurationError, match="tool_choice"):
        Agent("b", model="openai:m", tools=[echo], tool_choice="tell_time")


def test_whoever_submits_a_run_cannot_choose_its_servers() -> None:
    agent = Agent("a", model="openai:m", tools=[CLOCK])
    with pytest.raises(ConfigurationError, match="'mcp_servers' cannot be overridden per run"):
        agent.config.with_overrides({"mcp_servers": []})
