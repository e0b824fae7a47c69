"""Which tools a run gets on a worker: those of the worker's own agent, whatever is stored."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from stepfleet.orchestrator import Agent, AgentConfig, ConfigurationError, tool, tool_catalog
from stepfleet.orchestrator.agents.config import ToolRef
from stepfleet.orchestrator.cli.workers import tool_queues
from stepfleet.orchestrator.tools import Tool, ToolCatalog, registry
from stepfleet.worker.agents.local import LocalAgents
from stepfleet.worker.models import Models


@pytest.fixture(autouse=True)
def _fresh_catalog() -> Iterator[None]:
    registry.tool_catalog.cache_clear()
    yield
    registry.tool_catalog.cache_clear()


def named(name: str, version: str = "1", **options: Any) -> Tool[..., Any]:
    @tool(name=name, version=version, **options)
    def made() -> str:
        """Do it."""
        return f"{name} {version}"

    return made


def found(agent: Agent, *refs: tuple[str, str]) -> dict[str, str]:
    """Return names and versions of the tools that a run with `refs` gets."""
    tools = tuple(ToolRef(name=name, version=version) for name, version in refs)
    config = agent.config.model_copy(update={"tools": tools})
    # As a worker reads it: from what is stored.
    stored = AgentConfig.from_json(config.to_json())
    registry = LocalAgents([agent], Models()).find(stored).tools
    return {one.name: one.version for one in registry}


def clerk(*tools: Any, earlier: Any = ()) -> Agent:
    return Agent("clerk", model="openai:m", tools=tools, earlier_tools=earlier)


def test_a_forged_configuration_gets_no_tool_that_the_agent_does_not_list() -> None:
    """TOOL-19, TOOL-23: neither of the catalog nor by a reference."""
    tool_catalog().register(named("delete_all"))
    for forged in ("delete_all", "stepfleet.orchestrator.tools.builtin:http_get", "http_get"):
        with pytest.raises(ConfigurationError, match="earlier_tools"):
            found(clerk(named("look")), ("look", "1"), (forged, "1"))


def test_a_forged_configuration_gets_no_tool_of_a_package_that_has_the_same_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TOOL-19: what else is installed on a worker is not its agents' tools."""
    there = EntryPoint("look", "elsewhere.tools:look", registry.GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda _: named("look", "9"))
    strangers = ToolCatalog(lambda: [there])
    own = named("look")
    assert strangers.find("look", "9") is not None
    assert strangers.beside(own, "9") is None
    strangers.register(named("look", "8"))
    assert strangers.beside(own, "8") is not None


def test_an_earlier_version_of_a_package_stands_beside_its_newer_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TOOL-19"""
    both = [named("look", "1"), named("look", "2")]
    monkeypatch.setattr(EntryPoint, "load", lambda _: both)
    known = ToolCatalog(lambda: [EntryPoint("look", "geography.tools:both", registry.GROUP)])
    assert known.beside(known.get("look"), "1") is both[0]


def test_a_run_keeps_a_tool_that_its_agent_names_as_an_earlier_one() -> None:
    """TOOL-19: new runs are not offered it."""
    agent = clerk(
        named("look", "3"), earlier=[named("look", "2"), named("drop", "1"), named("look", "1")]
    )
    assert [(one.name, one.version) for one in agent.config.tools] == [("look", "3")]
    assert found(agent, ("look", "1"), ("drop", "1")) == {"look": "1", "drop": "1"}
    assert found(agent, ("look", "3")) == {"look": "3"}


def test_another_version_than_any_that_is_here_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """TOOL-19"""
    agent = clerk(named("look", "3"), earlier=[named("drop", "2")])
    assert found(agent, ("look", "1"), ("drop", "1")) == {"look": "3", "drop": "2"}
    assert caplog.text.count("earlier_tools") == 2


def test_earlier_tools_are_named_by_reference_and_their_queues_are_served() -> None:
    tool_catalog().register(named("look", "1"))
    tool_catalog().register(named("look", "2"))
    agent = clerk(earlier=["look@1", named("render", queue="gpu")])
    assert [(one.name, one.version) for one in agent.earlier_tools] == [
        ("look", "1"),
        ("render", "1"),
    ]
    assert tool_queues([agent]) == ("gpu",)
