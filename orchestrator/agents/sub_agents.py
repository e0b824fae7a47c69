"""Agents as tools of other agents: a call starts a run of its own, or hands its run over."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.agents.prompt import fields_of
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.calls.answers import Awaited
from stepfleet.orchestrator.records.text.validation import with_article
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


def tools_of_agents(agents: Any, owner: str) -> Iterator[AgentTool]:
    """Return the tools of an agent's `agents`. Raises `ConfigurationError` for anything else."""
    if not isinstance(agents, Iterable):
        kind = with_article(type(agents).__name__)
        msg = f"agent {owner!r}: field 'agents' is {kind}; write a list of Agent objects"
        raise ConfigurationError(msg)
    for one in agents:
        as_tool = None if isinstance(one, type) else getattr(one, "as_tool", None)
        if as_tool is None:
            kind = with_article(type(one).__name__)
            msg = f"agent {owner!r}: field 'agents' holds {kind}; give Agent objects"
            raise ConfigurationError(msg)
        yield as_tool()


@dataclass(frozen=True, eq=False)
class HandoffTool(Tool[..., Any]):
    """A tool whose call has the agent `to` continue the run. `agent` is that agent, if given."""

    to: str = ""
    agent: Configured | None = None


_REASON = {
    "type": "object",
    "properties": {"reason": {"type": "string", "description": "Why, in a sentence."}},
    "additionalProperties": False,
}


def handoff_tool(
    agent: Configured | str, name: str | None = None, description: str | None = None
) -> HandoffTool:
    """Return the tool that hands a run over to `agent` (see `Agent.as_handoff`)."""
    to = agent if isinstance(agent, str) else agent.config.name
    called = name or f"transfer_to_{re.sub(r'[^A-Za-z0-9_-]+', '_', to)}"[:64]
    about = "" if isinstance(agent, str) else _about(agent.config)

    def transfer(reason: str = "") -> str:
        del reason  # it is kept in the call
        return f"Agent {to} goes on with this conversation."

    said = f"Hand this conversation over to agent {to}, who goes on with it. {about}".strip()
    return HandoffTool(
        name=called,
        description=said if description is None else description,
        schema=_REASON,
        function=transfer,
        check=checker_of(called, _REASON),
        options=ToolOptions(read_only=True, thread=False),
        to=to,
        agent=None if isinstance(agent, str) else agent,
    )


def tools_of_handoffs(handoffs: Any, owner: str) -> Iterator[HandoffTool]:
    """Return the tools of an agent's `handoffs`: agents, their names, or tools of `as_handoff`.

    Raises `ConfigurationError` for anything else, and for a transfer to the agent itself.
    """
    if isinstance(handoffs, str):
        msg = f"agent {owner!r}: field 'handoffs' is a text; write a list, as [{handoffs!r}]"
        raise ConfigurationError(msg)
    if not isinstance(handoffs, Iterable):
        kind = with_article(type(handoffs).__name__)
        msg = f"agent {owner!r}: field 'handoffs' is {kind}; write a list of agents or names"
        raise ConfigurationError(msg)
    for one in handoffs:
        if isinstance(one, str | HandoffTool):
            made = handoff_tool(one) if isinstance(one, str) else one
        elif hasattr(one, "as_handoff"):
            made = one.as_handoff()
        else:
            kind = with_article(type(one).__name__)
            msg = f"agent {owner!r}: field 'handoffs' holds {kind}; give agents or their names"
            raise ConfigurationError(msg)
        if not made.to:
            raise ConfigurationError(f"agent {owner!r}: field 'handoffs' holds an empty name")
        if made.to == owner:
            msg = f"agent {owner!r}: field 'handoffs': it cannot hand over to itself; leave it out"
            raise ConfigurationError(msg)
        yield made


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
    return f"Have agent {config.name} do a task, and get its answer. {_about(config)}".strip()


def _about(config: AgentConfig) -> str:
    about = " ".join(config.instructions.split())
    return about if len(about) <= _SHOWN else f"{about[:_SHOWN]}..."
