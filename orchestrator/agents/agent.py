"""An agent in code: its configuration, and the parts that cannot be stored, such as tools.

A run stores the configuration it started with; workers find the code by the agent's name.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from pydantic import ValidationError

from stepfleet.orchestrator.agents.answers.special import SpecialTool
from stepfleet.orchestrator.agents.assembly import (
    check_contract,
    check_reasoning,
    contract_of,
    reasoning_of,
    strategy_of,
)
from stepfleet.orchestrator.agents.config import AgentConfig, ToolRef
from stepfleet.orchestrator.agents.keywords import AgentKeywords
from stepfleet.orchestrator.agents.reasoner import Reasoner
from stepfleet.orchestrator.agents.strategies import Strategy, stored_name
from stepfleet.orchestrator.agents.sub_agents import (
    AgentTool,
    HandoffTool,
    agent_tool,
    handoff_tool,
    tools_of_agents,
    tools_of_handoffs,
)
from stepfleet.orchestrator.continuation import (
    CanDecideToContinue,
    ContinuationCriteria,
    base_criteria,
)
from stepfleet.orchestrator.continuation.drivers import WorkAssumed
from stepfleet.orchestrator.continuation.error_policy import (
    ErrorContextResolver,
    ErrorPolicy,
    resolve,
)
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.events.subscribers import Subscribers
from stepfleet.orchestrator.memory.protocol import Memory
from stepfleet.orchestrator.models.llm import LLM
from stepfleet.orchestrator.records.calls.answers import Awaited
from stepfleet.orchestrator.records.text.articles import with_article
from stepfleet.orchestrator.records.text.validation import explain_invalid
from stepfleet.orchestrator.tools import Middleware, Tool, ToolRegistry, registry_of, tools_of
from stepfleet.orchestrator.tools.schemas.bounded_json import check_nesting
from stepfleet.orchestrator.tools.schemas.handles import schema_of

CUSTOM_MODEL = "custom:"


@dataclass(frozen=True, init=False)
class Agent:
    """An agent as code: a configuration, its tools, and its further criteria.

    Every field of `AgentConfig` is a keyword argument. `model` is a `provider:name` string, a list
    of them (the next one answers while one is out) or an object with the `LLM` protocol.
    `criteria` are appended to the base set. `context` is
    its memory beyond conversations, read before each model call. `strategy` is an
    object, a registered name or a `module:attribute` reference, made with `strategy_options`.
    `output_type` is the type of its answer's data: one that pydantic knows, or a JSON Schema.
    `special_tools` are calls that may end a run, answered by their own handlers.
    `middleware` goes around its model and tool calls, the first one outermost. `earlier_tools`
    are for runs that began with them; new runs are not offered any. `agents` are tools too: a
    call starts a run of that agent, and waits for its answer. `handoffs` are agents, or names of
    agents, that go on with the run in its place where the model calls `transfer_to_NAME`.
    Raises `ConfigurationError` that names the field and the fix.
    """

    config: AgentConfig
    tools: ToolRegistry
    criteria: tuple[CanDecideToContinue, ...] = ()
    llm: LLM | None = None
    failures: ErrorContextResolver | None = None
    subscribers: Subscribers | None = None
    context: Memory | None = None
    strategy: Strategy | None = None
    special_tools: tuple[SpecialTool, ...] = ()
    middleware: tuple[Middleware, ...] = ()
    earlier_tools: tuple[Tool[..., Any], ...] = ()

    def __init__(  # noqa: PLR0913 - one argument per thing that no record can hold
        self,
        name: str,
        *,
        model: str | Sequence[str] | LLM,
        tools: Iterable[Any] = (),
        criteria: Iterable[CanDecideToContinue] = (),
        failures: ErrorContextResolver | None = None,
        subscribers: Subscribers | None = None,
        context: Memory | None = None,
        strategy: Strategy | str | None = None,
        output_type: Any = None,
        special_tools: Iterable[SpecialTool] = (),
        middleware: Iterable[Middleware] = (),
        earlier_tools: Iterable[Any] = (),
        agents: Iterable["Agent"] = (),
        handoffs: Iterable["Agent | HandoffTool | str"] = (),
        **config: Unpack[AgentKeywords],
    ) -> None:
        others = (*tools_of_agents(agents, name), *tools_of_handoffs(handoffs, name))
        registry = _registry(name, tools, others)
        specials = tuple(special_tools)
        custom = not isinstance(model, str | list | tuple)
        fields = {
            "name": name,
            "model": f"{CUSTOM_MODEL}{type(model).__name__}" if custom else _named(name, model),
            "tools": tuple(
                ToolRef(name=one.name, version=str(getattr(one, "version", "1")))
                for one in registry
            ),
            "mcp_servers": tuple(
                ToolRef(name=one.name, version=one.version) for one in registry.servers
            ),
            **({} if strategy is None else {"strategy": stored_name(strategy)}),
            **({} if output_type is None else {"output_schema": _schema(name, output_type)}),
            "special_tools": tuple(str(getattr(one, "name", one)) for one in specials),
            **config,
        }
        check_nesting(fields.get("metadata"), "metadata")
        try:
            stored = AgentConfig.model_validate(fields)
        except ValidationError as error:
            why = explain_invalid(error, record=AgentConfig)
            raise ConfigurationError(f"agent {name!r}: {why}") from None
        stored.check_models()
        check_contract(stored, specials)
        vars(self).update(
            config=stored,
            tools=registry,
            criteria=tuple(criteria),
            llm=model if custom else None,
            failures=failures,
            subscribers=subscribers,
            context=context,
            strategy=strategy_of(stored, strategy),
            special_tools=specials,
            middleware=tuple(middleware),
            earlier_tools=tools_of(earlier_tools),
        )

    @property
    def name(self) -> str:
        """The name under which workers and batches find this agent."""
        return self.config.name

    @property
    def queues(self) -> frozenset[str]:
        """The queues of its tools, and of its sub-agents' tools; each needs workers."""
        tools = (*self.tools, *self.earlier_tools)
        named = (one.options.queue for one in tools)
        own = frozenset(one for one in named if one and not isinstance(one, Awaited))
        return own.union(*(one.queues for one in self.sub_agents))

    @property
    def sub_agents(self) -> tuple["Agent", ...]:
        """The agents whose runs its tools' calls are, and to which it hands runs over."""
        tools = (*self.tools, *self.earlier_tools)
        found = (one.agent for one in tools if isinstance(one, AgentTool | HandoffTool))
        return tuple(one for one in found if isinstance(one, Agent))

    def as_tool(
        self, name: str | None = None, description: str | None = None, input_type: Any = None
    ) -> AgentTool:
        """Return a tool for other agents: a call starts a run of this one, and is its answer.

        `name` is the agent's own by default. The arguments are one text, `input`, or the fields of
        the agent's `prompt`, or those of `input_type`, a type that pydantic knows or a JSON Schema.
        """
        return agent_tool(self, name, description, input_type)

    def as_handoff(self, name: str | None = None, description: str | None = None) -> HandoffTool:
        """Return a tool for other agents' `handoffs`: this agent goes on with the run.

        `name` is `transfer_to_NAME` by default, with the agent's own name.
        """
        return handoff_tool(self, name, description)

    def with_error_policy(self, policy: ErrorPolicy) -> "Agent":
        """Return a copy that follows `policy`."""
        return self._with(error_policy=policy)

    def with_cumulative_timeout(self, seconds: float) -> "Agent":
        """Return a copy whose steps may take `seconds` in all; replaces the wall-clock limit."""
        return self._with(cumulative_timeout=seconds)

    def _with(self, **overrides: Any) -> "Agent":
        changed = copy.copy(self)
        vars(changed)["config"] = self.config.with_overrides(overrides)
        check_reasoning(changed.config, changed.strategy)
        check_contract(changed.config, changed.special_tools)
        return changed


