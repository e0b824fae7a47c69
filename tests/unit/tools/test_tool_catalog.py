"""The catalog: versions, references, entry points of installed packages, lazy tools."""

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from stepfleet.orchestrator import Agent, ConfigurationError, lazy_tool, tool
from stepfleet.orchestrator.tools import Tool, ToolCatalog, registry_of

MODULE = '''
"""A module with tools."""

from stepfleet.orchestrator import tool

@tool(version="3")
def shout(text: str) -> str:
    """Say it louder."""
    return text.upper()

@tool
def whisper(text: str) -> str:
    """Say it softer."""
    return text.lower()

both = [shout, whisper]
number = 3
'''
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "plugged_tools.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "plugged_tools"
    sys.modules.pop("plugged_tools", None)


def version_of(number: str) -> Tool[..., str]:
    @tool(name="search", version=number)
    def search(text: str) -> str:
        """Search."""
        return f"{number}: {text}"

    return search


def test_two_versions_are_kept_and_the_newest_is_the_default() -> None:
    """TOOL-19"""
    catalog = ToolCatalog(lambda: ())
    for number in ("1", "10", "9"):
        catalog.register(version_of(number))
    assert catalog.versions("search") == ("1", "9", "10")
    assert catalog.get("search").version == "10"
    assert catalog.get("search", "9").version == "9"


def test_a_version_that_is_taken_by_another_tool_is_refused() -> None:
    catalog = ToolCatalog(lambda: ())
    first = catalog.register(version_of("1"))
    assert catalog.register(first) is first
    with pytest.raises(ConfigurationError, match="another version"):
        catalog.register(version_of("1"))


def test_a_missing_tool_is_reported_with_what_there_is() -> None:
    catalog = ToolCatalog(lambda: ())
    catalog.register(version_of("1"))
    with pytest.raises(ConfigurationError, match="it has: versions 1"):
        catalog.get("search", "2")
    with pytest.raises(ConfigurationError, match="it has: tools search"):
        catalog.get("find")


@pytest.mark.parametrize(
    ("attribute", "names"), [(":shout", ["shout"]), (":both", ["shout", "whisper"])]
)
def test_a_reference_to_an_attribute_names_one_tool_or_several(
    plugin: str, attribute: str, names: list[str]
) -> None:
    """TOOL-20"""
    assert [one.name for one in registry_of([f"{plugin}{attribute}"])] == names


def test_a_module_brings_all_its_tools(plugin: str, tmp_path: Path) -> None:
    """TOOL-20"""
    package = tmp_path / "plugged_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "tools.py").write_text(MODULE)
    found = registry_of(["plugged_package.tools"])
    assert [one.name for one in found] == ["shout", "whisper"]


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("no_such_module:tool", "there is no module 'no_such_module'"),
        ("plugged_tools:none", "has no 'none'"),
        ("plugged_tools:number", "not a tool"),
        ("nobody_has_it", "not in the catalog"),
    ],
)
def test_a_reference_that_leads_nowhere_is_an_error_where_the_agent_is_defined(
    plugin: str, reference: str, said: str
) -> None:
    """TOOL-23: at submit time, and never in mid-run."""
    with pytest.raises(ConfigurationError, match=said):
        Agent("a", model="openai:x", tools=[reference])


def test_an_agents_configuration_remembers_the_versions_of_its_tools(plugin: str) -> None:
    """TOOL-19"""
    agent = Agent("a", model="openai:x", tools=[f"{plugin}:both"])
    assert [(one.name, one.version) for one in agent.config.tools] == [
        ("shout", "3"),
        ("whisper", "1"),
    ]


def test_tools_of_installed_packages_are_found_at_the_first_unknown_name(plugin: str) -> None:
    """TOOL-20"""
    asked: list[str] = []

    def installed() -> list[EntryPoint]:
        asked.append("asked")
        group = "stepfleet.tools"
        broken = EntryPoint("broken", "no_such_module:x", group)
        return [broken, EntryPoint("shout", f"{plugin}:shout", group)]

    catalog = ToolCatalog(installed)
    catalog.register(version_of("1"))
    assert catalog.get("search").version == "1"
    assert asked == []
    assert catalog.get("shout").version == "3"
    with pytest.raises(ConfigurationError):
        catalog.get("whisper")
    assert asked == ["asked"]


async def test_a_lazy_tools_code_is_imported_at_its_first_call(plugin: str) -> None:
    """TOOL-18: neither what the model is told nor the agent's definition needs it."""
    late = lazy_tool(f"{plugin}:shout", name="shout", description="Louder.", schema=SCHEMA)
    agent = Agent("a", model="openai:x", tools=[late])
    assert agent.tools.specs()[0].parameters == SCHEMA
    assert plugin not in sys.modules
    assert await agent.tools.execute("shout", {"text": "hey"}) == "HEY"
    assert plugin in sys.modules


async def test_a_lazy_tool_whose_code_is_missing_says_so_at_its_call() -> None:
    late = lazy_tool("no_such_module:x", name="x", description="", schema=SCHEMA)
    with pytest.raises(ConfigurationError, match="no_such_module"):
        await late.execute(text="hey")


def test_a_lazy_tool_needs_module_and_attribute() -> None:
    with pytest.raises(ConfigurationError, match="module:attribute"):
        lazy_tool("just_a_name", name="x", description="", schema=SCHEMA)


@pytest.mark.parametrize("queue", ["", "two words", "with:colon", 3])
def test_a_queue_that_no_broker_could_carry_is_refused(queue: object) -> None:
    def work(text: str) -> str:
        """Work."""
        return text

    with pytest.raises(ConfigurationError, match="queue must be"):
        tool(queue=queue)(work)  # type: ignore[call-overload]
