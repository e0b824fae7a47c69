"""The agents whose code this worker has, and their code made ready for a run's configuration."""

import importlib.util
import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from stepfleet.orchestrator.agents.agent import Agent, criteria_of, reasoner_of
from stepfleet.orchestrator.agents.config import AgentConfig, ToolRef
from stepfleet.orchestrator.agents.planning import UPDATE_PLAN
from stepfleet.orchestrator.agents.reasoner import Reasoner
from stepfleet.orchestrator.agents.sub_agents import HandoffTool
from stepfleet.orchestrator.batches.files.openai_format import PLAIN_AGENT
from stepfleet.orchestrator.continuation import ContinuationCriteria
from stepfleet.orchestrator.errors import AgentMemoryError, ConfigurationError
from stepfleet.orchestrator.memory.policy import Memory
from stepfleet.orchestrator.memory.pruning import CustomPolicy, find_policy
from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.protocol.waiting import TakenCall
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest, ModelSettings
from stepfleet.orchestrator.records.run.trace import ANSWER_TOOLS
from stepfleet.orchestrator.tools import Tool, ToolRegistry, tool_catalog
from stepfleet.orchestrator.tools.middleware import through_model
from stepfleet.worker.agents.response_cache import ResponseCache
from stepfleet.worker.agents.streaming import Generate, Started, Streaming
from stepfleet.worker.attempt.sanitize import storable
from stepfleet.worker.models import Models
from stepfleet.worker.ports import Around, Call

if TYPE_CHECKING:
    from stepfleet.worker.toolbox.mcp import Sessions


def check_sources(agents: Sequence[Agent]) -> None:
    """Raise `ConfigurationError` where an agent has MCP servers and the extra is missing."""
    for agent in agents:
        if agent.tools.servers and importlib.util.find_spec("mcp") is None:
            msg = (
                f"agent {agent.name!r} has the MCP server {agent.tools.servers[0].name!r}, and "
                "this worker lacks the package mcp; install stepfleet[mcp]"
            )
            raise ConfigurationError(msg)


def sources_of(agents: Sequence[Agent]) -> "Sessions | None":
    """Connect to the servers of all agents, in the background; None where there are none.

    Raises `ConfigurationError` as `check_sources` does.
    """
    servers = [server for agent in agents for server in agent.tools.servers]
    if not servers:
        return None
    check_sources(agents)
    # The protocol's package takes seconds to import.
    from stepfleet.worker.toolbox.mcp import Sessions  # noqa: PLC0415

    return Sessions(servers)


log = logging.getLogger(__name__)


def _as_it_is(call: Call) -> Call:
    return call


WORKERS_OWN = ("base_url", "api_key_env", "organization")


