"""Agents as tools of other agents: a call starts a run of its own, whose answer is its result."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.agents.prompt import fields_of
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.answers import Awaited
from stepfleet.orchestrator.tools import Tool
from stepfleet.orchestrator.tools.definition import ToolOptions
from stepfleet.orchestrator.tools.schemas.checks import checker_of
from stepfleet.orchestrator.tools.schemas.handles import schema_of

INPUT = "input"
_SHOWN = 300


class Configured(Protocol):
    """An agent, as far as its tool needs it."""

    @property
    def config(self) -> AgentConfig:
        """Its configuration."""


@dataclass(frozen=True, eq=False)
class AgentTool(Tool[..., Any]):
    """A tool whose call is a run of `agent`. Its arguments are that run's input."""

    agent: Configured | None = None

    @property
    def config(self) -> AgentConfig:
        """The configuration of the agent whose runs the calls are."""
        if self.agent is None:
            raise ConfigurationError(f"tool {self.name!r} has no agent; make it by Agent.as_tool()")
        return self.agent.config

    def input_of(self, arguments: Mapping[str, Any]) -> Any:
        """Return the input of a run for a call: text, or a dict that the agent's prompt words."""
        if self.config.prompt is None and self.schema["properties"].keys() == {INPUT}:
            return arguments[INPUT]
        return dict(arguments)


def agent_tool(
    agent: Configured, name: str | None, description: str | None, input_type: Any
) -> AgentTool:
    """Return the tool that starts runs of `agent` (see `Agent.as_tool`)."""
    config = agent.config
    called = name or re.sub(r"[^A-Za-z0-9_-]+", "_", config.name)[:64]
    schema = _schema(config, input_type)

    def start(**_: Any) -> NoReturn:
        msg = f"agent {config.name!r} runs on workers of a fleet; submit a run of its caller"
        raise ConfigurationError(msg)

    return AgentTool(
        name=called,
        description=_description(config) if description is None else description,
        schema=schema,
        function=start,
        check=checker_of(called, schema),
        options=ToolOptions(queue=Awaited.RUN, idempotent=True),
        agent=agent,
    )


def tools_of_agents(agents: Iterable[Any], owner: str) -> Iterator[AgentTool]:
    """Return the tools of an agent's `agents`. Raises `ConfigurationError` for anything else."""
    for one in agents:
        as_tool = getattr(one, "as_tool", None)
        if as_tool is None:
            kind = type(one).__name__
            msg = f"agent {owner!r}: field 'agents' holds a {kind}; give Agent objects"
            raise ConfigurationError(msg)
        yield as_tool()


def _schema(config: AgentConfig, input_type: Any) -> dict[str, Any]:
    if input_type is not None:
        return schema_of(input_type).schema
    names = fields_of(config.prompt) if config.prompt else [INPUT]
    described = {} if config.prompt else {"description": "What the agent is to do, in full."}
    text = {"type": "string", **described}
    return {
        "type": "object",
        "properties": dict.fromkeys(names, text),
        "required": names,
        "additionalProperties": False,
    }


def _description(config: AgentConfig) -> str:
    about = " ".join(config.instructions.split())
    shown = about if len(about) <= _SHOWN else f"{about[:_SHOWN]}..."
    return f"Have agent {config.name} do a task, and get its answer. {shown}".strip()
