"""The agents whose code this worker has, and their code made ready for a run's configuration."""

from collections.abc import Iterable

from stepfleet.orchestrator.agent import Agent, criteria_of
from stepfleet.orchestrator.config import AgentConfig
from stepfleet.orchestrator.continuation import ContinuationCriteria
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.openai_batch import PLAIN_AGENT
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest
from stepfleet.orchestrator.tools import ToolRegistry
from stepfleet.worker.models import Models

WORKERS_OWN = ("base_url", "api_key_env", "organization")


class LocalAgent:
    """What of an agent is code, for runs with one configuration."""

    def __init__(self, agent: Agent, tools: ToolRegistry, models: Models) -> None:
        self.tools = tools
        self._agent = agent
        self._models = models
        self._config: AgentConfig | None = None
        self._criteria = ContinuationCriteria()

    def criteria(self, config: AgentConfig) -> ContinuationCriteria:
        """Return the base criteria with the run's limits, then the agent's own."""
        # Runs of one batch share one configuration object; its criteria are made once.
        if config is not self._config:
            self._config, self._criteria = config, criteria_of(config, self._agent)
        return self._criteria

    async def generate(self, request: ModelRequest) -> LLMResponse:
        """Make one call by the agent's own model object, or by the provider it names.

        Where a key is sent, and which, says this worker's code and never the store.
        """
        settings = self._agent.config.settings
        trusted = {name: getattr(settings, name) for name in WORKERS_OWN}
        asked = request.settings.model_copy(update=trusted)
        return await self._models.generate(
            request.model_copy(update={"settings": asked}), llm=self._agent.llm
        )


class LocalAgents:
    """Finds an agent's code by a run's configuration."""

    def __init__(self, agents: Iterable[Agent], models: Models) -> None:
        self._agents = {agent.name: agent for agent in agents}
        self._models = models
        self._ready: dict[tuple[str, tuple[str, ...]], LocalAgent] = {}

    def find(self, config: AgentConfig) -> LocalAgent:
        """Return the code for `config`. Raises `ConfigurationError` where it is not here."""
        names = tuple(tool.name for tool in config.tools)
        key = (config.name, names)
        if key not in self._ready:
            self._ready[key] = self._make_ready(config, names)
        return self._ready[key]

    def _make_ready(self, config: AgentConfig, names: tuple[str, ...]) -> LocalAgent:
        agent = self._agents.get(config.name)
        if agent is None and config.name == PLAIN_AGENT:
            agent = Agent(config.name, model=config.model)
        if agent is None:
            known = ", ".join(sorted(self._agents)) or "none"
            msg = (
                f"this worker does not have agent {config.name!r} (it has: {known}); "
                "start workers with --agents naming its module"
            )
            raise ConfigurationError(msg)
        missing = [name for name in names if name not in agent.tools]
        if missing:
            msg = (
                f"agent {config.name!r} on this worker has no tool {missing[0]!r}, "
                "which the run was started with; deploy the tool again under that name"
            )
            raise ConfigurationError(msg)
        tools = ToolRegistry().process(agent.tools.get(name) for name in names)
        return LocalAgent(agent, tools, self._models)