class LocalAgent:
    """What of an agent is code, for runs with one configuration."""

    def __init__(
        self,
        agent: Agent,
        tools: ToolRegistry,
        models: Models,
        streaming: Streaming | None = None,
        cache: ResponseCache | None = None,
    ) -> None:
        self.tools = tools
        self.handoffs = {one.name: one.to for one in tools if isinstance(one, HandoffTool)}
        self._agent = agent
        self._models = models
        self._streaming = streaming
        self._cache = cache
        self._config: AgentConfig | None = None
        self._criteria = ContinuationCriteria()
        self._stored: ModelSettings | None = None
        self._settings = agent.config.settings
        self._reasoner: Reasoner | None = None

    def criteria(self, config: AgentConfig) -> ContinuationCriteria:
        """Return the base criteria with the run's limits, then the agent's own.

        Raises `ConfigurationError` where this worker lacks what the configuration names.
        """
        self._make_for(config)
        return self._criteria

    def reasoner(self, config: AgentConfig) -> Reasoner | None:
        """Return how a run of that configuration asks and reads; None for a plain one.

        Raises `ConfigurationError` where this worker lacks what the configuration names.
        """
        self._make_for(config)
        return self._reasoner

    @property
    def context(self) -> Memory | None:
        """What the agent remembers beyond its conversations."""
        return self._agent.context

    def memory_policy(self, reference: str) -> CustomPolicy:
        """Return the agent's own memory policy. Raises `AgentMemoryError`.

        The worker's agent decides which code is imported, never the store.
        """
        own = self._agent.config.memory.custom
        if reference != own:
            msg = (
                f"the run asks for the memory policy {reference!r}; on this worker agent "
                f"{self._agent.name!r} has {own or 'none'}: deploy the same code on all workers"
            )
            raise AgentMemoryError(msg)
        return find_policy(reference)

    def _make_for(self, config: AgentConfig) -> None:
        # Runs of one batch share one configuration object; what it takes is made once.
        if config is self._config:
            return
        reasoner = reasoner_of(config, self._agent)
        self._criteria = criteria_of(config, self._agent, reasoner)
        self._config, self._reasoner = config, reasoner

    def call_for(self, claim: Claim, made: Around) -> Call:
        """Return what makes the model calls of a step, and streams them."""
        generate: Generate = partial(self.generate, made=made)
        if (policy := claim.config.cache) and any(map(policy.covers, claim.config.models)):
            generate = partial(self.generate, config=claim.config, made=made)
        if self._streaming is None:
            return generate
        return self._streaming.call_for(claim, self._agent.subscribers, generate)

    def starts_for(self, work: Claim | TakenCall) -> Started | None:
        """Return what announces the starts of tool calls; None if nobody listens."""
        if self._streaming is None:
            return None
        return self._streaming.starts_for(work, self._agent.subscribers)

    async def generate(
        self,
        request: ModelRequest,
        on_text: Callable[[str], None] | None = None,
        config: AgentConfig | None = None,
        *,
        made: Around = _as_it_is,
    ) -> LLMResponse:
        """Make one call by the agent's own model object, or by the provider it names.

        With the `config` of a run that has a cache policy the answer may be a kept one. This
        worker's code decides which key is sent and where, never the store. `made` goes around each
        call of the provider, inside of the cache and of middleware.
        """
        if not self._agent.middleware:
            return await self._generate(request, on_text, config, made)
        once = partial(self._generate, on_text=on_text, config=config, made=made)
        return await self._through_middleware(request, once)

    async def _through_middleware(self, request: ModelRequest, once: Call) -> LLMResponse:
        answered: list[LLMResponse] = []

        async def noted(request: ModelRequest) -> LLMResponse:
            answered.append(await once(request))
            return answered[-1]

        try:
            return storable(await through_model(self._agent.middleware, request, noted))
        except Exception:
            for one in answered:  # what middleware refuses must not be the answer once more
                if one.cache is not None:
                    self.forget_answer(one.cache.key)
            raise

    def service(self, request: ModelRequest) -> str:
        """Return the name of what answers the request: an address and a model."""
        if self._agent.llm is not None:
            return f"agent {self._agent.name}'s own model"
        return self._models.service(self._with_trusted(request))

    def forget_answer(self, key: str) -> None:
        """Let the response cache drop an answer that has failed by what it means."""
        if self._cache is not None:
            self._cache.forget(key)

    async def _generate(
        self,
        request: ModelRequest,
        on_text: Callable[[str], None] | None,
        config: AgentConfig | None,
        made: Around,
    ) -> LLMResponse:
        trusted = self._with_trusted(request)
        llm = self._agent.llm
        policy = config.cache if config else None
        call = made(partial(self._models.generate, llm=llm, on_text=on_text))
        if not config or not policy or not self._cache or not policy.covers(request.model):
            return await call(trusted)
        return await self._cache.answer(trusted, config, call, llm=llm, on_text=on_text)

    def _with_trusted(self, request: ModelRequest) -> ModelRequest:
        """Return the request with the settings that are the worker's own."""
        # Runs of one batch share one settings object; the worker's own are put in once.
        if request.settings is not self._stored:
            own, stored = self._agent.config.settings, request.settings
            changes = {name: getattr(own, name) for name in WORKERS_OWN}
            changes = {
                name: given for name, given in changes.items() if given != getattr(stored, name)
            }
            self._settings = stored.model_copy(update=changes) if changes else stored
            self._stored = stored
        if self._settings is request.settings:
            return request
        return request.model_copy(update={"settings": self._settings})


