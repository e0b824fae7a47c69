"""What of a checkpoint's configuration is believed: a file must choose neither code nor addresses.

Pure. The rest is taken from the agent as its workers announced it.
"""

from typing import Any

from stepfleet.orchestrator.agents.config import NOT_PER_RUN, AgentConfig
from stepfleet.orchestrator.errors import ConfigurationError

_CHECKED = ("name", "tools")


def of_agent(config: AgentConfig, known: AgentConfig) -> AgentConfig:
    """Return a checkpoint's configuration with what only the agent's code may say from `known`.

    Raises `ConfigurationError` where the agent has not the tools that the run had.
    """
    there = {tool.name for tool in known.tools}
    missing = [tool.name for tool in config.tools if tool.name not in there]
    if missing:
        msg = (
            f"agent {known.name!r} has no tool {missing[0]!r}, which the checkpoint's run had; "
            "deploy it again, or restore with the agent that shall go on"
        )
        raise ConfigurationError(msg)
    own: dict[str, Any] = {}
    for name in NOT_PER_RUN:
        whole, _, part = name.partition(".")
        if name in _CHECKED:
            continue
        if part:
            fields = own.get(whole) or getattr(config, whole).model_dump()
            own[whole] = {**fields, part: getattr(getattr(known, whole), part)}
        else:
            own[whole] = getattr(known, whole)
    return AgentConfig.model_validate({**config.model_dump(), **own})