def reasoner_of(config: AgentConfig, agent: Agent) -> Reasoner | None:
    """Return the reasoner of runs of `config`: planning around answer contract and strategy.

    None for a plain agent. Raises `ConfigurationError` where the configuration names a part that
    the agent's code lacks.
    """
    contract = contract_of(config, agent.special_tools)
    return reasoning_of(config, agent.config, agent.strategy, contract)


def criteria_of(
    config: AgentConfig, agent: Agent | None = None, reasoner: Reasoner | None = None
) -> ContinuationCriteria:
    """Return the criteria of a run: the base set with the configured limits, then the agent's.

    The reasoner's criteria stand before the limits: a run that has answered with its last step
    has completed.
    """
    return base_criteria(
        max_steps=config.max_steps,
        token_limit=config.token_limit,
        time_limit=config.time_limit,
        cumulative_timeout=config.cumulative_timeout,
        budget_usd=config.budget_usd,
        error_policy=config.error_policy,
        finish_reasons=config.finish_reasons,
        resolver=agent.failures or resolve if agent else resolve,
        leading=reasoner.criteria() if reasoner else (),
        extra=agent.criteria if agent else (),
    )


def criteria_without_code(config: AgentConfig) -> ContinuationCriteria:
    """Return a run's criteria where the agent's code is not at hand.

    Its drivers are not known, so that limits hold as if work were left.
    """
    return ContinuationCriteria(criteria_of(config), WorkAssumed())


def _registry(agent: str, tools: Any, others: Sequence[Any]) -> ToolRegistry:
    """Return all tools of an agent. Raises `ConfigurationError` that names it and the field."""
    if not isinstance(tools, Iterable) or isinstance(tools, str):
        kind = with_article(type(tools).__name__)
        raise ConfigurationError(f"agent {agent!r}: field 'tools' is {kind}; write a list of tools")
    try:
        return registry_of([*tools, *others])
    except ConfigurationError as error:
        raise ConfigurationError(f"agent {agent!r}: field 'tools': {error.message}") from None


def _named(agent: str, models: Any) -> Any:
    """Return the name of a model, or a list of names. Raises `ConfigurationError`."""
    for one in () if isinstance(models, str) else models or [None]:
        if not isinstance(one, str) or not one:
            msg = (
                f"agent {agent!r}: field 'model': a list names models as 'provider:name'; "
                f"it has {one!r}"
            )
            raise ConfigurationError(msg)
    return models


def _schema(name: str, output_type: Any) -> dict[str, Any]:
    try:
        return schema_of(output_type).schema
    except ConfigurationError as error:
        msg = f"agent {name!r}: field 'output_type': {error.message}"
        raise ConfigurationError(msg) from None


def with_sub_agents(agents: Iterable[Agent]) -> dict[str, Agent]:
    """Return agents, and all whose runs they may start, or who may go on with theirs, by name.

    Raises `ConfigurationError` where two of them have one name.
    """
    found: dict[str, Agent] = {}
    left = list(agents)
    while left:
        agent = left.pop(0)
        known = found.setdefault(agent.name, agent)
        if known is agent:
            left += agent.sub_agents
        elif known.config != agent.config:
            msg = f"two agents are named {agent.name!r}, one in 'agents' or 'handoffs'; rename one"
            raise ConfigurationError(msg)
    return found
