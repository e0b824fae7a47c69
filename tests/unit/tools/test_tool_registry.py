from typing import Any

import pytest

from stepfleet.orchestrator import Agent, ConfigurationError, tool
from stepfleet.orchestrator.errors import ToolArgumentsError, ToolNotFoundError
from stepfleet.orchestrator.tools import ToolRegistry, registry_of


@tool
def search(query: str) -> str:
    """Search."""
    return f"found {query}"


OTHER = Agent("other", model="openai:m")


class Echo:
    name = "echo"
    description = "Echoes."
    schema: Any = {"type": "object", "properties": {"text": {"type": "string"}}}  # noqa: RUF012

    async def execute(self, **kwargs: Any) -> Any:
        return kwargs


async def test_a_mixed_list_is_registered_listed_and_executed_by_name() -> None:
    """TOOL-02: a tool object and a decorated function."""
    registry = ToolRegistry().process([Echo(), search])
    assert [spec.name for spec in registry.specs()] == ["echo", "search"]
    assert registry.specs()[1].parameters["required"] == ["query"]
    assert "echo" in registry
    assert len(registry) == 2
    assert await registry.execute("search", {"query": "x"}) == "found x"
    assert await registry.execute("echo", {"text": "y"}) == {"text": "y"}


async def test_an_argument_called_self_reaches_the_check() -> None:
    """TOOL-10: no argument's name collides with Python's."""
    with pytest.raises(ToolArgumentsError, match="field 'self' is not known"):
        await registry_of([search]).execute("search", {"query": "x", "self": 1})


def test_an_unknown_name_raises_and_close_names_are_reported() -> None:
    """TOOL-04: ToolNotFoundError."""
    registry = registry_of([search])
    with pytest.raises(ToolNotFoundError, match=r"tool 'serach' .* did you mean 'search'\?"):
        registry.get("serach")
    with pytest.raises(ToolNotFoundError, match="on offer: search"):
        registry.get("zzz")
    with pytest.raises(ToolNotFoundError, match="no tools are on offer"):
        ToolRegistry().get("zzz")


def test_a_name_cannot_be_registered_twice() -> None:
    """TOOL-02: duplicates are refused."""
    with pytest.raises(ConfigurationError, match="tool 'search' appears twice"):
        registry_of([search, search])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (len, "function 'len' is not a tool; put @tool above it"),
        (Echo, "tool 'Echo' is a class; give an instance of it"),
        (OTHER, "agent 'other' is not a tool; write it into agents=[...], or give its as_tool()"),
        (3, "type 'int' is not a tool; it lacks name, description, schema, execute"),
    ],
)
def test_what_is_no_tool_is_refused_with_the_fix(given: Any, says: str) -> None:
    """TOOL-02"""
    with pytest.raises(ConfigurationError) as caught:
        registry_of([given])
    assert says in caught.value.message
    with pytest.raises(ConfigurationError) as named:
        Agent("lead", model="openai:m", tools=[given])
    assert named.value.message.startswith("agent 'lead': field 'tools': ")
    assert says in named.value.message


@pytest.mark.parametrize(("given", "kind"), [(3, "an int"), ("module:add", "a str")])
def test_tools_that_are_no_list_are_refused_by_their_field(given: Any, kind: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Agent("lead", model="openai:m", tools=given)
    assert caught.value.message == f"agent 'lead': field 'tools' is {kind}; write a list of tools"