class LocalAgents:
    """Finds an agent's code by a run's configuration."""

    def __init__(
        self,
        agents: Iterable[Agent],
        models: Models,
        streaming: Streaming | None = None,
        sources: "Sessions | None" = None,
        cache: ResponseCache | None = None,
    ) -> None:
        self._agents = {agent.name: agent for agent in agents}
        self._models = models
        self._streaming = streaming
        self._sources = sources
        self._cache = cache
        self._ready: dict[Hashable, LocalAgent] = {}
        self._newest: tuple[AgentConfig, LocalAgent] | None = None

    def find(self, config: AgentConfig) -> LocalAgent:
        """Return the code for `config`. Raises `ConfigurationError` where it is not here."""
        # Runs of one batch share one configuration object.
        if self._newest is not None and self._newest[0] is config:
            return self._newest[1]
        key = (config.name, config.tools, config.mcp_servers, config.special_tools)
        if key not in self._ready:
            self._ready[key] = self._make_ready(config)
        self._newest = config, self._ready[key]
        return self._ready[key]

    def _make_ready(self, config: AgentConfig) -> LocalAgent:
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
        # The worker's agent decides which tools a run may use, whatever else is installed here.
        allowed = {one.name for one in (*agent.tools, *agent.earlier_tools)}
        missing = [ref.name for ref in config.tools if ref.name not in allowed]
        if missing:
            raise _missing(config, "tool", missing[0], ", or name it in the agent's earlier_tools")
        tools = ToolRegistry().process(_tool_of(agent, ref) for ref in config.tools)
        tools.middleware = agent.middleware
        if config.mcp_servers:
            tools = self._with_servers(agent, tools, config)
        return LocalAgent(agent, tools, self._models, self._streaming, self._cache)

    def _with_servers(self, agent: Agent, tools: ToolRegistry, config: AgentConfig) -> ToolRegistry:
        servers = {one.name: one for one in agent.tools.servers}
        missing = [ref.name for ref in config.mcp_servers if ref.name not in servers]
        if missing:
            raise _missing(config, "MCP server", missing[0])
        if self._sources is None:
            msg = f"agent {config.name!r} has MCP servers, and this worker connects to none"
            raise ConfigurationError(msg)
        reserved = (*config.special_tools, *ANSWER_TOOLS, UPDATE_PLAN)
        wanted = (servers[ref.name] for ref in config.mcp_servers)
        return self._sources.registry(tools, wanted, reserved)


def _missing(config: AgentConfig, kind: str, name: str, otherwise: str = "") -> ConfigurationError:
    return ConfigurationError(
        f"agent {config.name!r} on this worker has no {kind} {name!r}, which the run was started "
        f"with; deploy it again under that name{otherwise}"
    )


def _tool_of(agent: Agent, ref: ToolRef) -> Tool[..., Any]:
    """Return the version of a tool that the run began with, or else what the agent has now.

    The tool is one of the agent's, by its name.
    """
    own = agent.tools.get(ref.name) if ref.name in agent.tools else None
    if own is not None and own.version == ref.version:
        return own
    named = [one for one in agent.earlier_tools if one.name == ref.name]
    if exact := [one for one in named if one.version == ref.version]:
        return exact[0]
    if own is not None and (earlier := tool_catalog().beside(own, ref.version)):
        return earlier
    log.warning(
        "a run of agent %r began with version %s of tool %r; this worker has another and uses it: "
        "keep the earlier one in the agent's earlier_tools, or in the worker's tool_catalog()",
        agent.name,
        ref.version,
        ref.name,
    )
    return own if own is not None else named[-1]
